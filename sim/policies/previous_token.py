"""A token is predicted to take the experts of the token before it. This is simple, and hard to beat."""

import numpy as np
from pydantic import Field

from sim.plan import Plan, Requests
from sim.policies.base import Parameters, Policy
from sim.view import View


class PreviousTokenParameters(Parameters):
    """Parameters of previous-token."""

    ahead: int = Field(default=0, ge=0, le=10_000)
    """how many layers ahead of the running one prefetches are made; 0 asks for all layers when the step begins."""


class PreviousToken(Policy):
    """Prefetch, layer after layer, the experts that the previous token of the same sequence took; evict by LRU."""

    name = "previous-token"
    summary = "prefetch the experts of the token before, evict the least recently used"
    takes = PreviousTokenParameters
    parameters: PreviousTokenParameters

    def plan(self, view: View) -> Plan:
        """Ask for each layer's experts ``ahead`` layers before it, or all at the step's beginning."""
        route = view.previous_route()
        row, layer, _ = np.nonzero(route >= 0)
        call = view.step[row] * view.n_layers + layer
        # Rows of a batch ask for the same expert: once is enough.
        call, expert = np.divmod(np.unique(call * view.n_experts + route[route >= 0]), view.n_experts)
        step, layer = np.divmod(call, view.n_layers)
        ahead = self.parameters.ahead or view.n_layers
        moment = view.moment(step, np.maximum(layer + 1 - ahead, 0))
        requests = Requests.build(moment, call, layer * view.n_experts + expert)
        return Plan(eviction="lru", requests=requests, stream_prefill=True)
