"""Evict by what routers have said lately: HybriMoE's score, arXiv 2504.05897 ("minus recent score").

When a layer's router has answered, every expert of the layer scores half of what it scored before and half of its
probability now, where that is among the 2 k largest, k being the experts of a token. The lowest score goes first. The
paper's weight of the new is one half. Of several rows the largest probability counts.
"""

import numpy as np

from sim.plan import Plan
from sim.policies.base import Policy
from sim.policies.recency import CacheParameters
from sim.predictors.latest_values import latest_scores
from sim.view import View


class MRS(Policy):
    """A cache that ranks experts by their routers' recent answers."""

    name = "mrs"
    summary = "HybriMoE's cache: evict the expert with the lowest recent router probabilities"
    takes = CacheParameters
    variants = ("scope=layer",)
    parameters: CacheParameters
    needs = frozenset({"probs"})

    def plan(self, view: View) -> Plan:
        """Value the likely experts of a layer as soon as its route is known; fetch on demand."""
        said = view.probs(view.n_layers)[view.decoding].astype(np.float32) / 255
        likely = min(2 * self.setting.model.top_k, view.n_experts)
        least = np.partition(said, -likely, axis=2)[:, :, -likely, None]
        said[said < least] = 0
        by_layer = ((layer + 1, layer, said[:, layer : layer + 1]) for layer in range(view.n_layers))
        return Plan(
            eviction="score-recent",
            per_layer=self.parameters.scope == "layer",
            values=latest_scores(view, by_layer),
        )
