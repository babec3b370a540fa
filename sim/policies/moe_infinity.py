"""MoE-Infinity: prefetch and evict by the activation matrix of the profiled request most like the running one.

L. Xue et al., arXiv 2401.14361 (third version). After each routed layer the running request's activation matrix is
matched with a collection (``sim.predictors.activations``), and every expert of a later layer is queued by its share of
its layer's row times its proximity, p * (1 - (i - l) / L) for layer i seen from layer l of L. The cache evicts the
smallest (share) * (1 - i / L): late layers go first, since they leave more time to be fetched again.

Where the published code (commit d617801 of EfficientMoE/MoE-Infinity) and the paper differ, this is the paper.
``code=true`` is the code where they differ in what it does with a match:

* A copy that has begun is never stopped: the link's discipline is demand-first, unless the run says otherwise.
* For a demand the expert that was needed least since it was loaded is evicted; for a prefetch the one needed most that
  is not asked for (eviction ``lfu-mfu``).
* Predicting and prefetching stand before the layer's experts are asked for (``search=before``).
* Priorities are the counts of the matched matrix, each 1e-8 more, times 1 - (i - l) / (L + 1): so every expert of every
  later layer is queued.

What the match is stays the paper's there too. The code compares later layers only, of which a request's first token
knows nothing; its collection never fills by itself; and prediction is switched off for Mixtral and most other models.
With those it could not predict at all.

Decided here:

* The running matrix is the request's so far. ``scope=iteration`` takes the running token alone, a partial path, which
  is how DoMoE's authors describe this baseline.
* Nothing is predicted before the first routed layer of a token is known, as the formula has it: experts of the first
  layer are never prefetched, and eviction favours them.
* Sequences that decode together are matched each by itself; their matrices are added and normalised row by row, which
  is what the paper does with several matches.
* An expert whose row has no count is worth eps / (1 + E eps) of it instead of nothing, so that early layers stay
  first among those never seen; eps is not given and is 1e-6 here.
* Everything that has a share above 0 is queued, which also keeps it from giving way to a prefetch of less weight. The
  paper queues all of it anew after every layer. Here this happens when the match changes; while it stays, ``most``
  requests are made again, the first of the queue, whose order is the only one that a link comes to feel in a layer.
* A match waits on the critical path (``beside=true`` puts it beside the step). The collection is searched where the
  software profile searches, at L x E numbers an entry, and takes GPU memory where that is the GPU.
* Values stay in force from one request to the next until its first match; a prefill predicts nothing and streams.
"""

from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from sim.plan import Plan, Requests, Values
from sim.policies.base import Policy
from sim.policies.search_order import SearchParameters
from sim.predictors.activations import ActivationMatrices, shares
from sim.predictors.decode_requests import each_step
from sim.view import View

EPS = 1e-6
SCALE = 2**40
"""Priorities and values are whole numbers: shares times this."""
UNSEEN, SCALE_OF_COUNTS = 1e-8, 2**30
"""The published code's count of an expert that was never taken; its priorities are counts times the other number."""


class MoEInfinityParameters(SearchParameters):
    """Parameters of moe-infinity."""

    capacity: int = Field(default=120, ge=1, le=100_000)
    """activation matrices in the collection; the paper finds 120 best."""
    scope: Literal["request", "iteration"] = "request"
    """what the running matrix counts: the request so far, or the running token alone."""
    most: int = Field(default=32, ge=0)
    """how many of the queue are asked for again, with new weights, while the match stays; 0 for all."""
    beside: bool = False
    """match beside the step instead of on its critical path."""
    code: bool = Field(default=False, strict=True)
    """queue, evict and share the link as the published code does, not as the paper says."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Any) -> Any:
        """The code searches first, unless a person says otherwise."""
        return {"search": "before"} | given if isinstance(given, dict) and given.get("code") is True else given


class MoEInfinity(Policy):
    """Prefetch and evict by ratio times proximity, from the activation matrix of a similar request."""

    name = "moe-infinity"
    summary = "activation matrices: prefetch by a similar request's expert ratios x proximity, evict likewise"
    takes = MoEInfinityParameters
    variants = ("scope=iteration",)
    table_sizes = ("capacity",)
    parameters: MoEInfinityParameters
    learns = True
    ignores = frozenset({"budget"})

    def plan(self, view: View) -> Plan:
        """Match after each layer; ask for what the match says of later ones and value experts by it."""
        setting, given = self.setting, self.parameters
        predictor = ActivationMatrices(setting.profile, given.capacity, given.scope, setting.seed)
        entries, width = predictor.collection.shape
        steps, rows = np.unique(view.step[view.decoding], return_counts=True)
        points = range(1, view.n_layers)
        moment = view.moment(steps[:, None], np.array(points, np.int64))
        found, combined = _combinations(predictor.matches(view, view.n_layers - 1)[:, 1:], rows)
        counts = _added(predictor.collection, combined).reshape(len(combined), view.n_layers, view.n_experts)
        ratio = shares(counts)

        def searching_ns(rows: int, point: int) -> int:
            return setting.search_ns(entries, width, rows)

        return Plan(
            eviction="lfu-mfu" if given.code else "score",
            values=None if given.code else _values(moment, found, ratio),
            requests=self._requests(view, steps, found, counts + UNSEEN if given.code else ratio),
            prediction=each_step(
                view, points, searching_ns, critical=not given.beside, before_demands=given.before_demands
            ),
            stream_prefill=True,
            discipline="demand-first" if given.code else "preemptive",
            gpu_bytes=setting.software.table_bytes(entries * width),
            note=f"activation matrices: {entries:,} for {sum(t.n_sequences for t in setting.profile):,} requests",
        )

    def _requests(self, view: View, steps: np.ndarray, found: np.ndarray, ratio: np.ndarray) -> Requests:
        """For each step and point the experts of later layers by weight; ``found`` (steps, L - 1) numbers ``ratio``.

        ``ratio`` (V, L, E) are shares, or what the published code has in their place.
        """
        beyond, scale = (1, SCALE_OF_COUNTS) if self.parameters.code else (0, SCALE)
        again = np.zeros(found.shape, bool)
        again[:, 1:] = found[:, 1:] == found[:, :-1]
        # How many each moment asks for is worked out first, so that each request is written once, at its place.
        later = (ratio > 0).sum(axis=2)[:, ::-1].cumsum(axis=1)[:, -2::-1]
        points = np.arange(view.n_layers - 1)
        wanted = np.where(found >= 0, later[found, points], 0)
        count = np.where(again, np.minimum(wanted, self.parameters.most or wanted), wanted)
        offsets = np.append(0, np.cumsum(count))
        begin = offsets[:-1].reshape(count.shape)
        call, expert, priority = (np.empty(offsets[-1], np.int64) for _ in range(3))
        for point in range(1, view.n_layers):
            matched = np.flatnonzero(count[:, point - 1])
            distinct, which = np.unique(found[matched, point - 1], return_inverse=True)
            queued, weight = _queue(ratio[distinct], point, beyond, scale)
            many = count[matched, point - 1]
            row = np.repeat(np.arange(len(matched)), many)
            rank = np.arange(len(row)) - np.repeat(np.cumsum(many) - many, many)
            place = begin[matched, point - 1][row] + rank
            expert[place] = queued[which[row], rank]
            call[place] = steps[matched[row]] * view.n_layers + expert[place] // view.n_experts
            priority[place] = -weight[which[row], rank]
        asked = count.ravel() > 0
        moment = view.moment(steps[:, None], points + 1).ravel()[asked]
        return Requests(moment, np.append(offsets[:-1][asked], offsets[-1]), call, expert, priority)


def _combinations(matches: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matches of the rows (Rd, P) of steps of so many ``rows``: as numbers of combinations, (steps, P), and those.

    A combination (V, B) is the sorted entries that the rows of a step match, -1 for none; number -1 is no match at all.
    """
    steps, points, most = len(rows), matches.shape[1], int(rows.max(initial=1))
    of = np.full((steps, points, most), -1)
    of[np.repeat(np.arange(steps), rows), :, np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)] = matches
    of.sort(axis=2)
    combined, number = np.unique(of.reshape(steps * points, most), axis=0, return_inverse=True)
    said = np.asarray((combined >= 0).any(axis=1))
    return np.where(said[number], number, -1).reshape(steps, points), combined


def _added(collection: np.ndarray, combined: np.ndarray) -> np.ndarray:
    """The sum of the matrices of each combination (V, L * E)."""
    total = np.zeros((len(combined), collection.shape[1]))
    for entry in combined.T:
        total += np.where(entry[:, None] >= 0, collection[entry], 0)
    return total


def _queue(ratio: np.ndarray, point: int, beyond: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts of the layers from ``point`` on, flat numbers, and their weights, largest first (V, N) both.

    ``ratio`` is (V, L, E); the layer at hand is ``point - 1``. Proximity would be 0 ``beyond`` the layer after
    the last. Ties go to the smaller number.
    """
    n_layers, n_experts = ratio.shape[1:]
    proximity = 1 - (np.arange(point, n_layers) - (point - 1)) / (n_layers + beyond)
    weight = (ratio[:, point:] * proximity[:, None] * scale).astype(np.int64)
    weight = weight.reshape(len(ratio), (n_layers - point) * n_experts)
    order = np.argsort(-weight, axis=1, kind="stable")
    return order + point * n_experts, np.take_along_axis(weight, order, axis=1)


def _values(moment: np.ndarray, found: np.ndarray, ratio: np.ndarray) -> Values:
    """What experts are worth from each moment on at which the match is another one than before."""
    n_layers, n_experts = ratio.shape[1:]
    kept = (ratio + EPS) / (1 + n_experts * EPS) * (1 - np.arange(n_layers) / n_layers)[:, None]
    known = found.ravel() >= 0
    when, what = moment.ravel()[known], found.ravel()[known]
    changes = np.diff(what, prepend=-1) != 0
    return Values(
        when[changes], what[changes], (kept * SCALE).astype(np.int64).reshape(len(ratio), n_layers * n_experts)
    )
