"""Every expert is resident, as on a GPU that is large enough."""

from sim.plan import Plan
from sim.policies.base import Policy
from sim.view import View


class AllInGPU(Policy):
    """Every expert is on the GPU from the start, whatever the budget. This is the compute bound, not a real system."""

    name = "all-in-gpu"
    summary = "reference: every expert resident from the start, whatever the budget"

    def plan(self, view: View) -> Plan:
        """Nothing to decide."""
        return Plan(everything_resident=True)
