"""How good a predictor is apart from any cache, link or clock: recall and precision by layer and by horizon."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.predictors import Predictor, top
from sim.view import View
from sim.workload import batched, workload
from traces.models.known import resolve_model
from traces.trace import Trace

HORIZONS = (1, 2, 4, 8, 16)
"""Layers between the last route that is known and the one that is predicted, both counted: 1 is the next layer."""
What = Literal["recall", "precision"]
STEP_BEGIN = 0
"""In the place of a horizon: whatever is known when the step begins, for all layers."""


@dataclass(frozen=True)
class Judgement:
    """What a predictor got right, summed over decode tokens.

    ``right``, ``named`` and ``used`` (H, L): experts that were predicted and taken, predicted, taken, at each of
    ``horizons`` (HORIZONS and STEP_BEGIN) and routed layer. 0 where no prediction of that horizon can be for the layer.
    """

    horizons: tuple[int, ...]
    right: np.ndarray
    named: np.ndarray
    used: np.ndarray

    def rate(self, what: What, horizon: int, layers: slice = slice(None)) -> float | None:
        """Recall, the share of the experts taken that were predicted, or precision, of those predicted that were taken.

        Over ``layers``, of which those that cannot be predicted so far ahead do not count: horizons are on equal terms
        from layer ``max(horizons) - 1`` on. None where nothing counts.
        """
        row = self.horizons.index(horizon)
        total = (self.used if what == "recall" else self.named)[row, layers].sum()
        return round(float(self.right[row, layers].sum() / total), 4) if total else None

    def by_layer(self, what: What, horizon: int) -> list[float | None]:
        """The rate of each routed layer (L,)."""
        return [self.rate(what, horizon, slice(layer, layer + 1)) for layer in range(self.right.shape[1])]


def plain_view(trace: Trace) -> View:
    """The causal view of a trace whose sequences run one after the other; no cost of it is read."""
    model = resolve_model(trace.meta["model"], trace.layers)
    return View(trace, workload(trace, model, Hardware.load(DEFAULT_HARDWARE), batched(trace, 1)))


def judge(predictor: Predictor, view: View, routes: np.ndarray, horizons: Sequence[int] = HORIZONS) -> Judgement:
    """Ask ``predictor`` at every point of every decode step for its K likeliest experts a layer.

    ``routes`` (Rd, L, K) are what the decode rows of ``view`` took, -1 for none.
    """
    n_layers, k = routes.shape[1:]
    asked = (*horizons, STEP_BEGIN)
    right, named, used = (np.zeros((len(asked), n_layers), np.int64) for _ in range(3))
    for point in range(n_layers):
        ahead = {row: point + h - 1 for row, h in enumerate(horizons) if point + h - 1 < n_layers}
        layers = list(range(n_layers)) if point == 0 else sorted(set(ahead.values()))
        guess = top(predictor.scores(view, point, layers), k)
        places = [(row, layer, layers.index(layer)) for row, layer in ahead.items()]
        if point == 0:
            places += [(len(horizons), layer, layer) for layer in layers]
        for row, layer, column in places:
            taken, said = routes[:, layer], guess[:, column]
            hit = (taken[:, :, None] == said[:, None, :]) & (taken >= 0)[:, :, None]
            right[row, layer] += int(hit.sum())
            named[row, layer] += int((said >= 0).sum())
            used[row, layer] += int((taken >= 0).sum())
    return Judgement(asked, right, named, used)
