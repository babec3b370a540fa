"""Learn a model's paths from traces: the rule observes their sequences, and remembers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from traces.paths.model import PathModel
from traces.paths.observe import observe
from traces.paths.state import LEARNED, Paths, Run, fresh, untrained
from traces.paths.topic import examples, fitted, strength_of
from traces.probabilities import weights_of
from traces.trace import Trace

RANK = 64
"""Numbers of a topic."""
PASSES = ((0.1, 0.05, 0.1), (0.01, 0.05, 0.03))
"""Steps of learning (`traces.paths.state.RATES`) in each pass over the profile."""
_AT_ONCE = 256  # rows between two words on how far it is
_FEW = 1_000_000  # experts of calls that Python observes in less time than compiling takes


def learn(
    traces: Sequence[Trace], seed: int = 0, rank: int = RANK, seen: Callable[[float], None] = lambda share: None
) -> PathModel:
    """Learn from all sequences of ``traces``, which are of one model; ``seen`` is told the share that is done.

    The topic that a sequence is observed with was fitted to others: so the rule learns how far to trust it. Raises
    InputError if the traces are of different models.
    """
    trace = Trace.concat(traces)
    (_, layers, top_k), experts = trace.experts.shape, trace.n_experts
    learned = untrained(layers, experts, top_k)
    order = np.random.default_rng(seed).permutation(trace.n_sequences)
    halves = [half for half in (order[::2], order[1::2]) if len(half)]
    topics: list[dict[str, np.ndarray]] = []
    if rank and len(halves) > 1:
        known = examples(trace.experts, trace.offsets, experts, seed)
        rows = [np.flatnonzero(np.isin(known.sequence, half)) for half in halves]
        if all(map(len, rows)):
            strength = strength_of(known, rows)
            every = np.arange(len(known.sequence))
            topics = [fitted(known, part, strength, rank) for part in (rows[1], rows[0], every)]
    total, done = len(PASSES) * trace.n_rows, 0
    step = _all if total * layers * experts <= _FEW else _compiled()
    for rates in PASSES:
        for place, half in enumerate(halves):
            if topics:
                learned |= topics[place]
            run = one_by_one(trace, half)
            state = fresh(run, learned, rates)
            for first in range(0, len(run.routes), _AT_ONCE):
                end = min(first + _AT_ONCE, len(run.routes))
                step(state, first * layers, end * layers)
                done += end - first
                seen(done / total)
            learned = {name: getattr(state, name) for name in LEARNED}
    if topics:
        learned |= topics[-1]
    return PathModel.of(learned, _record(traces, trace, seed))


def _record(traces: Sequence[Trace], trace: Trace, seed: int) -> Mapping[str, Any]:
    sources = [{"trace": one.source, "sha256": one.sha256} for one in traces]
    domains = sorted(set(trace.domain.tolist()))
    return {
        "model": trace.meta["model"]["name"], "trained_on": sources, "domains": domains, "rows": trace.n_rows,
        "sequences": trace.n_sequences, "seed": seed,
    }  # fmt: skip


def gate_bytes(gates: np.ndarray | None, routes: np.ndarray) -> np.ndarray:
    """Weights (T, L, K) x 255; where a trace has none, as if all experts of a token weighed the same."""
    if gates is None:
        return np.full(routes.shape, 255 // max(routes.shape[2], 1), np.uint8)
    return np.clip(np.rint(gates.astype(np.float32) * 255), 0, 255).astype(np.uint8)


def one_by_one(trace: Trace, sequences: np.ndarray) -> Run:
    """A run of whole sequences, one after another and each token in a step of its own."""
    part = trace.take(sequences)
    rows = np.arange(part.n_rows)
    return Run(
        np.ascontiguousarray(part.experts), gate_bytes(weights_of(part), part.experts), np.arange(part.n_rows + 1),
        np.zeros(part.n_rows, np.int64), rows - part.offsets[part.sequence], np.ones((part.n_rows, 1), bool),
    )  # fmt: skip


@cache
def _compiled() -> Callable[[Paths, int, int], None]:
    """``_all``, compiled where that can be."""
    try:
        from numba import njit
    except ImportError:
        return _all
    compiled = njit(observe)

    @njit
    def every(state: Paths, first: int, end: int) -> None:
        for call in range(first, end):
            compiled(state, call)

    made: Callable[[Paths, int, int], None] = every
    return made


def _all(state: Paths, first: int, end: int) -> None:
    """Observe all calls from one to before another."""
    for call in range(first, end):
        observe(state, call)
