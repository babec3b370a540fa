"""What a round waits for before it begins: the path predictor, and the scheduler that regroups tokens.

Predictor and scheduler work beside the GPU, each on one thing at a time. A prediction needs tokens, which are known
when the step before has sampled them; the scheduler needs the predictions of all tokens that it splits. How much of
this runs while steps do is the **pipeline**:

* ``sequential``: predict, schedule, then run. All begins when the step before the round has ended.
* ``overlapped``: each thing begins as soon as what it needs is there. Of two batches in lockstep the first one's tokens
  are predicted while the second runs; the second one's, and the scheduler, are waited for.
* ``dual-batch``: the same with two pairs of batches in flight. While one pair runs, the other's tokens are predicted
  and regrouped; the keys and values of both take memory.
* ``clairvoyant``: recorded tokens are fed ahead, so that a round is prepared from the begin of the round before it on.
  No system can do that: the tokens are not sampled yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from sim.plan import Plan
from sim.run.observer import Aside
from sim.workload import Schedule
from traces.schema import PREFILL
from traces.trace import Trace

Pipeline = Literal["sequential", "overlapped", "dual-batch", "clairvoyant"]
PIPELINES: tuple[str, ...] = get_args(Pipeline)
PREDICTOR, SCHEDULER = range(2)
LANES: tuple[Aside, ...] = ("predict", "schedule")
PATH_WEIGHTS = 3_790_000
"""Of the paper's predictor, T5-small with d_model 32 and d_ff 2048, where a trace does not say how many its has."""


@dataclass(frozen=True)
class Preparation:
    """Work beside the GPU that steps wait for: N tasks, those of step ``s`` are ``offsets[s]:offsets[s+1]``.

    Tasks of a lane run one after another, in this order. One also waits for those before it of the lanes before its
    own.

    Attributes:
        offsets: (S + 1,) int64.
        lane: PREDICTOR or SCHEDULER (N,).
        after: the step whose end a task waits for (N,), before the one that waits for the task; -1 for none.
        rows: tokens that it is about (N,).
        ns: how long it takes (N,) int64.
    """

    offsets: np.ndarray
    lane: np.ndarray
    after: np.ndarray
    rows: np.ndarray
    ns: np.ndarray


class Lanes:
    """When the tasks of a preparation run, step after step.

    ``ready`` is asked of each step in turn.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._offsets = preparation.offsets.tolist()
        self._tasks = list(
            zip(preparation.lane.tolist(), preparation.after.tolist(), preparation.ns.tolist(), strict=True)
        )
        self._free = [0] * len(LANES)
        self.ran: list[tuple[int, int, int]] = []
        """(lane, begin, end) ns of the tasks of the step that was asked about last."""

    def ready(self, step: int, finish: Sequence[int]) -> int:
        """When the tasks of ``step`` have ended, 0 without any; ``finish`` has the ends of all steps before it."""
        self.ran = []
        ready = 0
        for lane, after, ns in self._tasks[self._offsets[step] : self._offsets[step + 1]]:
            begin = max(finish[after] if after >= 0 else 0, *self._free[: lane + 1])
            self._free[lane] = ready = begin + ns
            self.ran.append((lane, begin, ready))
        return ready


def _tasks(trace: Trace, schedule: Schedule, pipeline: Pipeline) -> Preparation:
    """The tasks of a run, their times still 0.

    A pass of the predictor is about the tokens of a batch, or about a prompt. Where they are told as soon as they are
    known, those that the same step sampled are of one pass, and so are all those whose prompts have just been read. The
    scheduler has a task in every round of two steps. A prompt is known long before, so unless the pipeline is
    sequential it is predicted during the step before its own.
    """
    begin, prefill = _begin(schedule), schedule.phase == PREFILL
    sampled, bounds = _sampled(trace, schedule), schedule.offsets.tolist()
    offsets, tasks = [0], []
    before = 0
    for step in range(schedule.n_steps):
        if begin[step] == step:
            if pipeline == "sequential":
                free = step - 1
            else:
                free = before - 1 if pipeline == "clairvoyant" or prefill[step] else -1
            end = int(np.searchsorted(begin, step, side="right"))
            count = np.diff(bounds[step : end + 1]).tolist()
            known = sampled[bounds[step] : bounds[end]]
            as_known = pipeline not in ("sequential", "clairvoyant") and not prefill[step]
            passes = _passes(known, prefill) if as_known else [(free, rows) for rows in count]
            tasks += [(PREDICTOR, after, rows) for after, rows in passes]
            if len(count) > 1:
                tasks.append((SCHEDULER, free, sum(count)))
            before = step
        offsets.append(len(tasks))
    lane, after, rows = np.array(tasks, np.int64).reshape(-1, 3).T
    return Preparation(np.array(offsets), lane, after, rows, np.zeros(len(rows), np.int64))


def preparation(
    trace: Trace, schedule: Schedule, pipeline: Pipeline, plan: Plan, *, regroups: bool,
    predict_ns: Callable[[int], int], schedule_ns: Callable[[int], int],
) -> Preparation | None:  # fmt: skip
    """What the steps of ``plan`` wait for; None if for nothing.

    A pass of the predictor takes what the plan says of the steps of its round, the longest of them. Where tokens are
    regrouped by predictions (``regroups``), it takes ``predict_ns`` of its tokens at least, and the scheduler takes
    ``schedule_ns`` of all that it splits.
    """
    if not plan.prediction.ahead and not regroups:
        return None
    tasks = _tasks(trace, schedule, pipeline)
    ns = np.zeros(len(tasks.rows), np.int64)
    scheduler = tasks.lane == SCHEDULER
    if regroups:
        for chosen, cost in ((~scheduler, predict_ns), (scheduler, schedule_ns)):
            for rows in np.unique(tasks.rows[chosen]).tolist():
                ns[chosen & (tasks.rows == rows)] = cost(rows)
    if plan.prediction.ahead:
        told = np.zeros(schedule.n_steps, np.int64)
        np.maximum.at(told, _begin(schedule), _ahead_ns(plan, schedule, trace.n_layers))
        step = np.repeat(np.arange(schedule.n_steps), np.diff(tasks.offsets))
        ns = np.maximum(ns, np.where(scheduler, 0, told[step]))
    keep = np.flatnonzero(ns)
    offsets = np.searchsorted(keep, tasks.offsets)
    return Preparation(offsets, tasks.lane[keep], tasks.after[keep], tasks.rows[keep], ns[keep]) if len(keep) else None


def _ahead_ns(plan: Plan, schedule: Schedule, n_layers: int) -> np.ndarray:
    """What ``plan`` predicts at the beginning of each step takes (S,) int64."""
    step, point = np.divmod(plan.prediction.moment, n_layers + 1)
    told = np.zeros(schedule.n_steps, np.int64)
    told[step[point == 0]] = plan.prediction.ns[point == 0]
    return told


def without_ahead(plan: Plan, n_layers: int) -> Plan:
    """``plan`` without the time of the predictions that are part of a preparation."""
    prediction = plan.prediction
    if not prediction.ahead:
        return plan
    ns = np.where(prediction.moment % (n_layers + 1) == 0, 0, prediction.ns)
    return replace(plan, prediction=replace(prediction, ns=ns))


def _begin(schedule: Schedule) -> np.ndarray:
    """The first step of each step's round (S,)."""
    return np.arange(schedule.n_steps) if schedule.begin is None else schedule.begin


def _sampled(trace: Trace, schedule: Schedule) -> np.ndarray:
    """The step that sampled the token of each of the schedule's rows (R,), that of the row before it; -1 for none."""
    step = np.full(trace.n_rows, -1)
    step[schedule.rows] = np.repeat(np.arange(schedule.n_steps), np.diff(schedule.offsets))
    first = np.diff(trace.sequence, prepend=-1) > 0
    return np.where(first, -1, np.roll(step, 1))[schedule.rows]


def _passes(known: np.ndarray, prefill: np.ndarray) -> list[tuple[int, int]]:
    """Passes of the predictor, (the step that it follows, tokens), for tokens sampled in the steps ``known`` (n,)."""
    fresh = (known < 0) | prefill[known]
    passes = list(zip(*(column.tolist() for column in np.unique(known[~fresh], return_counts=True)), strict=True))
    return sorted([*passes, (int(known[fresh].max()), int(fresh.sum()))] if fresh.any() else passes)
