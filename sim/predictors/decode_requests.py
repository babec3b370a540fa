"""What the policies that predict in every decode step share: their requests, and the time of their predictions."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sim.plan import Prediction, Requests
from sim.view import View


def best_first(view: View, guesses: Iterable[tuple[int, int, np.ndarray]]) -> Requests:
    """Requests for the experts guessed in every decode row: nearer layers first, then by rank.

    A guess is the point at which it is made, the first layer that it is of, and experts (Rd, layers, n) of that layer
    and those after it, best first, -1 for none.
    """
    step, columns = view.step[view.decoding], [np.zeros((4, 0), np.int64)]
    for point, first, best in guesses:
        row, column, rank = np.nonzero(best >= 0)
        layer = first + column
        call, expert = step[row] * view.n_layers + layer, layer * view.n_experts + best[row, column, rank]
        columns.append(np.stack([view.moment(step[row], point), call, expert, call * view.n_experts + rank]))
    return Requests.merged(*np.concatenate(columns, axis=1))


def each_step(
    view: View, points: Sequence[int], ns: Callable[[int, int], int], *, critical: bool = True,
    before_demands: bool = False,
) -> Prediction:  # fmt: skip
    """A prediction at each of ``points`` of every decode step, which takes ``ns`` of its rows and the point."""
    steps, rows = np.unique(view.step[view.decoding], return_counts=True)
    distinct, kind = np.unique(rows, return_inverse=True)
    cost = [ns(count, point) for count in distinct.tolist() for point in points]
    each = np.array(cost, np.int64).reshape(len(distinct), len(points))[kind]
    moment = view.moment(steps[:, None], np.array(points, np.int64)).ravel()
    return Prediction(moment, each.ravel(), critical, before_demands=before_demands)
