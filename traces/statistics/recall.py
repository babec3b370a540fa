"""Experts predicted by a similarity-weighted vote of the nearest recorded tokens, and how many of them were right."""

import numpy as np

NEIGHBOURS = 8
_QUERIES = 512  # rows compared with all keys at once: bounds memory at _QUERIES x keys floats


def vote_recall(
    keys: np.ndarray, key_routes: np.ndarray, queries: np.ndarray, query_routes: np.ndarray, experts: int
) -> float:
    """Share of the queries' experts that the vote of their nearest keys finds, at one layer.

    ``keys`` (n, D) and ``queries`` (m, D) are vectors, ``key_routes`` (n, K) and ``query_routes`` (m, K) the experts
    taken with them. A query's NEIGHBOURS most similar keys (cosine; all keys if there are fewer) each give their
    similarity to their experts; the K experts with the largest sums are the prediction, lower ids first among equals.
    """
    return recall(vote(keys, key_routes, queries, experts), query_routes)


def vote(keys: np.ndarray, key_routes: np.ndarray, queries: np.ndarray, experts: int) -> np.ndarray:
    """Predicted experts (m, K) of each query, best first; see :func:`vote_recall`."""
    top_k = key_routes.shape[1]
    chosen = np.zeros((len(keys), experts), np.float32)
    rows, slots = np.nonzero(key_routes >= 0)
    chosen[rows, key_routes[rows, slots]] = 1
    units = unit_vectors(keys)
    count = min(NEIGHBOURS, len(keys))
    predicted = np.empty((len(queries), top_k), np.int16)
    for start in range(0, len(queries), _QUERIES):
        similarity = unit_vectors(queries[start : start + _QUERIES]) @ units.T
        near = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        weight = np.take_along_axis(similarity, near, axis=1)
        score = np.einsum("qn,qne->qe", weight, chosen[near])
        predicted[start : start + _QUERIES] = np.argsort(-score, axis=1, kind="stable")[:, :top_k]
    return predicted


def recall(predicted: np.ndarray, routes: np.ndarray) -> float:
    """Share of the ids in ``routes`` (m, K; -1 none) that stand in the same row of ``predicted`` (m, any)."""
    used = routes >= 0
    found = (routes[:, :, None] == predicted[:, None, :]).any(axis=2) & used
    return float(found.sum() / max(1, used.sum()))


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1, float32; a zero vector stays zero and is similar to nothing."""
    vectors = vectors.astype(np.float32)
    length = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
