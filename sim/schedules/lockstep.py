"""Two batches in lockstep: a schedule in which they take turns, token by token, and may exchange their tokens.

A pair of batches has ``2 * batch`` sequences. In a **round** each of them decodes one token, in two steps, one of each
batch. Before a round the tokens are split into two batches anew (`sim.schedules.grouping`), by what is predicted of
just these tokens. As soon as a sequence ends the next one prefills, alone. When a batch's worth of sequences or fewer
are left, they run as one batch.
"""

from dataclasses import dataclass, field

import numpy as np

from ground.errors import InputError
from sim.schedules.grouping import BY_PREDICTION, SPLITS, Regroup
from sim.workload import Schedule, sequence_parts
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

FRESH = -1
"""The batch of a sequence that was in none yet."""


@dataclass
class _Running:
    """A sequence that decodes: its next row, the row after its last one, and its batch, 0 or 1."""

    row: int
    end: int
    batch: int = FRESH


@dataclass
class _Steps:
    """A schedule as it grows."""

    phase: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    moved: list[bool] = field(default_factory=list)

    def add(self, phase: int, rows: list[int], begin: int, moved: list[bool]) -> None:
        self.phase.append(phase)
        self.rows.append(rows)
        self.begin.append(begin)
        self.moved += moved


def lockstep(trace: Trace, batch: int, regroup: Regroup, *, pairs: int = 1, seed: int = 0) -> Schedule:
    """The schedule of ``pairs`` of batches in flight, whose rounds take turns.

    ``regroup`` "none" leaves tokens where they are as long as both batches stay equally large. Raises InputError if
    ``batch`` is not positive, predictions are needed that the trace lacks, or a pair is too large for "exact".
    """
    if batch < 1:
        raise InputError(f"batch: {batch} sequences; give at least 1")
    waiting = sequence_parts(trace)[::-1]
    flights: list[list[_Running]] = [[] for _ in range(pairs)]
    steps, splitter = _Steps(), _Splitter(trace, batch, regroup, seed)
    for flight in flights:
        _fill(flight, 2 * batch, waiting, steps)
    while any(flights):
        for flight in flights:
            if flight:
                _round(flight, steps, splitter)
                _fill(flight, 2 * batch, waiting, steps)  # before the other pair's round, which hides its predictions
    rows = steps.rows
    return Schedule(
        np.array(steps.phase, np.int64),
        np.cumsum([0, *map(len, rows)]),
        np.array([row for step in rows for row in step], np.int64),
        # Where nobody looks at the predictions of both batches together, each step is prepared by itself.
        begin=np.array(steps.begin, np.int64) if regroup in BY_PREDICTION else None,
        moved=np.array(steps.moved, bool),
    )


def _fill(flight: list[_Running], most: int, waiting: list[tuple[int, int, int]], steps: _Steps) -> None:
    """Prefill sequences that wait, the next one last, until ``flight`` has as many as it may."""
    while waiting and len(flight) < most:
        begin, decode, end = waiting.pop()
        if decode > begin:
            prompt = list(range(begin, decode))
            steps.add(PREFILL, prompt, len(steps.phase), [False] * len(prompt))
        if end > decode:
            flight.append(_Running(decode, end))


def _round(flight: list[_Running], steps: _Steps, splitter: "_Splitter") -> None:
    """One token of each sequence of ``flight``, in one step or two."""
    before = np.array([one.batch for one in flight])
    batches = splitter.split(np.array([one.row for one in flight]), before)
    begin = len(steps.phase)
    for number in (0, 1):
        members = np.flatnonzero(batches == number)
        if len(members):
            moved = (before[members] != number) & (before[members] != FRESH)
            steps.add(DECODE, [flight[i].row for i in members], begin, moved.tolist())
    for one, number in zip(flight, batches.tolist(), strict=True):
        one.batch = number
        one.row += 1
    flight[:] = [one for one in flight if one.row < one.end]


class _Splitter:
    """Says of the tokens of each round which batch they are in."""

    def __init__(self, trace: Trace, batch: int, regroup: Regroup, seed: int) -> None:
        self._trace, self._batch, self._seed, self._rounds = trace, batch, seed, 0
        self._split = SPLITS.get(regroup)
        self._predicted = trace.predicted_experts if regroup in BY_PREDICTION else None
        if regroup in BY_PREDICTION and self._predicted is None:
            raise InputError(
                f"--regroup {regroup}: {trace.source or 'the trace'} has no array predicted_experts, by which tokens "
                f"are regrouped; expected a trace with predictions (python -m traces predictor predict)"
            )

    def split(self, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
        """The batch (n,) of each of ``rows`` (n,), which were in ``before`` (n,), or FRESH."""
        self._rounds += 1
        if len(rows) <= self._batch:
            first = np.ones(len(rows), bool)
        else:
            size = (len(rows) + 1) // 2
            first = _staying(before, size)
            if self._split is not None:
                paths = self._paths(rows)
                rng = np.random.default_rng([self._seed, self._rounds])
                first = self._split(paths, size, rng, first)
        return self._named(first, rows, before)

    def _paths(self, rows: np.ndarray) -> np.ndarray:
        """Which experts each of ``rows`` is predicted to take (n, L * E) bool: as many a layer as a token takes."""
        trace = self._trace
        paths = np.zeros((len(rows), trace.n_layers, trace.n_experts + 1), bool)  # the last for an id of -1
        if self._predicted is not None:
            named = self._predicted[rows, :, : trace.top_k].astype(np.int64)
            np.put_along_axis(paths, np.where(named < 0, trace.n_experts, named), True, axis=2)
        return paths[:, :, :-1].reshape(len(rows), -1)

    def _named(self, first: np.ndarray, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Call the two groups 0 and 1 so that fewer cached tokens change their batch."""
        cached = np.where(before == FRESH, 0, self._trace.position[rows].astype(np.int64) + 1)
        groups = np.where(first, 0, 1)
        as_is, exchanged = (int(cached[before != names].sum()) for names in (groups, 1 - groups))
        return groups if as_is <= exchanged else 1 - groups


def _staying(before: np.ndarray, size: int) -> np.ndarray:
    """Who is in the first group, of ``size``, if all stay that can: the larger batch, filled up by those that come."""
    larger = int((before == 1).sum() > (before == 0).sum())
    mine = np.flatnonzero(before == larger)[:size]
    fresh, other = np.flatnonzero(before == FRESH), np.flatnonzero(before == 1 - larger)
    # The other batch keeps as many as it may; fresh ones fill what is free in the first.
    first = np.zeros(len(before), bool)
    first[[*mine, *fresh, *other[::-1]][:size]] = True
    return first
