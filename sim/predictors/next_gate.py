"""What the next layer's router says of this layer's input: speculation without training.

A. Eliseev, D. Mazur, arXiv 2312.17238: hidden states change little from layer to layer, so the next layer's gate can be
asked early. The trace holds its answers (array ``lookahead``). They are of the next layer alone.
"""

from collections.abc import Sequence

import numpy as np

from sim.predictors.previous_token import ranked
from sim.view import View


class NextGate:
    """Says what the router of the layer whose route comes next makes of the input of the layer before."""

    name = "next gate"

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it; nothing at point 0, where no router's input is known."""
        scores = np.zeros((int(view.decoding.sum()), len(layers), view.n_experts), np.float32)
        if point and point in layers:
            guess = view.lookahead(point)[view.decoding]
            scores[:, list(layers).index(point)] = ranked(guess, view.n_experts)
        return scores
