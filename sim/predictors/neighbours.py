"""Predict what the most similar tokens of the matched domains' tables did: DoMoE's expert predictor.

The ``votes`` entries nearest to the token (cosine) of all tables that its prompt matched vote for the experts on their
paths, each with its cosine; negative ones do not vote:

    score_l(e) = sum over the nearest i of max(0, cos(h, key_i)) [e in path_i(l)]

What a key is, the paper leaves open ("token embeddings"; "the current-layer token embedding" is what is searched for):

* ``layer``: an embedding a layer. A prediction made with the input of a layer compares it with the inputs that the
  entries had of that very layer.
* ``entry``: one embedding, at the level of the prompt's embeddings, which serves matching too; the current layer's
  input is compared with it, as if neighbours were the same in all layers.
* ``token``: one embedding, the embedding layer's output, of both. Known before the first layer, it never changes: one
  search a token serves all layers.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from sim.predictors.matching import Matching
from sim.predictors.search import Index
from sim.predictors.table import Table
from sim.view import View

Keys = Literal["layer", "entry", "token"]


class Neighbours:
    """The predictor; ``level`` is that of the prompts' embeddings."""

    name = "domain-tables"

    def __init__(
        self, tables: Sequence[Table], matching: Matching, *, votes: int, keys: Keys, level: int, n_experts: int
    ) -> None:
        self.tables = list(tables)
        self.matching = matching
        self.votes = min(votes, max(1, sum(map(len, tables))))
        self.keys = keys
        self.level = level
        self.n_experts = n_experts
        nobody = np.full((1, *tables[0].paths.shape[1:]), -1, np.int16)
        self._paths = np.concatenate([*(table.paths for table in tables), nobody])
        self._first = np.cumsum([0, *(len(table) for table in tables)])
        self._indexes: dict[tuple[int, int], Index] = {}

    def changed(self, tables: Sequence[Table], matching: Matching) -> "Neighbours":
        """The same over ``tables`` in the place of its own; what was worked out of those that stayed is kept."""
        other = Neighbours(
            tables, matching, votes=self.votes, keys=self.keys, level=self.level, n_experts=self.n_experts
        )
        same = [new is old for new, old in zip(tables, self.tables, strict=True)]
        other._indexes = {place: index for place, index in self._indexes.items() if same[place[0]]}
        return other

    def consulted(self, prompts: Mapping[int, np.ndarray], sequences: int) -> np.ndarray:
        """Which tables each sequence consults (sequences, D) bool; those without a prompt consult none."""
        chosen = np.zeros((sequences, len(self.tables)), bool)
        for sequence, prompt in prompts.items():
            chosen[sequence, self.matching.consulted(prompt)] = True
        return chosen

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` says."""
        chosen = self.consulted(view.prompts(), int(view.sequence.max(initial=-1)) + 1)
        level = self.query_level(point)
        return self.vote(view.embedding(level), chosen[view.sequence[view.decoding]], level, layers)

    def query_level(self, point: int) -> int:
        """The level whose embedding is searched for in a prediction at ``point``."""
        return 0 if self.keys == "token" else point

    def vote(self, queries: np.ndarray, chosen: np.ndarray, level: int, layers: Sequence[int]) -> np.ndarray:
        """Scores (R, len(layers), E) float32 of queries (R, dims) of ``level`` in the tables ``chosen`` (R, D) bool."""
        numbers, weights = self.nearest(queries, chosen, level)
        scores = np.zeros((len(queries), len(layers), self.n_experts), np.float32)
        row, layer = np.arange(len(queries))[:, None], np.arange(len(layers))[None, :]
        # One voter and one of its experts at a time: no place is named twice, and the order of the sum is the rank.
        for rank in range(numbers.shape[1]):
            paths = self._paths[numbers[:, rank]][:, layers]
            for slot in range(paths.shape[2]):
                expert = paths[:, :, slot]
                taken = (expert >= 0) * weights[:, rank, None]
                scores[row, layer, np.maximum(expert, 0)] += taken
        return scores

    def nearest(self, queries: np.ndarray, chosen: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
        """The voters of each query (R, votes), entries counted through all tables, the last nobody; their weights."""
        shape = (len(queries), self.votes)
        numbers, weights = np.full(shape, len(self._paths) - 1), np.zeros(shape, np.float32)
        for table in range(len(self.tables)):
            rows = np.flatnonzero(chosen[:, table])
            if not len(rows) or not len(self.tables[table]):
                continue
            found, cosine = self._index(table, level).search(queries[rows], self.votes)
            everyone = np.concatenate([numbers[rows], found + self._first[table]], axis=1)
            weight = np.concatenate([weights[rows], np.maximum(cosine, 0)], axis=1)
            # Stable: of equal ones the earlier table's come first, and in a table the smaller number.
            best = np.argsort(-weight, axis=1, kind="stable")[:, : self.votes]
            numbers[rows] = np.take_along_axis(everyone, best, 1)
            weights[rows] = np.take_along_axis(weight, best, 1)
        return numbers, weights

    def _index(self, table: int, level: int) -> Index:
        """The table's keys that a query of ``level`` is compared with, ready for search."""
        key = {"layer": level, "entry": self.level, "token": 0}[self.keys]
        if (table, key) not in self._indexes:
            self._indexes[table, key] = Index(self.tables[table].keys[:, key])
        return self._indexes[table, key]
