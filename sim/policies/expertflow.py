"""ExpertFlow's cache engine: slots where a path predictor says that experts are needed, copied in the order of layers.

X. He et al., DAC 2026, arXiv 2410.17954. As a token begins, a small net names its experts in all layers (the routing
path predictor; ``traces.predictor``). Slots are then shared out over layers in proportion to what each is thought to
need, experts are copied layer by layer, and the slots of layers that are done go to later ones (PLEC: predictive
locality-aware expert caching). When a layer's route is known, experts that were not foreseen are copied at once, before
all that waits, and those that turn out not to be needed are the first to leave (real-time correction).

Decided here:

* A layer's need is the number of different experts that the step's tokens are thought to take there.
* There is one pool. What a layer has of it is what is asked for on its behalf: its share as the step begins, the best
  first, and then, whenever an earlier layer's route is known, the rest, nearest layer first, as far as that layer's
  slots go round. All that is wanted at one time so fits the slots, and copies wait for slots that are still in use.
  Slots beyond what is thought to be needed are shared out too: when somebody must leave, it is an expert of the layer
  that holds most beyond its share (``split=order`` and rules that know no prediction do without).
* Who is thought to be needed soonest is kept longest. What is not foreseen, or is done, goes before all that is to
  come, the least recently used first; what was foreseen and is not needed goes before those.
* A prediction is waited for (``charge=step``): within a step nothing can be computed before its tokens are known. How
  much of that time other steps hide is the run's ``--pipeline``.
* Prompts are not predicted: nearly all experts of a layer are needed, and stream.

``code=true`` is the authors' code (marsggbo/offloadMoE, commit 7516ec6) where it differs: slots are split evenly, a
pool a layer; as a step begins each layer's predicted experts take the places of others of the same layer; a layer waits
for all that is on its way to it; a copy that has begun is not stopped; nothing is corrected. Its benchmark reads
predictions that were made beforehand, so they cost nothing. That it waits for the GPU after every expert is not
modelled.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from sim.eviction import goes_by_values
from sim.plan import Plan, Prediction, Requests, Values
from sim.policies.base import Parameters, Policy
from sim.predictors.decode_requests import each_step
from sim.predictors.oracle import Oracle, RandomGuess
from sim.predictors.paths import Paths, SequenceLevel, TokenLevel, guessed_paths, stored_paths
from sim.predictors.popularity import Popularity
from sim.predictors.previous_token import PreviousToken
from sim.shares import Shares
from sim.view import View

WEIGHTS = 3_790_000
"""Of the paper's predictor: T5-small with d_model 32 and d_ff 2048, 7.2 MB in 16 bits."""
UNWANTED, DONE, TO_COME = 0, 1, 2
"""What an expert is worth that was foreseen in vain; that is done, or was not foreseen; and from where on the rest."""

NEARER, PART = 2**17, 2**8
"""What one layer less to go is worth, more than any number of tokens; and the part of a token that is worth 1."""


class EngineParameters(Parameters):
    """Parameters of the cache engine, whoever predicts."""

    first: float = Field(default=1.0, gt=0, le=1000)
    """how many experts of a token's ranking are taken as predicted, as a multiple of those that it takes; rounded
    up."""
    sure: float = Field(default=0.0, ge=0, le=1)
    """the least probability of an expert that is taken as predicted."""
    plec: bool = True
    """share slots out by predicted need; false splits them evenly, a pool a layer."""
    split: Literal["need", "order"] = "need"
    """with plec: give each layer its share of the slots at first, or all to the nearest layers."""
    correction: bool = True
    """copy missed experts at once, before all that waits, and evict those first that were foreseen in vain; false does
    neither."""
    eviction: Literal["score", "score-count", "lru", "lfu", "perfect-lfu"] = "score"
    """who goes: whoever is needed last by the prediction, and of those not needed the least recently used or, with
    score-count, the one needed least often since the run began; or by a rule that knows nothing of the prediction."""
    prefetch: bool = True
    """false asks for nothing ahead in decode, so that eviction is left alone."""
    charge: Literal["step", "beside", "free"] = "step"
    """the step waits for a prediction; or only its requests do; or it costs nothing."""
    code: bool = False
    """share slots out, copy and evict as the published code does, not as the paper says."""

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, given: Any) -> Any:
        """The code splits slots evenly and reads predictions beforehand, unless a person says otherwise."""
        code = isinstance(given, dict) and str(given.get("code")).lower() == "true"  # as typed, or as Python has it
        return {"plec": False, "correction": False, "charge": "free"} | given if code else given


class CacheEngine(Policy):
    """The engine, for any predictor of paths."""

    takes = EngineParameters
    parameters: EngineParameters

    @abstractmethod
    def paths(self, view: View, most: int) -> Paths:
        """The first ``most`` experts of each route as somebody predicts them."""

    def weights(self, view: View) -> int:
        """Of the net that predicts; 0 for whatever is no net."""
        return WEIGHTS

    def plan(self, view: View) -> Plan:
        """Share out slots, ask and value as each decode step begins; correct when routes are known."""
        given = self.parameters
        steps, need = self._need(view)
        weights = self.weights(view)
        gpu_bytes = self.setting.software.table_bytes(weights)
        slots, wanted = self._slots(gpu_bytes), (need > 0).sum(axis=2)
        asked = _asked(self._shares(wanted, slots), wanted)
        return Plan(
            eviction=given.eviction,
            per_layer=not given.plec,
            shares=_moving(view, steps, wanted, asked, slots) if self._shared else None,
            requests=_requests(view, steps, need, asked) if given.prefetch else None,
            values=self._values(view, steps, need) if goes_by_values(given.eviction) else None,
            prediction=self._prediction(view, weights),
            stream_prefill=True,
            insist=given.code,
            gpu_bytes=gpu_bytes,
            discipline="demand-first" if given.code else "preemptive" if given.correction else "fifo",
        )

    def _need(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """Decode steps (D,), and how many tokens of each are thought to take each expert (D, L, E), times a scale."""
        given = self.parameters
        most = min(view.n_experts, int(np.ceil(given.first * self.setting.model.top_k)))
        return self.paths(view, most).at_least(given.sure).by_step(view)

    @property
    def _shared(self) -> bool:
        given = self.parameters
        return given.plec and given.split == "need" and goes_by_values(given.eviction)

    def _slots(self, taken: int) -> int:
        return max(0, self.setting.budget - taken) // max(self.setting.model.expert_bytes)

    def _shares(self, wanted: np.ndarray, slots: int) -> np.ndarray:
        """How many of ``slots`` each layer has as each step begins (D, L): at most those that it wants."""
        if not self.parameters.plec:
            n_layers = wanted.shape[1]
            each, more = divmod(slots, n_layers)
            return np.minimum(wanted, each + (np.arange(n_layers) < more))
        if self.parameters.split == "order":
            return np.minimum(wanted, np.maximum(0, slots - (np.cumsum(wanted, axis=1) - wanted)))
        return apportioned(wanted, slots)

    def _values(self, view: View, steps: np.ndarray, need: np.ndarray) -> Values:
        """What experts are worth: of all layers as a step begins, and of each layer when its route is known."""
        given, n_layers = self.parameters, view.n_layers
        nearness = (n_layers - np.arange(n_layers))[:, None] * NEARER
        coming = np.where(need > 0, TO_COME + nearness + np.minimum(need // PART, NEARER - 1), DONE)
        points, table = [np.zeros(n_layers, np.int64)], [coming]
        if not given.code:  # which leaves experts marked until the next prediction
            wrong = (need > 0) & ~_taken(view, steps) if given.correction else np.zeros_like(need, bool)
            points.append(1 + np.arange(n_layers))
            table.append(np.where(wrong, UNWANTED, DONE))
        moment = np.stack(points)[:, None] + view.moment(steps, 0)[:, None]
        layer = np.broadcast_to(np.arange(n_layers), moment.shape).ravel()
        order = np.lexsort((layer, moment.ravel()))
        return Values(
            moment.ravel()[order], order, np.stack(table).reshape(-1, view.n_experts).astype(np.int32), layer[order]
        )

    def _prediction(self, view: View, weights: int) -> Prediction:
        given, setting = self.parameters, self.setting

        def network_ns(rows: int, point: int) -> int:
            return setting.software.path_ns(setting.hardware, weights, rows) if given.charge != "free" else 0

        each = each_step(view, [0], network_ns, critical=given.charge != "beside", before_demands=given.correction)
        return replace(each, ahead=given.charge == "step")


class ExpertFlow(CacheEngine):
    """Plans by the predictions that the trace carries."""

    name = "expertflow"
    summary = "ExpertFlow: a net predicts whole paths; slots are shared out over layers by predicted need"
    variants = ("plec=False", "correction=False", "eviction=score-count", "code=True")
    needs = frozenset({"predicted_experts", "predicted_probs"})

    def paths(self, view: View, most: int) -> Paths:
        """The trace's own."""
        return stored_paths(view, most)

    def weights(self, view: View) -> int:
        """As the trace says."""
        return int(view.predictor.get("parameters", WEIGHTS))


class GuessParameters(EngineParameters):
    """Parameters of expertflow-guess."""

    guess: Literal["previous", "slp", "tlp", "popularity"] = "previous"
    """the experts of the token before; those that the sequence took most; those that the profile's tokens of the same
    id took most; those that the profile took most."""


class ExpertFlowByGuess(CacheEngine):
    """The same engine with a plain guess in the place of the net."""

    name = "expertflow-guess"
    summary = "ExpertFlow's cache engine with a plain guess instead of its predictor"
    takes = GuessParameters
    parameters: GuessParameters
    variants = ("guess=slp", "guess=popularity")
    learns = True

    def paths(self, view: View, most: int) -> Paths:
        """Those of the guess that was chosen."""
        kind = self.parameters.guess
        if kind == "slp":
            return guessed_paths(view, SequenceLevel(), most)
        if kind == "tlp":
            return guessed_paths(view, TokenLevel(self.setting.profile), most)
        if kind == "popularity":
            return guessed_paths(view, Popularity(self.setting.profile), most)
        return guessed_paths(view, PreviousToken(), most)

    def weights(self, view: View) -> int:
        """Guesses are looked up, and cost nothing here."""
        return 0


class OracleParameters(EngineParameters):
    """Parameters of expertflow-oracle."""

    accuracy: float = Field(default=1.0, ge=0, le=1)
    """share of a token's experts that are named; 1 is perfect, 0 names only experts that are not taken."""
    random: bool = False
    """guess at random instead, whatever the accuracy."""
    weights: int = Field(default=0, ge=0, le=10**12)
    """weights of the net whose time and memory are charged; 3790000 are the paper's."""


class ExpertFlowByOracle(CacheEngine):
    """A reference: the same engine with a predictor whose error rate is chosen. It costs what one says."""

    name = "expertflow-oracle"
    summary = "reference: ExpertFlow's cache engine with a predictor of chosen accuracy"
    takes = OracleParameters
    parameters: OracleParameters
    variants = ("accuracy=0.9", "accuracy=0.5")
    clairvoyant = True

    def paths(self, view: View, most: int) -> Paths:
        """Right as often as was chosen."""
        given, seed = self.parameters, self.setting.seed
        return guessed_paths(view, RandomGuess(seed) if given.random else Oracle(given.accuracy, seed), most)

    def weights(self, view: View) -> int:
        """As many as one says."""
        return self.parameters.weights


def apportioned(wanted: np.ndarray, slots: int) -> np.ndarray:
    """``slots`` shared out in proportion to ``wanted`` (D, L), by largest remainders; what is not wanted stays free.

    Of equal remainders the earlier layer's is served first. All that is wanted where that fits.
    """
    return np.minimum(wanted, proportional(wanted, slots))


def proportional(wanted: np.ndarray, slots: int) -> np.ndarray:
    """All ``slots`` shared out in proportion to ``wanted`` (D, L), by largest remainders; none where none is wanted."""
    total = wanted.sum(axis=1, keepdims=True)
    whole, rest = np.divmod(wanted * slots, np.maximum(total, 1))
    more = slots - whole.sum(axis=1, keepdims=True)
    place = np.argsort(np.argsort(-rest, axis=1, kind="stable"), axis=1, kind="stable")
    return np.where(total > 0, whole + (place < more), 0)


def _asked(shares: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """For how many experts of each layer was asked up to and at each point: (D, L) each, points 0 to L."""
    asked = [shares]
    for done in range(shares.shape[1]):
        now, free = asked[-1].copy(), asked[-1][:, done].copy()
        for layer in range(done + 1, shares.shape[1]):
            more = np.minimum(free, wanted[:, layer] - now[:, layer])
            now[:, layer] += more
            free -= more
        asked.append(now)
    return asked


def _moving(view: View, steps: np.ndarray, wanted: np.ndarray, asked: list[np.ndarray], slots: int) -> Shares:
    """What each layer should have: all slots in proportion to need, and as layers are done what they had."""
    whole = proportional(wanted, slots)
    short = wanted.sum(axis=1) > slots
    moments, rows = [view.moment(steps, 0)], [whole]
    for point in range(1, view.n_layers):
        left = asked[point].copy()
        left[:, :point] = 0
        moments.append(view.moment(steps[short], point))
        rows.append(left[short])
    moment = np.concatenate(moments)
    order = np.argsort(moment)
    return Shares(moment[order], np.concatenate(rows)[order])


def _requests(view: View, steps: np.ndarray, need: np.ndarray, asked: list[np.ndarray]) -> Requests:
    """Ask for each layer's share as a step begins, and for the rest as slots of earlier layers come free (``asked``).

    Nearest layers first, in a layer the experts that most tokens need.
    """
    n_layers, n_experts = view.n_layers, view.n_experts
    order = np.argsort(-need, axis=2, kind="stable")
    columns: list[np.ndarray] = []

    def ask(point: int, layer: int, upto: np.ndarray, since: np.ndarray) -> None:
        step, rank = np.nonzero((np.arange(n_experts) < upto[:, None]) & (np.arange(n_experts) >= since[:, None]))
        call = steps[step] * n_layers + layer
        expert = layer * n_experts + order[step, layer, rank]
        columns.append(np.stack([view.moment(steps[step], point), call, expert, call * n_experts + rank]))

    before = np.zeros_like(asked[0])
    for point, now in enumerate(asked):
        for layer in range(point, n_layers):
            ask(point, layer, now[:, layer], before[:, layer])
        before = now
    return Requests.build(*np.concatenate(columns, axis=1))


def _taken(view: View, steps: np.ndarray) -> np.ndarray:
    """Whether a token of each decode step took each expert (D, L, E) bool: known of a layer when its route is."""
    routes = view.route(view.n_layers)[view.decoding]
    row, layer, place = np.nonzero(routes >= 0)
    taken = np.zeros((len(steps), view.n_layers, view.n_experts), bool)
    taken[np.searchsorted(steps, view.step[view.decoding])[row], layer, routes[row, layer, place]] = True
    return taken
