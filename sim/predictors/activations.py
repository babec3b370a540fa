"""Expert activation matrices: predict that a request goes on like the profiled request most like it so far.

MoE-Infinity (L. Xue et al., arXiv 2401.14361). The expert activation matrix (EAM) of a request counts, layer by layer,
how often its tokens took each expert. A collection (EAMC) keeps those of earlier requests; the running request's
matrix, as far as it is known, is compared with all of them by cosine, flattened, and the most similar one says how
likely each expert of later layers is: its share of its layer's row.

Decided here, where the paper leaves it open or its versions differ:

* The running matrix counts the prompt and every token since (``scope="request"``, the paper's rEAM). With
  ``scope="iteration"`` it counts the running token alone (its iEAM).
* The first version of the paper clusters requests by k-means and keeps the centres; later text replaces entries one
  by one. Here it is k-means with the cosine that matching uses; a centre is the sum of its members, which has the
  direction of their mean. If there are no more requests than the capacity, all are kept as they are.
* A centre that loses all members (equal requests) is left out, so there may be fewer than asked for.
* Where nothing is known yet, or nothing known was ever seen, nothing is predicted.
"""

from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np

from sim.view import View
from traces.trace import Trace

ITERATIONS = 25
"""Lloyd's steps at most; requests of the bundled traces settle in about ten."""


class ActivationMatrices:
    """Matches the running request with a collection of activation matrices.

    Attributes:
        collection: (N, L * E) float64 of whole numbers, the matrices flattened.
    """

    name = "activation-matrix"

    def __init__(
        self, profile: Sequence[Trace], capacity: int = 120, scope: Literal["request", "iteration"] = "request",
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.scope = scope
        self.collection = clustered(np.concatenate([matrices(trace) for trace in profile]), capacity, seed)
        self._length = np.maximum(np.sqrt((self.collection**2).sum(axis=1)), 1)
        self._past: WeakKeyDictionary[View, np.ndarray] = WeakKeyDictionary()  # every point of a view begins with it

    def matches(self, view: View, last: int) -> np.ndarray:
        """The most similar matrix for each decode row at points 0 to ``last``: (Rd, last + 1), -1 for none.

        Products of whole numbers in float64 are exact, so every row gets the same bits however many there are. The
        running matrix's own length does not change which is nearest.
        """
        table = self.collection.T.reshape(view.n_layers, view.n_experts, -1)
        routes = view.route(last)[view.decoding]
        if view not in self._past:
            nothing = np.zeros((len(routes), table.shape[2]))
            self._past[view] = view.past_sum(table) if self.scope == "request" else nothing
        product = self._past[view]
        padded = np.concatenate([table, np.zeros_like(table[:, :1])], axis=1)
        found = np.empty((len(routes), last + 1), np.int64)
        for point in range(last + 1):
            if point:
                product = product + padded[point - 1, routes[:, point - 1]].sum(axis=1)
            cosine = product / self._length
            best = cosine.argmax(axis=1)
            found[:, point] = np.where(cosine.max(axis=1) > 0, best, -1)
        return found

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """Shares of each layer's row in the matched matrix (Rd, len(layers), E) float32, see ``Predictor``."""
        match = self.matches(view, point)[:, point]
        found = self.collection[match].reshape(len(match), view.n_layers, view.n_experts)[:, list(layers)]
        return np.where((match >= 0)[:, None, None], shares(found), 0).astype(np.float32)


def matrices(trace: Trace) -> np.ndarray:
    """The activation matrix of each sequence, prompt and decode (S, L * E) float64 of whole numbers."""
    width = trace.n_layers * trace.n_experts
    counts = np.zeros((trace.n_sequences, width))
    flat = np.arange(trace.n_layers)[:, None] * trace.n_experts + trace.experts
    row, layer, slot = np.nonzero(trace.experts >= 0)
    np.add.at(counts, (trace.sequence[row], flat[row, layer, slot]), 1)
    return counts


def shares(counts: np.ndarray) -> np.ndarray:
    """``counts`` (..., E) over their sum; 0 where there are none."""
    total = counts.sum(axis=-1, keepdims=True)
    return counts / np.where(total > 0, total, 1)


def clustered(found: np.ndarray, capacity: int, seed: int) -> np.ndarray:
    """At most ``capacity`` matrices that stand for ``found`` (S, W): all of them, or the centres of k-means by cosine.

    Matrices of nothing are left out; if nothing is left, there is one matrix of zeros, which matches nothing.
    """
    found = found[found.any(axis=1)]
    if not len(found):
        return np.zeros((1, found.shape[1]))
    if len(found) <= capacity:
        return found
    chosen = np.random.default_rng(seed).choice(len(found), capacity, replace=False)
    centres = found[np.sort(chosen)]
    member = np.full(len(found), -1)
    for _ in range(ITERATIONS):
        before, member = member, (found @ centres.T / np.sqrt((centres**2).sum(axis=1))).argmax(axis=1)
        if (member == before).all():
            break
        _, member = np.unique(member, return_inverse=True)
        centres = np.zeros((member.max() + 1, found.shape[1]))
        np.add.at(centres, member, found)
    return centres
