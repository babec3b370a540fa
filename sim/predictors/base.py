"""What a predictor is, apart from any policy, cache or clock.

A policy turns scores into requests and values; the analysis judges them as they are. What predicting costs is charged
by the policy (``sim.machine.prediction_costs``), not here.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sim.view import View


class Predictor(Protocol):
    """Scores experts of layers whose route is not known yet.

    The horizon of a prediction made at ``point`` for routed layer ``l`` is ``l + 1 - point``: 1 for the next layer.
    """

    name: str

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """How likely each expert is, (Rd, len(layers), E) float32 for the decode rows of the view in their order.

        From what is known at ``point`` (0: the embedding layer's output, ``1 + l``: routed layer ``l`` has its route)
        of routed ``layers``, all of them at least ``point``. Larger is likelier; 0 where nothing is said. Pure, row by
        row: one row alone and among a thousand gets the same bits.
        """
        ...


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """The ``k`` largest scores (..., E) as expert numbers (..., min(k, E)) int16, best first.

    Ties go to the smaller number; -1 where a score is not above 0.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return np.where(np.take_along_axis(scores, order, axis=-1) > 0, order, -1).astype(np.int16)
