"""Plain caches that fetch on demand: LRU, LFU and FIFO, one pool or a pool a layer."""

from typing import ClassVar, Literal

from sim.plan import Plan
from sim.policies.base import Parameters, Policy
from sim.view import View


class CacheParameters(Parameters):
    """Parameters of a plain cache."""

    scope: Literal["global", "layer"] = "global"
    """share the slots over all layers, or split them evenly, a pool a layer."""


class LFUParameters(CacheParameters):
    """Parameters of LFU."""

    counts: Literal["resident", "always"] = "resident"
    """uses count while an expert is resident, or since the run began."""


class LRU(Policy):
    """Evict the least recently needed expert."""

    name = "lru"
    summary = "cache, evict the least recently used"
    variants: ClassVar[tuple[str, ...]] = ("scope=layer",)
    takes = CacheParameters
    parameters: CacheParameters
    eviction: ClassVar[str] = "lru"

    def plan(self, view: View) -> Plan:
        """Fetch on demand."""
        return Plan(eviction=self.eviction, per_layer=self.parameters.scope == "layer")


class FIFO(LRU):
    """Evict the expert that has been resident longest."""

    name = "fifo"
    summary = "cache, evict the first that came in"
    variants = ()
    eviction = "fifo"


class LFU(LRU):
    """Evict the expert needed least often."""

    name = "lfu"
    summary = "cache, evict the least often used"
    variants = ("counts=always",)
    takes = LFUParameters
    parameters: LFUParameters

    def plan(self, view: View) -> Plan:
        """Fetch on demand."""
        rule = "lfu" if self.parameters.counts == "resident" else "perfect-lfu"
        return Plan(eviction=rule, per_layer=self.parameters.scope == "layer")
