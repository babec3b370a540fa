"""Prototypes of a set of embeddings: centres of clusters of directions, kept up to date as embeddings come and go.

Clustering is spherical k-means (Dhillon and Modha, Machine Learning 42, 2001): unit vectors, cosine, centres brought to
unit length, started by k-means++ (Arthur and Vassilvitskii, SODA 2007) from a seed. A pure function of its arguments.
"""

from dataclasses import dataclass, replace

import numpy as np

ITERATIONS = 10
"""Rounds of Lloyd's algorithm: what a prompt's clustering is charged for."""
TURNOVER = 0.25
"""Prototypes are clustered anew when so much of what they were last clustered from has joined since."""


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows at length 1 (float64); a row of zeros stays zeros."""
    vectors = np.asarray(vectors, np.float64)
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


def cluster(vectors: np.ndarray, k: int, seed: int) -> np.ndarray:
    """At most ``k`` unit centres (C, D) float64 of the rows of ``vectors`` (n, D).

    Rows of zeros have no direction and are left out. There are fewer centres where there are fewer directions, none
    where there is none. Raises ValueError for a value that is not finite.
    """
    if not np.isfinite(vectors).all():
        raise ValueError(f"row {np.argwhere(~np.isfinite(vectors))[0][0]} of the embeddings is not finite")
    points = unit(vectors)
    points = points[points.any(axis=1)]
    centres = _spread(points, k, np.random.default_rng(seed))
    for _ in range(ITERATIONS if len(centres) else 0):
        nearest = (points @ centres.T).argmax(axis=1)
        total = np.zeros_like(centres)
        np.add.at(total, nearest, points)
        # A centre that lost all its points, or whose points cancel out, stays where it was.
        centres = np.where(np.abs(total).max(axis=1, keepdims=True) > 1e-9, unit(total), centres)
    return centres


def _spread(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """K-means++: each next centre drawn with a chance in proportion to its distance from those there are."""
    if not len(points):
        return points
    chosen = [int(rng.integers(len(points)))]
    away = 1 - points @ points[chosen[0]]
    while len(chosen) < k:
        away = np.where(away > 1e-9, away, 0)
        if not away.any():
            break
        chosen.append(int(rng.choice(len(points), p=away / away.sum())))
        away = np.minimum(away, 1 - points @ points[chosen[-1]])
    return points[chosen]


@dataclass(frozen=True)
class Prototypes:
    """Centres (P, D), the sum of the unit vectors that each stands for (P, D), and what they were last clustered from.

    ``clustered`` is how many embeddings there were then, ``joined`` how many came since, whether others left or not;
    ``times`` says how often they were clustered in all.
    """

    centres: np.ndarray
    sums: np.ndarray
    clustered: int
    joined: int = 0
    times: int = 1

    @staticmethod
    def build(embeddings: np.ndarray, k: int, seed: int) -> "Prototypes":
        """Cluster ``embeddings`` (n, D) of any numeric type."""
        centres = cluster(embeddings, k, seed)
        points = unit(embeddings)
        sums = np.zeros_like(centres)
        if len(centres):
            np.add.at(sums, (points @ centres.T).argmax(axis=1), points)
        return Prototypes(centres, sums, len(embeddings))

    def changed(self, gone: np.ndarray, come: np.ndarray, now: np.ndarray, k: int, seed: int) -> "Prototypes":
        """After ``gone`` left, ``come`` joined and ``now`` is what there is (each (n, D)).

        Each is counted at its nearest centre, which moves to the mean direction of what it then stands for; that costs
        two searches among the centres. After a ``TURNOVER`` they are clustered anew.
        """
        joined = self.joined + len(come)
        if joined >= TURNOVER * self.clustered or not len(self.centres):
            return replace(Prototypes.build(now, k, seed), times=self.times + 1)
        sums = self.sums.copy()
        for sign, vectors in ((-1, gone), (1, come)):
            points = unit(vectors)
            np.add.at(sums, (points @ self.centres.T).argmax(axis=1), sign * points)
        kept = np.abs(sums).max(axis=1, keepdims=True) > 1e-9
        return replace(self, centres=np.where(kept, unit(sums), self.centres), sums=sums, joined=joined)

    def distance(self, embeddings: np.ndarray) -> float:
        """Mean of 1 - cosine between each embedding and its nearest centre."""
        return float(1 - (unit(embeddings) @ self.centres.T).max(axis=1).mean())
