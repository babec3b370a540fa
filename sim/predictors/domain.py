"""A domain as DoMoE keeps it: the routing table and the prototypes of its embeddings, maintained together."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from sim.predictors.prototypes import Prototypes
from sim.predictors.table import Table


@dataclass(frozen=True)
class Domain:
    """A routing table of at most ``most`` entries and at most ``k`` prototypes of its keys at ``level``."""

    table: Table
    prototypes: Prototypes
    level: int
    most: int
    k: int
    seed: int = 0

    @classmethod
    def build(cls, table: Table, level: int, most: int, k: int, seed: int = 0) -> Self:
        """Cluster the keys of ``table`` from scratch."""
        return cls(table, Prototypes.build(table.keys[:, level], k, seed), level, most, k, seed)

    def append(self, token: np.ndarray, keys: np.ndarray, paths: np.ndarray) -> Self:
        """Take in new tokens, as ``Table.append`` does, and let the prototypes follow.

        What a rebuild from everything would give: the same number of entries for each token id; prototypes whose mean
        distance to the entries is within a tenth of the rebuild's (seen on the bundled traces, tested there).
        """
        table, kept = self.table.append(token, keys, paths, self.most)
        before = len(self.table)
        gone = self.table.keys[~kept[:before], self.level]
        come = keys[kept[before:], self.level]
        prototypes = self.prototypes.changed(gone, come, table.keys[:, self.level], self.k, self.seed)
        return replace(self, table=table, prototypes=prototypes)
