"""SE-MoE: a ring of two layers in GPU memory; while one computes, the whole next one is copied over the one before.

L. Shen et al., arXiv 2205.10034, ring memory for inference on one GPU. Layers wait in host memory, and the ring goes
round token after token. Nothing is predicted, because all experts of a layer are copied. The Pre-gated MoE and
ExpertFlow papers use the same ring of two as a baseline.

Decided here:

* The unit of a copy is an expert, and those that the router asks for go first; but a layer waits for all of its own.
* Memory is two layers' experts, whatever the cache size, or the whole cache if that is less: then as much of the next
  layer as fits is copied ahead, and the rest passes through the slots in waves. ``memory=own`` takes the two layers'
  experts anyhow, so it is no system of equal memory any more.
* The ring closes over tokens: while the last layer computes, the next step's first is copied.
* Copies are serial and in order of issue.
"""

from typing import Literal

from sim.plan import Plan
from sim.policies.base import Parameters, Policy
from sim.view import View


class SEMoEParameters(Parameters):
    """Parameters of se-moe."""

    memory: Literal["cache", "own"] = "cache"
    """what the cache holds of the ring, in waves where that is less than two layers; or two layers whatever the cache
    size."""


class SEMoE(Policy):
    """Streams every layer whole through a ring of two."""

    name = "se-moe"
    summary = "SE-MoE: a ring of two layers, the whole next layer copied while this one computes"
    takes = SEMoEParameters
    parameters: SEMoEParameters

    def plan(self, view: View) -> Plan:
        """Nothing to decide but the size of the ring."""
        sizes, experts = self.setting.model.expert_bytes, self.setting.model.experts
        pairs = [(a + b) * experts for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True)]
        least = max(pairs) if self.parameters.memory == "own" else 0
        return Plan(eviction="fifo", ring=True, most_bytes=max(pairs), least_bytes=least, discipline="fifo")
