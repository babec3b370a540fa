"""What experts are worth while a token runs: what votes say until their layer has passed, then what tables say.

Of an expert whose layer is still to come, the vote says whether this token takes it, and its popularity in the tables
consulted whether a later one does: it is worth the sum of both. Once its layer has passed, the vote is spent, and only
popularity is left, with a little more for what was just taken: text repeats itself. All are shares of the tokens that
take an expert; where sequences decode together, those of all are added.
"""

import numpy as np

from sim.plan import Values
from sim.view import View

SCALE = 2**16
"""Values are whole numbers: shares times this."""


def vote_shares(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The share of the votes (..., L, E) float32 that each expert has, times ``SCALE``: all of it for one all name.

    Sums are of whole numbers, so one row and a thousand get the same bits. ``top_k`` is what every voter names.
    """
    whole = np.rint(scores.astype(np.float64) * SCALE).astype(np.int64)
    total = np.maximum(whole.sum(axis=-1, keepdims=True), 1)
    return np.minimum(whole * (top_k * SCALE) // total, SCALE)


def vote_values(view: View, votes: np.ndarray, popular: np.ndarray, recency: float) -> Values:
    """Values of every decode step: all layers at its beginning, each layer anew when it has passed.

    Args:
        view: of the run; Rd decode rows, L routed layers, E experts.
        votes: of each row (Rd, L, E), as ``vote_shares`` has them.
        popular: the same of the tables consulted, (Rd, L, E).
        recency: what having been taken by the running token adds to popularity, as a share.
    """
    n_layers, n_experts = view.n_layers, view.n_experts
    steps, first = np.unique(view.step[view.decoding], return_index=True)
    taken = np.zeros(votes.shape, np.int64)
    row, layer, slot = np.nonzero((routes := view.route(n_layers)[view.decoding]) >= 0)
    taken[row, layer, routes[row, layer, slot]] = round(recency * SCALE)
    coming, passed = votes + popular, popular + taken
    table = np.stack([np.add.reduceat(part, first) if len(first) else part for part in (coming, passed)])
    moment = np.stack([np.zeros(n_layers, np.int64), 1 + np.arange(n_layers)])[:, None] + view.moment(steps, 0)[:, None]
    layers = np.broadcast_to(np.arange(n_layers), moment.shape).ravel()
    order = np.lexsort((layers, moment.ravel()))
    return Values(moment.ravel()[order], order, table.reshape(-1, n_experts).astype(np.int32), layers[order])
