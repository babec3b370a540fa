"""What a prediction is worth: prefetch by a predictor of a chosen accuracy, evict by any rule."""

from typing import Literal

from pydantic import Field

from sim.plan import Plan
from sim.policies.base import Parameters, Policy
from sim.predictors.base import Predictor, top
from sim.predictors.decode_requests import best_first
from sim.predictors.latest_values import latest_scores
from sim.predictors.oracle import Oracle, RandomGuess
from sim.view import View


class OracleParameters(Parameters):
    """Parameters of oracle."""

    accuracy: float = Field(default=1.0, ge=0, le=1)
    """share of guesses that are right; 1 is perfect, 0 names only experts that are not taken."""
    random: bool = False
    """guess at random instead, whatever the accuracy."""
    ahead: int = Field(default=1, ge=0, le=10_000)
    """how many layers ahead of the running one prefetches are made; 0 asks for all layers when the step begins."""
    eviction: Literal["lru", "fifo", "lfu", "perfect-lfu", "score", "next-use"] = "lru"
    """who goes; score: whom the latest guesses of its layer do not name, or name last; next-use: Belady's MIN."""
    scope: Literal["global", "layer"] = "global"
    """share the slots over all layers, or split them evenly, a pool a layer."""
    prefetch: bool = True
    """false asks for nothing ahead in decode, so that eviction is left alone."""


class ByOracle(Policy):
    """A reference: it prefetches as many experts as a token takes, by a predictor whose error rate is chosen.

    Only decode is predicted; a prefill streams. A guess that is wrong at one accuracy is wrong at every lower one.
    """

    name = "oracle"
    summary = "reference: prefetch by a predictor of chosen accuracy, evict by any rule"
    takes = OracleParameters
    variants = ("accuracy=0.5", "accuracy=0.0", "random=True")
    parameters: OracleParameters
    clairvoyant = True

    def plan(self, view: View) -> Plan:
        """Ask for each layer's guesses ``ahead`` layers before it, or all at the step's beginning."""
        given, seed = self.parameters, self.setting.seed
        predictor: Predictor = RandomGuess(seed) if given.random else Oracle(given.accuracy, seed)
        choices = view.foreseen(view.n_layers).shape[2]
        points = [max(layer + 1 - given.ahead, 0) if given.ahead else 0 for layer in range(view.n_layers)]
        scored = [(point, layer, predictor.scores(view, point, [layer])) for layer, point in enumerate(points)]
        guesses = [(point, layer, top(scores, choices)) for point, layer, scores in scored]
        return Plan(
            eviction=given.eviction,
            per_layer=given.scope == "layer",
            values=latest_scores(view, scored) if given.eviction == "score" else None,
            requests=best_first(view, guesses) if given.prefetch else None,
            stream_prefill=True,
        )
