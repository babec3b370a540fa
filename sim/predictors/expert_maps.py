"""Expert maps: predict the router probabilities of the stored iteration that looks most like the running one.

FineMoE, first called fMoE (H. Yu et al., arXiv 2502.05370, EuroSys 2026). A map holds the probabilities of all experts
in all layers for one token, beside the embedding it began with. Before the first layer the running token's embedding is
compared with those stored (semantic search); as soon as routes are known, its probabilities so far are compared with
the same layers of the stored maps (trajectory search). The most similar map says what comes, and the similarity says
how far to trust it.

Decided here, where the paper leaves it open:

* Maps are those of decoded tokens of the profile split, offered to the store in its order. A prompt's tokens share one
  iteration and have no embedding of their own in it.
* Probabilities are as a trace stores them, in steps of 1 / 255; a product of whole numbers is exact, so ties are real
  ones, and go to the smaller entry.
* A vector of zeros is like nothing: it matches nothing.
"""

from collections.abc import Sequence

import numpy as np

from ground.errors import InputError
from sim.predictors.products import cosines, exact_product, squares
from sim.view import View, every_prob
from traces.trace import Trace

ROWS = 1024
"""Rows that are searched at once, which bounds memory to this times the entries."""


class ExpertMaps:
    """A store of expert maps and the two searches in it.

    Attributes:
        maps: (N, L, E) uint8, router probabilities x 255.
        embeddings: (N, D) int8, embedding layer's outputs.
    """

    name = "expert-map"

    def __init__(self, profile: Sequence[Trace], capacity: int = 1000, distance: int = 3) -> None:
        self.embeddings, self.maps = kept(*iterations(profile), capacity, distance)

    def semantic(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """The most similar map by embedding at point 0, -1 for none, and the cosine, (Rd,) both."""
        query = view.embedding(0)
        found, score = np.full(len(query), -1), np.zeros(len(query))
        if not len(self.maps):
            return found, score
        other = squares(self.embeddings)
        for part in _parts(len(query)):
            mine = squares(query[part])
            cosine = cosines(exact_product(query[part], self.embeddings), mine, other)
            found[part], score[part] = _nearest(cosine, mine)
        return found, score

    def trajectory(self, view: View, points: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The map most similar in the layers below each of ``points`` (rising, from 1), -1 for none, and the cosine.

        Both (Rd, len(points)).
        """
        last = max(points, default=0)
        probs = view.probs(last)[view.decoding]
        found, score = np.full((len(probs), len(points)), -1), np.zeros((len(probs), len(points)))
        if not len(self.maps):
            return found, score
        other = np.cumsum(squares(self.maps[:, :last]), axis=1)
        for part in _parts(len(probs)):
            mine = np.cumsum(squares(probs[part]), axis=1)
            product = np.zeros((len(mine), len(other)))
            for layer in range(last):
                product += exact_product(probs[part, layer], self.maps[:, layer])
                if layer + 1 in points:
                    column = points.index(layer + 1)
                    cosine = cosines(product, mine[:, layer], other[:, layer])
                    found[part, column], score[part, column] = _nearest(cosine, mine[:, layer])
        return found, score

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """Probabilities of the most similar map (Rd, len(layers), E) float32, see ``Predictor``."""
        found = self.trajectory(view, [point])[0][:, 0] if point else self.semantic(view)[0]
        if not len(self.maps):
            return np.zeros((len(found), len(layers), view.n_experts), np.float32)
        probs = self.maps[found][:, list(layers)].astype(np.float32) / np.float32(255)
        return np.where((found >= 0)[:, None, None], probs, np.float32(0))


def iterations(profile: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings (M, D) and maps (M, L, E) of all decoded tokens. Raises InputError for a trace without them."""
    embeddings, maps = [], []
    for trace in profile:
        if trace.probs is None or trace.embeddings is None:
            lacking = "probs" if trace.probs is None else "embeddings"
            raise InputError(f"profile {trace.source or 'trace'}: no array {lacking}, which expert maps are made of")
        maps.append(every_prob(trace, trace.decode_rows, trace.n_layers))
        embeddings.append(trace.embeddings[:, 0])
    return np.concatenate(embeddings), np.concatenate(maps)


def kept(embeddings: np.ndarray, maps: np.ndarray, capacity: int, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """What a store of ``capacity`` holds after all maps (M, L, E), with embeddings (M, D), came in their order.

    When it is full, the newest takes the place of the entry that it makes most redundant, by
    RDY = (d / L) cos(embeddings) + ((L - d) / L) cos(maps), the first of equals.
    """
    rows, n_layers, n_experts = maps.shape
    weight = min(distance, n_layers) / n_layers
    parts = [(embeddings, weight), (maps.reshape(rows, n_layers * n_experts), 1 - weight)]
    held = np.arange(min(capacity, rows))  # which iteration each slot holds
    for first in range(len(held), rows, ROWS):
        new = np.arange(first, min(first + ROWS, rows))
        redundancy = _redundancy(parts, new, held)
        among = _redundancy(parts, new, new)
        for i in range(len(new)):
            slot = int(redundancy[i].argmax())
            held[slot] = new[i]
            redundancy[:, slot] = among[:, i]  # later newcomers meet this one there
    return embeddings[held], maps[held]


def _redundancy(parts: list[tuple[np.ndarray, float]], one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """RDY of rows ``one`` with rows ``other``: weighted cosines of embeddings and maps."""
    total = np.zeros((len(one), len(other)))
    for vectors, weight in parts:
        a, b = vectors[one], vectors[other]
        total += weight * cosines(exact_product(a, b), squares(a), squares(b))
    return total


def _nearest(cosine: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The column of each row's largest value and that value; -1 and 0 for a query without length."""
    best = cosine.argmax(axis=1)
    return np.where(length > 0, best, -1), np.where(length > 0, cosine[np.arange(len(best)), best], 0)


def _parts(rows: int) -> list[slice]:
    return [slice(first, first + ROWS) for first in range(0, rows, ROWS)]
