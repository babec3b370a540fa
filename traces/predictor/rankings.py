"""Plain guesses of a token's experts, as rankings: what a path predictor has to beat.

Each is a ranking (R, L, M) of experts for the rows asked for, the most likely first. Where a guess says nothing more,
or equally much, of experts, the profile's popularity orders them.
"""

from collections.abc import Callable, Mapping

import numpy as np

from traces.predictor.token_counts import TokenCounts
from traces.trace import Trace

Scores = Callable[[int], np.ndarray]
"""Scores (R, E) of one layer's experts for each row."""


def rankings(trace: Trace, profile: Trace, rows: np.ndarray, most: int) -> Mapping[str, np.ndarray | None]:
    """The ``most`` first experts of every guess for ``rows`` of ``trace``, learnt from ``profile``'s profile split.

    * ``TLP``, token-level: the experts that the profile's rows of the same token took most often. None where the
      trace or the profile holds no token ids.
    * ``SLP``, sequence-level: those that earlier rows of the same sequence took most often.
    * ``previous``: those of the row before.
    * ``popularity``: those that the profile's rows took most often.
    * ``random``: any, the same every time.

    ExpertFlow's paper (arXiv 2410.17954) compares with TLP and SLP without defining them; these are statistics of the
    token and of the sequence, as their names say.
    """
    learnt = profile.row_split("profile")
    popular = _popularity(profile, learnt)
    known = (trace.token >= 0).any() and (profile.token >= 0).any()
    guesses: dict[str, Scores | None] = {
        "TLP": _token_level(trace, profile, rows, learnt) if known else None,
        "SLP": lambda layer: _sequence_level(trace, rows, layer),
        "previous": lambda layer: _previous(trace, rows, layer),
        "popularity": lambda layer: np.zeros((len(rows), 1), np.int64),
    }
    found: dict[str, np.ndarray | None] = {
        name: None if scores is None else _ranked(scores, popular, most) for name, scores in guesses.items()
    }
    random = np.random.default_rng(0).random((len(rows), trace.n_layers, trace.n_experts), np.float32)
    return found | {"random": np.argsort(random, axis=2)[:, :, :most].astype(np.int16)}


def _ranked(scores: Scores, popular: np.ndarray, most: int) -> np.ndarray:
    """(R, L, most): by score, equal ones by ``popular`` (L, E), which is below 1, and then by number."""
    layers = [
        np.argsort(-(scores(layer) + popular[layer]), axis=1, kind="stable")[:, :most] for layer in range(len(popular))
    ]
    return np.stack(layers, axis=1).astype(np.int16)


def _popularity(profile: Trace, learnt: np.ndarray) -> np.ndarray:
    """(L, E): share of the profile's rows that took an expert, halved, so that it only parts equal counts."""
    experts = profile.experts[learnt]
    counts = np.stack([_one_hot(experts[:, layer], profile.n_experts).sum(axis=0) for layer in range(profile.n_layers)])
    return counts / (2 * max(1, len(experts)))


def _one_hot(ids: np.ndarray, experts: int) -> np.ndarray:
    """(rows, E) 1 where an expert is among ids (rows, K), -1 for none."""
    taken = np.zeros((len(ids), experts + 1), np.int64)
    np.put_along_axis(taken, ids.astype(np.int64), 1, axis=1)  # -1 is the last column
    return taken[:, :experts]


def _token_level(trace: Trace, profile: Trace, rows: np.ndarray, learnt: np.ndarray) -> Scores:
    counts = TokenCounts(profile.token[learnt], profile.experts[learnt], trace.n_experts)
    places = counts.places(trace.token[rows])
    return lambda layer: counts.of_layer(layer)[places]


def _sequence_level(trace: Trace, rows: np.ndarray, layer: int) -> np.ndarray:
    taken = _one_hot(trace.experts[:, layer], trace.n_experts)
    before = np.concatenate([np.zeros_like(taken[:1]), np.cumsum(taken, axis=0)])
    return before[rows] - before[trace.offsets[trace.sequence[rows]]]


def _previous(trace: Trace, rows: np.ndarray, layer: int) -> np.ndarray:
    first = trace.offsets[trace.sequence[rows]] == rows
    return np.where(first[:, None], 0, _one_hot(trace.experts[rows - 1, layer], trace.n_experts))
