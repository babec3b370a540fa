"""Whether a layer call searches before or after its demands: a parameter of every policy that searches in a step."""

from typing import Literal

from sim.policies.base import Parameters


class SearchParameters(Parameters):
    """Parameters of policies whose steps may wait for a search."""

    search: Literal["after", "before"] = "after"
    """after: a layer's demands go to the link first, and move while its search runs; before: search and requests come
    first, so that a slow search holds the demands up."""

    @property
    def before_demands(self) -> bool:
        """What ``Prediction.before_demands`` is to be."""
        return self.search == "before"
