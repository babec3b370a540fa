"""Does a policy peek? Its plan is made again with everything changed that it could not have known yet.

A view hands out all rows at once, so nothing stops a policy from asking at a step's beginning for what its router says
later. The project's own policies are held to this by its tests, moment by moment; a policy from outside is tried at a
few moments of the very trace that it is about to run.
"""

import dataclasses
from operator import attrgetter
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.plan import SWITCHES, Plan
from sim.policies.base import Policy
from sim.workload import Workload
from traces.trace import Trace


def check_blind(policy: Policy, trace: Trace, work: Workload, plan: Plan) -> None:
    """Raise InputError if ``plan``, which ``policy`` made for ``trace``, depends on what comes after some moment."""
    points = work.n_layers + 1
    steps = np.linspace(0, work.schedule.n_steps - 1, 6)[1:-1].astype(int)
    for moment in (steps * points + [0, work.n_layers // 2, 0, 1]).tolist():
        kind = type(policy)
        again = policy.plan(kind.view(blurred(trace, work, moment, kind.foresight), work))
        step, point = divmod(moment, points)
        both = [(*_until(one, moment), *_worths(one, step * work.n_layers + point, work)) for one in (plan, again)]
        if not _same(*both):
            raise InputError(
                f"policy {policy.name}: it peeks: what it decides up to step {step}, point {point} changes with what "
                f"happens later; use only what its view knows at the moment of each request (see docs/policies.md)"
            )


def blurred(trace: Trace, work: Workload, moment: int, foresight: int = 0) -> Trace:
    """``trace`` with every route, embedding, score and prediction changed that is not known at ``moment``.

    Routes of ``foresight`` more layers of the running step stay as they are.
    """
    step, point = divmod(moment, work.n_layers + 1)
    rng = np.random.default_rng(moment)
    offsets, rows = work.schedule.offsets, work.schedule.rows
    unknown = np.zeros((trace.n_rows, work.n_layers), bool)  # routes of these layers are not known
    unknown[rows[offsets[step + 1] :]] = True
    unknown[rows[offsets[step] : offsets[step + 1]], point:] = True
    untold = unknown.copy()
    untold[rows[offsets[step] : offsets[step + 1]], point : point + foresight] = False
    changed: dict[str, Any] = {"experts": _shifted(trace.experts, untold, trace.n_experts, rng)}
    for name in ("lookahead", "prob_experts"):
        if (array := getattr(trace, name)) is not None:
            changed[name] = _shifted(array, unknown, trace.n_experts, rng)
    for name in ("gates", "probs"):
        if (array := getattr(trace, name)) is not None:
            changed[name] = np.where(unknown[:, :, None], array[:, :, ::-1], array)
    to_come = rows[offsets[step + 1] :]
    unread = np.zeros((trace.n_rows, work.n_layers), bool)  # tokens that no predictor has read yet
    unread[to_come] = True
    if (predicted := trace.predicted_experts) is not None and (sure := trace.predicted_probs) is not None:
        changed["predicted_experts"] = _shifted(predicted, unread, trace.n_experts, rng)
        changed["predicted_probs"] = np.where(unread[:, :, None], sure[:, :, ::-1], sure)
    changed["token"] = trace.token.copy()
    changed["token"][to_come] = np.where(trace.token[to_come] >= 0, trace.token[to_come] ^ 1, -1)
    if trace.embeddings is not None:
        decode = trace.decode_rows
        # Level p is known at point p: one level more than routes.
        levels = np.concatenate([unknown[decode].all(axis=1, keepdims=True), unknown[decode]], axis=1)
        present = np.isin(decode, rows[offsets[step] : offsets[step + 1]])
        levels[present, : point + 1] = False
        changed["embeddings"] = np.where(levels[:, :, None], trace.embeddings[:, :, ::-1], trace.embeddings)
    if trace.prefill_embeddings is not None:
        # Those of a prompt are of one level, and known from that point on.
        heard = point >= trace.meta["embedding"]["prefill_layer"]
        later = np.isin(trace.prefill_rows, rows[offsets[step + heard] :])[:, None]
        changed["prefill_embeddings"] = np.where(later, trace.prefill_embeddings[:, ::-1], trace.prefill_embeddings)
    return dataclasses.replace(trace, **changed)


def _shifted(ids: np.ndarray, unknown: np.ndarray, n_experts: int, rng: np.random.Generator) -> np.ndarray:
    """Other experts, distinct as before, where ``unknown`` (T, L); -1 stays."""
    shift = rng.integers(1, max(2, n_experts), unknown.shape)[:, :, None]
    other = ((ids.astype(np.int64) + shift) % n_experts).astype(ids.dtype)
    return np.where(unknown[:, :, None] & (ids >= 0), other, ids)


_OF_ALL_THE_RUN = attrgetter(
    *SWITCHES, "gpu_bytes", "most_bytes", "least_bytes", "discipline", "chunks", "most_issued", "prediction.critical",
    "prediction.prompt_ns", "prediction.before_demands", "prediction.ahead",
)  # fmt: skip
"""What a plan decides once, before the run: not its ``note``, which may say what it likes and changes nothing."""
_OF_THE_HOST = attrgetter("fixed_ns", "read_ns", "shared_ns", "row_ns", "reserved", "beside")


def _until(plan: Plan, moment: int) -> tuple[object, ...]:
    """All that a plan decides up to and at ``moment``."""
    decided: list[object] = [*_OF_ALL_THE_RUN(plan)]
    decided += [plan.eviction if isinstance(plan.eviction, str) else None]  # a rule may be made anew for each plan
    decided += _OF_THE_HOST(plan.host) if plan.host is not None else []
    early = plan.prediction.moment <= moment
    decided += [plan.prediction.moment[early], plan.prediction.ns[early]]
    if plan.requests is not None:
        upto = int(np.searchsorted(plan.requests.moment, moment, side="right"))
        last = plan.requests.offsets[upto]
        decided += [plan.requests.moment[:upto], plan.requests.offsets[: upto + 1]]
        decided += [plan.requests.call[:last], plan.requests.expert[:last], plan.requests.priority[:last]]
    if plan.shares is not None:
        early = plan.shares.moment <= moment
        decided += [plan.shares.moment[early], plan.shares.table[early]]
    if plan.values is not None:
        early = plan.values.moment <= moment
        decided += [plan.values.moment[early], plan.values.table[plan.values.index[early]]]
        decided += [plan.values.layer[early] if plan.values.by_layer else plan.values.layer]
    return tuple(decided)


def _worths(plan: Plan, calls: int, work: Workload) -> list[np.ndarray]:
    """What a plan's scorer, if it has one, makes of so many calls."""
    if plan.scorer is None:
        return []
    plan.scorer.check(work.n_calls)
    return [plan.scorer.after(calls, work.n_layers * work.n_experts)]


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )
