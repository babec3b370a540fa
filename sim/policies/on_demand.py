"""Pure streaming: every expert is copied when it is needed and none is kept."""

from sim.plan import Plan
from sim.policies.base import Policy
from sim.view import View


class OnDemand(Policy):
    """No cache and no prediction: the least that any system does."""

    name = "on-demand"
    summary = "copy every expert when it is needed, keep none (pure streaming)"

    def plan(self, view: View) -> Plan:
        """Keep nothing."""
        return Plan(eviction="fifo", keep=False)
