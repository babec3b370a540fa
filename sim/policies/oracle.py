"""What a prediction is worth: prefetch by a predictor of a chosen accuracy, evict by LRU."""

from pydantic import Field

from sim.plan import Plan
from sim.policies.base import Parameters, Policy
from sim.predictors.base import Predictor, top
from sim.predictors.decode_requests import best_first
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


class ByOracle(Policy):
    """A reference: it prefetches as many experts as a token takes, by a predictor whose error rate is chosen.

    Only decode is predicted; a prefill streams. A guess that is wrong at one accuracy is wrong at every lower one.
    """

    name = "oracle"
    summary = "reference: prefetch by a predictor of chosen accuracy, evict the least recently used"
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
        guesses = [
            (point, layer, top(predictor.scores(view, point, [layer]), choices)) for layer, point in enumerate(points)
        ]
        return Plan(eviction="lru", requests=best_first(view, guesses), stream_prefill=True)
