"""A small scorer: experts are worth their decayed uses."""

from typing import NamedTuple

import numpy as np

from sim.scorer import Scorer
from sim.workload import Workload


class Decayed(NamedTuple):
    """Look-ups of the run, where each call's begin, and the uses of each expert."""

    expert: np.ndarray
    offsets: np.ndarray
    uses: np.ndarray
    seen: np.ndarray


def observe(state: Decayed, call: int) -> None:
    """Count the call's look-ups."""
    state.uses[:] *= 0.8
    for i in range(state.offsets[call], state.offsets[call + 1]):
        state.uses[state.expert[i]] += 1.0
    state.seen[0] = call


def worths(state: Decayed, call: int, values: np.ndarray) -> None:
    """Coarse, so that ties occur; an expert that the call needed is worth less for it."""
    for expert in range(len(values)):
        values[expert] = int(state.uses[expert] * 4)
    for i in range(state.offsets[call], state.offsets[call + 1]):
        values[state.expert[i]] -= 3


def decayed(work: Workload, ns: np.ndarray | int = 0, beside: bool = False) -> Scorer:
    """For runs of ``work``, in which a call takes it ``ns``."""
    state = Decayed(
        work.expert.astype(np.int32), work.offsets.astype(np.int64), np.zeros(work.n_layers * work.n_experts),
        np.full(1, -1, np.int64),
    )  # fmt: skip
    state.expert.flags.writeable = state.offsets.flags.writeable = False
    return Scorer(state, observe, worths, np.broadcast_to(ns, work.n_calls).astype(np.int64), beside)
