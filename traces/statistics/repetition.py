"""How often a token's choice of experts is that of the token before it, as "Mixtral of Experts" counts it."""

from math import comb

import numpy as np

from traces.statistics.usage import neighbours
from traces.trace import Trace


def repetition(trace: Trace, phase: int, choices: int) -> np.ndarray:
    """(D, L) share of consecutive tokens of which the later takes an expert that the earlier took, by domain and layer.

    Only the router's first ``choices`` of each token count: with 1 it is its first choice that is repeated, with 2 any
    of its first two that is any of the other's (Mixtral of Experts, arXiv 2401.04088, Table 5). Both tokens are of
    ``phase``, next to each other in one sequence, and take an expert in that layer at all. Domains are in the order of
    their names; NaN where a domain has no such pair.
    """
    earlier, later = neighbours(trace, 1, phase)
    before, now = trace.experts[earlier, :, :choices], trace.experts[later, :, :choices]
    same = np.any((now[:, :, :, None] == before[:, :, None, :]) & (now >= 0)[:, :, :, None], axis=(2, 3))
    both = np.any(before >= 0, axis=2) & np.any(now >= 0, axis=2)
    names, number = np.unique(trace.domain, return_inverse=True)
    of_domain = [number[trace.sequence[later]] == at for at in range(len(names))]
    found, pairs = (np.stack([counted[rows].sum(axis=0) for rows in of_domain]) for counted in (same, np.asarray(both)))
    return np.divide(found, pairs, out=np.full(found.shape, np.nan), where=pairs > 0)


def repetition_at_random(experts: int, choices: int) -> float:
    """The share of :func:`repetition` where every token takes any of ``experts`` alike."""
    return 1 - comb(experts - choices, choices) / comb(experts, choices)
