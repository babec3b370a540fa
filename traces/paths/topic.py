"""The topic: what all experts that a sequence took of late tell of each expert, as a regression of low rank.

A ridge regression tells how often an expert is used in each head's window, beyond what its own decayed use tells, from
the decayed uses of all experts. How strong the ridge must be is found on sequences that were kept out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from traces.paths.state import HEADS, TOPIC_DECAYS, WINDOWS

MOST_ROWS = 3000
"""Rows that a regression is fitted to, drawn at random where there are more."""
STRENGTHS = (500.0, 2000.0, 8000.0, 32000.0, 128000.0)


@dataclass(frozen=True)
class Examples:
    """N rows: decayed uses (N, 3 * L * E), centred, what own use leaves unexplained of later use (N, HEADS * L * E),
    and which sequence each is of (N,). ``share`` (L, E) is that of all visits.
    """

    uses: np.ndarray
    later: np.ndarray
    sequence: np.ndarray
    share: np.ndarray


def examples(routes: np.ndarray, offsets: np.ndarray, experts: int, seed: int) -> Examples:
    """Of rows (T, L, K) of whole sequences, ``offsets`` (n + 1,) where they begin."""
    count, layers = routes.shape[:2]
    drawn = np.zeros(count, bool)
    inside = np.flatnonzero(np.isin(np.arange(count) + 1, offsets, invert=True))  # a last row has nothing after it
    drawn[np.sort(np.random.default_rng(seed).permutation(inside)[:MOST_ROWS])] = True
    rows, width = int(drawn.sum()), layers * experts
    share = np.stack([np.bincount(r[r >= 0], minlength=experts) for r in routes.swapaxes(0, 1).reshape(layers, -1)])
    mean = (share / max(count, 1)).astype(np.float32).reshape(-1)
    uses, later = np.empty((rows, 3, width), np.float32), np.zeros((rows, HEADS, width), np.float32)
    known, place = np.zeros((rows, HEADS), bool), 0
    sequence = np.searchsorted(offsets, np.flatnonzero(drawn), side="right") - 1
    base = np.arange(layers)[:, None] * experts
    for begin, end in pairwise(offsets.tolist()):
        taken = np.zeros((end - begin, width), np.float32)
        for row, route in enumerate(routes[begin:end]):
            taken[row, (route + base)[route >= 0]] = 1
        until = np.concatenate([np.zeros((1, width), np.float32), np.cumsum(taken, axis=0)])
        sums = np.zeros((3, width), np.float32)
        for row in range(end - begin):
            sums = sums * TOPIC_DECAYS[:, None] + (taken[row] - mean)
            if drawn[begin + row]:
                uses[place] = sums
                for head in range(HEADS):
                    first, last = (min(row + 1 + int(w), end - begin) for w in WINDOWS[head : head + 2])
                    if 2 * (last - first) >= WINDOWS[head + 1] - WINDOWS[head]:
                        later[place, head] = (until[last] - until[first]) / (last - first) - mean
                        known[place, head] = True
                place += 1
    _without_own(uses, later, known)
    return Examples(uses.reshape(rows, -1), later.reshape(rows, -1), sequence, mean.reshape(layers, experts))


def _without_own(uses: np.ndarray, later: np.ndarray, known: np.ndarray) -> None:
    """Leave of later use what a regression on an expert's own decayed uses, alike for all, does not tell."""
    for head in range(HEADS):
        rows = np.flatnonzero(known[:, head])
        gram, moment = np.zeros((3, 3)), np.zeros(3)
        for row in rows:
            gram += uses[row] @ uses[row].T
            moment += uses[row] @ later[row, head]
        own = np.linalg.lstsq(gram, moment, rcond=None)[0].astype(np.float32)
        for row in rows:
            later[row, head] -= own @ uses[row]


def _solve(known: Examples, rows: np.ndarray, strength: float) -> np.ndarray:
    uses = known.uses[rows]
    gram = uses @ uses.T
    gram[np.diag_indices_from(gram)] += np.float32(strength)
    return np.linalg.solve(gram, known.later[rows])


def strength_of(known: Examples, folds: Sequence[np.ndarray]) -> float:
    """The strength whose regressions on the rows of one of two ``folds`` err least on those of the other."""
    errors = dict.fromkeys(STRENGTHS, 0.0)
    for one, other in (folds, folds[::-1]):
        between, truth = known.uses[other] @ known.uses[one].T, known.later[other]
        for strength in STRENGTHS:
            errors[strength] += float(np.square(truth - between @ _solve(known, one, strength)).sum(dtype=np.float64))
    return min(errors, key=errors.__getitem__)


def fitted(known: Examples, rows: np.ndarray, strength: float, rank: int) -> dict[str, np.ndarray]:
    """The regression on ``rows``, at most of that rank, as fields of `traces.paths.state.Paths`."""
    layers, experts = known.share.shape
    uses, solved = known.uses[rows], _solve(known, rows, strength)
    told = (uses @ uses.T) @ solved
    power, side = np.linalg.eigh((told @ told.T).astype(np.float64))
    keep = np.flatnonzero(power > 1e-6 * max(power[-1], 1e-12))[::-1][:rank]
    out = (told.T @ side[:, keep].astype(np.float32)) / np.sqrt(power[keep]).astype(np.float32)
    topic_in = (uses.T @ (solved @ out)).reshape(3, layers, experts, -1)
    topic_out = out.T.reshape(-1, HEADS, layers, experts).transpose(1, 2, 0, 3)
    fields = {
        "topic_in": topic_in, "topic_out": topic_out, "topic_mean": np.einsum("le,dler->dlr", known.share, topic_in)
    }  # fmt: skip
    return {name: np.ascontiguousarray(array, np.float32) for name, array in fields.items()}
