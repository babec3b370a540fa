"""Predictors of a chosen accuracy, to ask what a prediction is worth: they read the routes that they predict.

Whether a guess is right is drawn for each row, layer and choice of the route, once for all accuracies: what is wrong
at one accuracy is wrong at every lower one (nested error sets). Draws are a hash of seed, row and place, so that a row
gets the same ones alone and among others.
"""

from collections.abc import Sequence

import numpy as np

from sim.predictors.previous_token import ranked
from sim.view import View


class Oracle:
    """Right with probability ``accuracy``, choice by choice: 1 is perfect, 0 never names an expert that is taken.

    A wrong guess names an expert that the row does not take in that layer, another one for each choice as long as there
    are any. Needs the view of a clairvoyant policy.
    """

    clairvoyant = True

    def __init__(self, accuracy: float, seed: int = 0) -> None:
        self.name = f"oracle, {accuracy:g} right"
        self._accuracy, self._seed = accuracy, seed

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        route = view.foreseen(view.n_layers)[view.decoding][:, list(layers)]
        places = _places(view, layers, route.shape[2] + view.n_experts)
        right = _uniform(places[..., : route.shape[2]], self._seed) < self._accuracy
        wrong = _others(route, view.n_experts, _uniform(places[..., route.shape[2] :], self._seed))
        return ranked(np.where(right | (route < 0), route, wrong), view.n_experts)


class RandomGuess:
    """Every expert as likely as any other, drawn anew for each row and layer."""

    name = "random"
    clairvoyant = True  # it reads the schedule alone, by which rows are told apart

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        drawn = _uniform(_places(view, layers, view.n_experts), self._seed).astype(np.float32)
        return np.maximum(drawn, np.float32(2**-24))


def _others(route: np.ndarray, n_experts: int, drawn: np.ndarray) -> np.ndarray:
    """For each choice (R, l, K) an expert outside the route, in the order of ``drawn`` (R, l, E); -1 for none."""
    taken = (route[..., None] == np.arange(n_experts)).any(axis=-2)
    order = np.argsort(np.where(taken, 2.0, drawn), axis=-1, kind="stable")[..., : route.shape[-1]]
    free = ~np.take_along_axis(taken, order, axis=-1)
    return np.where(free, order, -1)


def _places(view: View, layers: Sequence[int], width: int) -> np.ndarray:
    """A number for each place (Rd, layers, width) uint64 of the trace's table of rows, layers and places."""
    rows = view.future().schedule.rows[view.decoding].astype(np.uint64)
    place = rows[:, None] * np.uint64(view.n_layers) + np.array(layers, np.uint64)
    return place[..., None] * np.uint64(width) + np.arange(width, dtype=np.uint64)


def _uniform(places: np.ndarray, seed: int) -> np.ndarray:
    """Numbers in [0, 1), one a place: SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014)."""
    start = np.uint64((seed % 2**63) * 0xD1342543DE82EF95 % 2**64)  # in Python's integers, which warn of no overflow
    mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
