"""Experts predicted by a similarity-weighted vote of the nearest recorded tokens, and how many of them were right."""

from typing import Any

import numpy as np

from traces.array_library import beside, best_first, library, nearest, numbers, on_host

NEIGHBOURS = 8
_QUERIES = 512  # rows compared with all keys at once: bounds memory at _QUERIES x keys floats


def vote_recall(keys: Any, key_routes: np.ndarray, queries: Any, query_routes: np.ndarray, experts: int) -> float:
    """Share of the queries' experts that the vote of their nearest keys finds, at one layer.

    ``keys`` (n, D) and ``queries`` (m, D) are vectors, NumPy arrays or tensors of one device, ``key_routes`` (n, K) and
    ``query_routes`` (m, K) the experts taken with them. A query's NEIGHBOURS most similar keys (cosine; all keys if
    there are fewer) each give their similarity to their experts; the K experts with the largest sums are the
    prediction, lower ids first among equals.
    """
    return recall(vote(keys, key_routes, queries, experts), query_routes)


def vote(keys: Any, key_routes: np.ndarray, queries: Any, experts: int) -> np.ndarray:
    """Predicted experts (m, K) of each query, best first; see :func:`vote_recall`."""
    xp, top_k = library(keys), key_routes.shape[1]
    taken = np.zeros((len(keys), experts), np.float32)
    rows, slots = np.nonzero(key_routes >= 0)
    taken[rows, key_routes[rows, slots]] = 1
    chosen = beside(taken, keys)
    units = unit_vectors(keys)
    count = min(NEIGHBOURS, len(keys))
    predicted = np.empty((len(queries), top_k), np.int16)
    for start in range(0, len(queries), _QUERIES):
        near, weight = nearest(unit_vectors(queries[start : start + _QUERIES]) @ units.T, count)
        score = xp.einsum("qn,qne->qe", weight, chosen[near])
        predicted[start : start + _QUERIES] = on_host(best_first(score)[:, :top_k])
    return predicted


def recall(predicted: np.ndarray, routes: np.ndarray) -> float:
    """Share of the ids in ``routes`` (m, K; -1 none) that stand in the same row of ``predicted`` (m, any)."""
    used = routes >= 0
    found = (routes[:, :, None] == predicted[:, None, :]).any(axis=2) & used
    return float(found.sum() / max(1, used.sum()))


def unit_vectors(vectors: Any) -> Any:
    """Vectors of length 1, float32; a zero vector stays zero and is similar to nothing."""
    vectors, xp = numbers(vectors), library(vectors)
    length = xp.sqrt(xp.einsum("nd,nd->n", vectors, vectors))[:, None]
    return vectors / xp.where(length > 0, length, 1)
