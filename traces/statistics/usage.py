"""How often a model's experts are used, how evenly, and how often again."""

import numpy as np

from traces.schema import DECODE
from traces.trace import Trace

# Rows compared at once, which bounds memory.
_BLOCK = 4096


def expert_counts(routes: np.ndarray, experts: int) -> np.ndarray:
    """(L, E) int64: how many of the rows ``routes`` (T, L, K) took each of ``experts``; -1 is not counted."""
    return np.stack([np.bincount(ids[ids >= 0], minlength=experts) for ids in np.moveaxis(routes, 1, 0)])


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts (..., E) over their sum; 0 where nothing was counted."""
    return counts / np.maximum(1, counts.sum(axis=-1, keepdims=True))


def entropy(shares: np.ndarray) -> np.ndarray:
    """Shannon entropy in bits, along the last axis."""
    return -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=-1)


def decode_pairs(trace: Trace, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (earlier, later) of one sequence that lie ``distance`` apart, both decode."""
    later = np.arange(distance, trace.n_rows)
    earlier = later - distance
    fits = (trace.sequence[later] == trace.sequence[earlier]) & (trace.phase[earlier] == DECODE)
    return earlier[fits], later[fits]


def reuse(trace: Trace, distance: int = 1) -> np.ndarray:
    """(L,) share of decode activations whose expert the sequence's decode row ``distance`` before took; NaN: none."""
    earlier, later = decode_pairs(trace, distance)
    found, used = np.zeros(trace.n_layers), np.zeros(trace.n_layers)
    for start in range(0, len(later), _BLOCK):
        before, now = trace.experts[earlier[start : start + _BLOCK]], trace.experts[later[start : start + _BLOCK]]
        again = (now[..., None] == before[:, :, None]).any(axis=3)
        found += (again & (now >= 0)).sum(axis=(0, 2))
        used += (now >= 0).sum(axis=(0, 2))
    return np.divide(found, used, out=np.full(trace.n_layers, np.nan), where=used > 0)
