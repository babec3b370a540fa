"""The experts most used in a profile, by all tokens or by those of the running domain."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from sim.predictors.activations import shares
from sim.view import View
from traces.schema import DECODE
from traces.trace import Trace


class Popularity:
    """Says at every point what share of the profile's decode tokens took each expert of a layer.

    ``by`` counts all of the profile, or the sequences that carry the row's own domain label (all of it for a domain
    that the profile lacks): this variant is told the domain.
    """

    def __init__(self, profile: Sequence[Trace], by: Literal["all", "domain"] = "all") -> None:
        self.name = "popularity" if by == "all" else "popularity by domain"
        self._by = by
        self._counts = counts_by_domain(profile)

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        names, domain = np.unique(view.domain(), return_inverse=True)
        whole = np.sum([*self._counts.values()], axis=0)
        known = [self._counts.get(name, whole) if self._by == "domain" else whole for name in names.tolist()]
        of_layer = shares(np.stack(known).reshape(len(known), view.n_layers, view.n_experts)).astype(np.float32)
        return of_layer[:, list(layers)][domain[view.sequence[view.decoding]]]


def counts_by_domain(profile: Sequence[Trace]) -> dict[str, np.ndarray]:
    """How often decode tokens of each domain of the profile took each expert, (L * E,) int64 a domain."""
    counts: dict[str, np.ndarray] = {}
    for trace in profile:
        width = trace.n_layers * trace.n_experts
        names, domain = np.unique(trace.domain, return_inverse=True)
        decode = np.flatnonzero(trace.phase == DECODE)
        routes = trace.experts[decode].astype(np.int64)
        flat = np.arange(trace.n_layers)[:, None] * trace.n_experts + routes
        key = domain[trace.sequence[decode]][:, None, None] * width + flat
        taken, times = np.unique(key[routes >= 0], return_counts=True)
        first = np.searchsorted(taken, np.arange(len(names) + 1) * width)
        for row, name in enumerate(names.tolist()):
            mine = slice(first[row], first[row + 1])
            total = counts.setdefault(name, np.zeros(width, np.int64))
            total[taken[mine] - row * width] += times[mine]
    return counts
