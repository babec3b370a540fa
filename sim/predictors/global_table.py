"""One routing table over all domains: the nearest of everything that was profiled vote, whatever the prompt is about.

What DoMoE compares itself with under the name of FMoE: the same entries (``sim.predictors.table``) and the same vote
(``sim.predictors.neighbours``), without domains and so without matching prompts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from sim.predictors.matching import Matching
from sim.predictors.neighbours import Keys, Neighbours
from sim.predictors.table import tables
from sim.view import View
from traces.trace import Trace


class GlobalTable:
    """The vote of the nearest entries of a single table."""

    name = "global-table"

    def __init__(self, profile: Sequence[Trace], entries: int = 2000, *, votes: int = 8, keys: Keys = "layer") -> None:
        pooled = [dataclasses.replace(t, domain=np.full(len(t.domain), "all domains")) for t in profile]
        (self.table,) = tables(pooled, entries)
        level = profile[0].meta.get("embedding", {}).get("prefill_layer", 0)
        self._voters = Neighbours(
            [self.table], Matching([], 1), votes=votes, keys=keys, level=level, n_experts=profile[0].n_experts
        )

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """Votes for each expert (Rd, len(layers), E) float32, see ``Predictor``."""
        level = self._voters.query_level(point)
        query = view.embedding(level)
        return self._voters.vote(query, np.ones((len(query), 1), bool), level, layers)
