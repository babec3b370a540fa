"""The experts of the token before, in the same layer: the simplest predictor, and a hard one to beat."""

from collections.abc import Sequence

import numpy as np

from sim.view import View


class PreviousToken:
    """Says at every point that a token takes what the token before it in its sequence took, its first choice first.

    Of the first token after a prompt it says nothing: which of the prompt's routes come before it is not known.
    """

    name = "previous token"

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` has it."""
        return ranked(view.previous_route()[view.decoding][:, list(layers)], view.n_experts)


def ranked(ids: np.ndarray, n_experts: int) -> np.ndarray:
    """Scores (..., E) float32 of experts given best first (..., K), -1 for none: 1 for the first, falling to 1 / K."""
    scores = np.zeros((*ids.shape[:-1], n_experts + 1), np.float32)  # the last column takes what is said of nobody
    worth = np.arange(ids.shape[-1], 0, -1, dtype=np.float32) / ids.shape[-1]
    np.put_along_axis(scores, np.where(ids < 0, n_experts, ids).astype(np.int64), np.broadcast_to(worth, ids.shape), -1)
    return scores[..., :-1]
