"""LRU by visits of an expert's own layer, and among equals from the layer that comes again last.

Plain LRU lets go of those of the next layer first, since all others have been visited later.
"""

from typing import NamedTuple

import numpy as np

from sim.plan import Plan
from sim.policies.base import Policy
from sim.policies.recency import CacheParameters
from sim.scorer import Scorer
from sim.view import View


class Seen(NamedTuple):
    """Routes (R, L, K), where each step's rows begin, and the call that used each expert last (L, E)."""

    routes: np.ndarray
    offsets: np.ndarray
    last: np.ndarray


def observe(state: Seen, call: int) -> None:
    """The experts of the call were used now."""
    step, layer = divmod(call, state.last.shape[0])
    for row in range(state.offsets[step], state.offsets[step + 1]):
        for k in range(state.routes.shape[2]):
            if state.routes[row, layer, k] >= 0:
                state.last[layer, state.routes[row, layer, k]] = call


def worths(state: Seen, call: int, values: np.ndarray) -> None:
    """Fewer visits of its layer since its last use, then fewer layers that come before its own, are worth more."""
    layers, experts = state.last.shape
    for expert in range(len(values)):
        since = call - state.last[expert // experts, expert % experts]
        values[expert] = -(since // layers) * layers - (expert // experts - call - 1) % layers


class LayerLRU(Policy):
    """Evict by visits of the own layer since the last use."""

    name = "layer-lru"
    summary = "cache, evict by visits of the own layer since the last use, the layer that comes again last first"
    takes = CacheParameters
    parameters: CacheParameters

    def plan(self, view: View) -> Plan:
        """Fetch on demand; its reckoning is taken to cost nothing."""
        routes = np.ascontiguousarray(view.route(view.n_layers))
        offsets = np.searchsorted(view.step, np.arange(view.n_steps + 1))
        routes.flags.writeable = offsets.flags.writeable = False
        state = Seen(routes, offsets, np.full((view.n_layers, view.n_experts), -1, np.int64))
        free = np.zeros(view.n_steps * view.n_layers, np.int64)
        return Plan(
            eviction="scored", scorer=Scorer(state, observe, worths, free), per_layer=self.parameters.scope == "layer"
        )
