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


def domain_shares(trace: Trace, phase: int | None = None, *, dealt: bool = False) -> np.ndarray:
    """(D, L, E) share of each domain's activations that an expert of a layer takes, in rows of ``phase`` (None: all).

    Domains are in the order of their names; those without such rows are left out. With ``dealt`` each domain is given
    as many of the rows as it has, but drawn from all of them: what then parts domains is chance.
    """
    rows = np.arange(trace.n_rows) if phase is None else np.flatnonzero(trace.phase == phase)
    of_row = np.unique(trace.domain, return_inverse=True)[1][trace.sequence[rows]]
    if dealt:
        of_row = np.random.default_rng(0).permutation(of_row)
    counts = [expert_counts(trace.experts[rows[of_row == at]], trace.n_experts) for at in np.unique(of_row)]
    return shares(np.stack(counts)) if counts else np.zeros((0, trace.n_layers, trace.n_experts))


def neighbours(trace: Trace, distance: int, phase: int = DECODE) -> tuple[np.ndarray, np.ndarray]:
    """Rows (earlier, later) of one sequence that lie ``distance`` apart, both of ``phase``."""
    later = np.arange(distance, trace.n_rows)
    earlier = later - distance
    fits = (
        (trace.sequence[later] == trace.sequence[earlier])
        & (trace.phase[earlier] == phase)
        & (trace.phase[later] == phase)
    )
    return earlier[fits], later[fits]


def reuse(trace: Trace, distance: int = 1, phase: int = DECODE) -> np.ndarray:
    """(L,) share of activations whose expert the sequence's row ``distance`` before took, both rows of ``phase``.

    NaN where there are none.
    """
    earlier, later = neighbours(trace, distance, phase)
    found, used = np.zeros(trace.n_layers), np.zeros(trace.n_layers)
    for start in range(0, len(later), _BLOCK):
        before, now = trace.experts[earlier[start : start + _BLOCK]], trace.experts[later[start : start + _BLOCK]]
        again = (now[..., None] == before[:, :, None]).any(axis=3)
        found += (again & (now >= 0)).sum(axis=(0, 2))
        used += (now >= 0).sum(axis=(0, 2))
    return np.divide(found, used, out=np.full(trace.n_layers, np.nan), where=used > 0)


def chances(routes: np.ndarray, experts: int) -> np.ndarray:
    """(L, E) share of the rows ``routes`` (T, L, K) that take each expert, of those that take any at the layer."""
    rows = (routes >= 0).any(axis=2).sum(axis=0)
    return expert_counts(routes, experts) / np.maximum(1, rows)[:, None]


def reuse_by_popularity(chance: np.ndarray) -> np.ndarray:
    """(L,) what :func:`reuse` would be of independent rows that take experts with ``chance`` (L, E)."""
    return (chance**2).sum(axis=1) / np.maximum(1e-12, chance.sum(axis=1))
