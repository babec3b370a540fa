"""Eviction that knows the path: the expert goes first that promises the fewest uses for the calls that it is held."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from ground.errors import InputError
from sim.plan import Plan
from sim.policies.base import Policy
from sim.policies.recency import CacheParameters
from sim.predictors.pathwise.run import run_of
from sim.predictors.pathwise.taught import taught
from sim.predictors.pathwise.worths import worths
from sim.scorer import Scorer
from sim.view import View
from traces.paths.model import PathModel
from traces.paths.observe import PROMPT_ROWS, observe
from traces.paths.state import RATES, Run, fresh, untrained

CALL_NS, EXPERT_NS, CHOICE_NS, WORTH_NS = 2_000, 40, 11, 1
"""What a call takes for each row: so much, more for each expert of the layer, and more for each of them and of those
that a token takes; and for each expert of the model. Fitted to what was measured on one core of an AMD EPYC, compiled,
with learning: 18.5 us a row and 6 us for all worths of 48 x 128 experts, 8 taken, and smaller models."""


class PathwiseParameters(CacheParameters):
    """Parameters of eviction that knows the path."""

    start: Literal["profile", "nothing"] = "profile"
    """what is known when the run begins: what the profile taught, or nothing."""
    model: str = ""
    """a file that `python -m traces learn` wrote, instead."""
    online: bool = True
    """learn on while it runs."""
    beside: bool = False
    """reckon worths beside the step, which then come late, instead of before each layer's look-ups."""


class Pathwise(Policy):
    """Fetch on demand, evict by the chance of use for each call that an expert is held."""

    name = "pathwise"
    summary = "cache, evict what the token's path, its topic and its past use promise least of; learns while it runs"
    takes = PathwiseParameters
    learns = self_taught = True
    variants = ("start=nothing",)
    ignores = frozenset({"budget"})
    parameters: PathwiseParameters

    def plan(self, view: View) -> Plan:
        """A scorer with what is known at the beginning."""
        given = self.parameters
        run = run_of(view)
        learned = self._learned(view)
        state = fresh(run, learned, RATES["new" if self._anew else "learned"], given.online, given.scope == "layer")
        for array in run:
            array.flags.writeable = False
        return Plan(
            eviction="scored",
            per_layer=given.scope == "layer",
            scorer=Scorer(state, observe, worths, call_ns(run, view.n_experts), given.beside),
        )

    @property
    def _anew(self) -> bool:
        return not self.parameters.model and (self.parameters.start == "nothing" or not self.setting.profile)

    def _learned(self, view: View) -> Mapping[str, np.ndarray]:
        shape, given = (view.n_layers, view.n_experts), self.parameters
        if self._anew:
            return untrained(*shape, self.setting.model.top_k)
        model = PathModel.load(given.model) if given.model else taught(self.setting.profile, self.setting.seed)
        if model.shape != shape:
            had, wanted = (" x ".join(map(str, each)) for each in (model.shape, shape))
            raise InputError(f"{given.model}: was learned from {had} experts; the trace has {wanted}")
        return model.learned


def call_ns(run: Run, n_experts: int) -> np.ndarray:
    """What each layer call takes to observe and to reckon (N * L,) int64."""
    layers, top_k = run.routes.shape[1:]
    rows = np.minimum(np.diff(run.starts), PROMPT_ROWS + run.active.shape[1])
    each = rows * (CALL_NS + n_experts * (EXPERT_NS + top_k * CHOICE_NS)) + layers * n_experts * WORTH_NS
    return np.repeat(each, layers).astype(np.int64)
