"""Pre-gated MoE: the gate of a layer chooses the experts of the next one, which are copied while this one computes.

R. Hwang et al., ISCA 2024, arXiv 2308.12066. The gate is part of a model that was trained so, and its choice is the
route: there are no mispredictions. Here the policy knows the given model's routes one layer ahead. That flatters it:
its own model routes otherwise and is not that good. The first layer of a step is fetched on demand, and the last asks
for nothing (published code: ranggihwang/Pregated_MoE, commit 6b0a666).

Decided here:

* Without a cache, the code's default, experts leave after their layer, and memory is two buffers of a layer's experts
  each, or the whole cache size if that is less. ``cache`` keeps experts in all of the memory by one of the rules that
  the code offers.
* A hit in that cache costs nothing; the code copies it to a buffer within the GPU.
* The code waits for all of a layer's experts before it computes; here each runs as soon as it is there.
* Copies are serial and in order of issue, as on the code's one thread.
"""

from typing import Literal

import numpy as np

from sim.plan import Plan, Requests
from sim.policies.base import Parameters, Policy
from sim.view import View


class PregatedMoEParameters(Parameters):
    """Parameters of pregated-moe."""

    cache: Literal["none", "lfu", "lru"] = "none"
    """keep no experts, or those that a rule keeps."""


class PregatedMoE(Policy):
    """Copies the next layer's experts while this one computes. It looks ahead one layer perfectly; no system does."""

    name = "pregated-moe"
    summary = (
        "Pre-gated MoE as perfect one-layer look-ahead (its gate is another model's): copy the next layer's experts"
    )
    takes = PregatedMoEParameters
    variants = ("cache=lfu", "cache=lru")
    parameters: PregatedMoEParameters
    foresight = 1

    def plan(self, view: View) -> Plan:
        """When a layer's route is known ask for the next layer's, prompts included."""
        columns = [np.zeros((4, 0), np.int64)]
        for layer in range(1, view.n_layers):
            route = view.foreseen(layer)[:, layer].astype(np.int64)
            row, slot = np.nonzero(route >= 0)
            call, expert = view.step[row] * view.n_layers + layer, layer * view.n_experts + route[row, slot]
            columns.append(np.stack([view.moment(view.step[row], layer), call, expert, np.zeros_like(call)]))
        kept, model = self.parameters.cache != "none", self.setting.model
        return Plan(
            eviction=self.parameters.cache if kept else "fifo",
            keep=kept,
            requests=Requests.merged(*np.concatenate(columns, axis=1)),
            most_bytes=0 if kept else 2 * model.experts * max(model.expert_bytes),
            discipline="fifo",
        )
