"""How the tokens of two batches are split into two equal groups: ExpertFlow's token scheduler, and what it is held to.

The aim (arXiv 2410.17954): of all equal splits the one that needs the fewest experts, the least sum over layers and
experts of ``R1 + R2``, where ``R_k`` says whether any token of group k is predicted to take the expert.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Literal, get_args

import numpy as np

from ground.errors import InputError

Regroup = Literal["none", "random", "kmeans", "exact"]
REGROUPS: tuple[str, ...] = get_args(Regroup)
BY_PREDICTION = ("kmeans", "exact")
"""Those that go by predicted routes."""
MOST_EXACT = 16
"""Tokens that `exact` takes at most: 6,435 splits."""
STARTS = 16
ROUNDS = 20


def needed_by(paths: np.ndarray, first: np.ndarray) -> int:
    """Experts that two groups need, those of both counted twice: ``paths`` (n, L * E) bool, ``first`` (n,) bool."""
    return int(paths[first].any(axis=0).sum() + paths[~first].any(axis=0).sum())


def kmeans(paths: np.ndarray, size: int, rng: np.random.Generator, present: np.ndarray | None = None) -> np.ndarray:
    """Two means of equal size: which tokens (n,) bool are in the first group, ``size`` of them.

    The Hamming distance of two paths is their squared Euclidean one, so the nearest mean is found from products of
    paths alone. Each start takes a token and the one least like it as centres; then the ``size`` tokens that lie most
    on the first mean's side make the first group, until nothing changes. The best of `STARTS` counts, by experts
    needed; the ``present`` split, where there is one of that size, stays unless another needs fewer.
    """
    n = len(paths)
    bits = paths.astype(np.float32)
    alike = bits @ bits.T
    ones = alike.diagonal()
    apart = ones[:, None] + ones - 2 * alike
    seeds = rng.permutation(n)[:STARTS]
    first = _nearest(apart[seeds] - apart[apart[seeds].argmax(axis=1)], size)
    for _ in range(ROUNDS):
        again = _nearest((~first) @ alike / (n - size) - first @ alike / size, size)
        if (again == first).all():
            break
        first = again
    if present is not None:
        first = np.concatenate([present[None], first])
    needed = sum(((group @ bits) > 0).sum(axis=1) for group in (first.astype(np.float32), (~first).astype(np.float32)))
    return np.asarray(first[np.argmin(needed)])


def _nearest(distance: np.ndarray, size: int) -> np.ndarray:
    """The ``size`` smallest of each row (.., n), bool; of equal ones those that come first."""
    first = np.zeros(distance.shape, bool)
    np.put_along_axis(first, np.argsort(distance, axis=-1, kind="stable")[..., :size], True, axis=-1)
    return first


def exact(paths: np.ndarray, size: int, rng: np.random.Generator, present: np.ndarray | None = None) -> np.ndarray:
    """The optimum, by trying all splits; the ``present`` one if it is as good. A reference: its time grows as 2^n.

    Raises InputError for more than `MOST_EXACT` tokens.
    """
    n = len(paths)
    if n > MOST_EXACT:
        raise InputError(f"--regroup exact: {n} tokens of two batches; expected at most {MOST_EXACT}, as of --batch 8")
    # In two halves of one size it is all the same which is the first: it has the first token.
    every = combinations(range(1, n), size - 1) if 2 * size == n else combinations(range(n), size)
    chosen = np.array([(0, *one) if 2 * size == n else one for one in every])
    first = np.zeros((len(chosen), n), bool)
    np.put_along_axis(first, chosen, True, axis=1)
    packed = np.packbits(paths, axis=1)
    others = np.flatnonzero((~first).ravel()).reshape(len(first), -1) % n
    counts = np.zeros(len(first), np.int64)
    for members in (chosen, others):
        union = np.zeros((len(first), packed.shape[1]), np.uint8)
        for column in range(members.shape[1]):
            union |= packed[members[:, column]]
        counts += np.bitwise_count(union).sum(axis=1, dtype=np.int64)
    if present is not None and needed_by(paths, present) == counts.min():
        return present
    return first[np.argmin(counts)]


def at_random(paths: np.ndarray, size: int, rng: np.random.Generator, present: np.ndarray | None = None) -> np.ndarray:
    """Any split."""
    return _nearest(rng.permutation(len(paths)), size)


SPLITS: dict[str, Callable[..., np.ndarray]] = {"random": at_random, "kmeans": kmeans, "exact": exact}
"""The ways of splitting n tokens; each is given (paths, size, rng, present)."""
