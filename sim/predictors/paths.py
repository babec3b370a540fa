"""Whole paths, guessed as a token begins: what the ExpertFlow policies plan by, whoever guesses.

``stored_paths`` are those of a path predictor that ran when the trace was made (``traces.predictor``). Any predictor of
this package can stand in its place (``guessed_paths``), which tells what it is worth. Two more are here, the plain ones
that the ExpertFlow paper (arXiv 2410.17954) compares with and does not define; they are read as their names say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ground.errors import InputError
from sim.predictors.base import Predictor, top
from sim.view import View
from traces.predictor.token_counts import TokenCounts
from traces.trace import Trace

SCALE = 2**16
"""A probability of 1, in whole numbers."""


@dataclass(frozen=True)
class Paths:
    """Experts (Rd, L, n) int16 that each decode row is thought to take, best first, -1 for none, and how likely.

    ``likely`` (Rd, L, n) int64 is the probability times ``SCALE``, at least 1 where there is an expert.
    """

    experts: np.ndarray
    likely: np.ndarray

    def at_least(self, share: float) -> "Paths":
        """Without those that are less likely than ``share``."""
        sure = self.likely >= share * SCALE
        return Paths(np.where(sure, self.experts, np.int16(-1)), np.where(sure, self.likely, 0))

    def by_step(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """Decode steps (D,), and how many tokens of each are thought to take each expert (D, L, E) int64 x SCALE."""
        steps, step = np.unique(view.step[view.decoding], return_inverse=True)
        total = np.zeros((len(steps), view.n_layers, view.n_experts), np.int64)
        row, layer, place = np.nonzero(self.experts >= 0)
        np.add.at(total, (step[row], layer, self.experts[row, layer, place]), self.likely[row, layer, place])
        return steps, total


def stored_paths(view: View, most: int) -> Paths:
    """The first ``most`` experts of each route that the trace's own predictor names. Raises InputError without any."""
    experts, probs = (array[view.decoding, :, :most] for array in view.predicted())
    # One that was ranked is not impossible, though its probability was rounded to 0.
    return Paths(experts, np.where(experts >= 0, np.maximum(1, probs.astype(np.int64) * SCALE // 255), 0))


def guessed_paths(view: View, predictor: Predictor, most: int) -> Paths:
    """The same of any predictor, asked as each token begins."""
    scores = predictor.scores(view, 0, range(view.n_layers))
    experts = top(scores, most)
    likely = np.take_along_axis(scores, np.maximum(experts, 0).astype(np.int64), axis=2).astype(np.float64)
    return Paths(experts, np.where(experts >= 0, np.maximum(1, np.rint(likely * SCALE)), 0).astype(np.int64))


class SequenceLevel:
    """SLP: what share of the earlier tokens of the sequence, its prompt's included, took each expert."""

    name = "SLP"

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        every = view.n_layers * view.n_experts
        each = np.eye(every, dtype=np.int32).reshape(view.n_layers, view.n_experts, every)
        counts = view.past_sum(each).reshape(-1, view.n_layers, view.n_experts)[:, list(layers)]
        return _shares(counts)


class TokenLevel:
    """TLP: what share of a profile's tokens of the same id took each expert; nothing of an id that it lacks.

    Raises InputError for a profile without token ids.
    """

    name = "TLP"

    def __init__(self, profile: Sequence[Trace]) -> None:
        token = np.concatenate([trace.token for trace in profile])
        if not (token >= 0).any():
            raise InputError("TLP goes by token ids, and the profile has none; expected a capture with its text")
        routes = np.concatenate([trace.experts for trace in profile])[token >= 0]
        self._tokens = TokenCounts(token[token >= 0], routes, profile[0].n_experts)
        self._counts = np.stack([self._tokens.of_layer(layer) for layer in range(routes.shape[1])], axis=1)

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        return _shares(self._counts[:, list(layers)][self._tokens.places(view.token[view.decoding])])


def _shares(counts: np.ndarray) -> np.ndarray:
    """Counts (Rd, l, E) as shares of the most that any expert of the layer could have: the row's largest total."""
    total = counts.sum(axis=-1, keepdims=True)
    return (counts / np.maximum(total, 1)).astype(np.float32)
