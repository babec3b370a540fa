"""What experts are worth by the latest prediction of their layer: the ``score`` of who predicts layer by layer.

A prediction of a layer stands until the next one of the same layer, that is until the next token's.
"""

from collections.abc import Iterable

import numpy as np

from sim.plan import Values
from sim.view import View

SCALE = 2**16
"""What a score of 1 is worth."""


def latest_values(n_layers: int, moment: np.ndarray, layer: np.ndarray, values: np.ndarray) -> Values:
    """``values`` (N, E) of experts of ``layer`` (N,) from ``moment`` (N,) on; the largest of those said at once."""
    order = np.lexsort((layer, moment))
    key = (moment * n_layers + layer)[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    table = np.maximum.reduceat(values[order], first) if len(first) else values[:0]
    return Values(key[first] // n_layers, np.arange(len(first)), table.astype(np.int64), key[first] % n_layers)


def latest_scores(view: View, scored: Iterable[tuple[int, int, np.ndarray]]) -> Values:
    """Scores of every decode row as values: the point, the first layer, and scores (Rd, layers, E) of it and more."""
    step = view.step[view.decoding]
    moments, layers, values = [], [], [np.zeros((0, view.n_experts), np.int32)]
    for point, first, scores in scored:
        rows, several, _ = scores.shape
        moments.append(np.repeat(view.moment(step, point), several))
        layers.append(np.tile(np.arange(first, first + several), rows))
        values.append(np.rint(scores * SCALE).astype(np.int32).reshape(rows * several, view.n_experts))
    none = np.zeros(0, np.int64)
    return latest_values(
        view.n_layers, np.concatenate([none, *moments]), np.concatenate([none, *layers]), np.concatenate(values)
    )
