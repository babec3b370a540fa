"""What an expert is worth in the cache: how likely it is used, for each call that it is held."""

from typing import Any

import numpy as np

from traces.paths.arithmetic import NONE, ONE, shared
from traces.paths.state import Paths


@shared
def worths(state: Paths, call: int, values: np.ndarray) -> None:
    """Write the worth of every expert (L * E,) int64, larger for longer.

    A positive float's bits, read as a whole number, rise with it.
    """
    layers, experts = state.share.shape
    step, layer = call // layers, call % layers
    sequences = 0
    for active in state.active[step]:
        sequences += active
    rows = state.starts[step + 1] - state.starts[step]
    first, end = (layer, layer + 1) if state.options[1] > 0 else (0, layers)
    worth = np.empty(experts, np.float32)
    bits = worth.view(np.int32)
    for target in range(first, end):
        ahead = target > layer
        distance = np.float32(target - layer if ahead else target - layer + layers)
        # A prompt's rows all come to the layers ahead.
        _rates(worth, state.chances[target], distance, np.float32(rows if ahead and rows > sequences else 1))
        for i in range(experts):
            values[target * experts + i] = bits[i]


@shared
def _rates(worth: np.ndarray, chances: np.ndarray, distance: Any, rows: Any) -> None:
    """The largest, over four plans, of the chance of use by the plan's end over the calls that the expert is held.

    Plans hold it to the next visit, the fourth, the twelfth, or until it is used. ``chances`` (6, E): no use at the
    next visit; then, of experts not used there, the chance to stay so to the fourth visit and the calls that this takes
    beyond ``distance``, the same for the twelfth visit, and the calls until it is used.
    """
    unused, fourth, to_fourth, twelfth, to_twelfth, to_use = (
        chances[0], chances[1], chances[2], chances[3], chances[4], chances[5],
    )  # fmt: skip
    for i in range(len(worth)):
        x = max(ONE - (ONE - unused[i]) * rows, NONE)
        soon = max((ONE - x) / distance, (ONE - x * fourth[i]) / (distance + x * to_fourth[i]))
        late = max((ONE - x * twelfth[i]) / (distance + x * to_twelfth[i]), ONE / (distance + x * to_use[i]))
        worth[i] = max(soon, late)
