"""Plain caches that fetch on demand, one pool or a pool a layer; they differ in their rule (``sim.eviction``)."""

from abc import abstractmethod
from typing import Literal

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


class Cache(Policy):
    """A cache that fetches on demand."""

    takes = CacheParameters
    parameters: CacheParameters

    @property
    @abstractmethod
    def eviction(self) -> str:
        """The name of its rule."""

    def plan(self, view: View) -> Plan:
        """Fetch on demand."""
        return Plan(eviction=self.eviction, per_layer=self.parameters.scope == "layer")


class LRU(Cache):
    """Evict the least recently needed expert."""

    name = "lru"
    summary = "cache, evict the least recently used"
    variants = ("scope=layer",)
    eviction = "lru"


class FIFO(Cache):
    """Evict the expert that has been resident longest."""

    name = "fifo"
    summary = "cache, evict the first that came in"
    eviction = "fifo"


class LFU(Cache):
    """Evict the expert needed least often."""

    name = "lfu"
    summary = "cache, evict the least often used since it was loaded"
    takes = LFUParameters
    parameters: LFUParameters

    @property
    def eviction(self) -> str:
        """The name of its rule."""
        return "lfu" if self.parameters.counts == "resident" else "perfect-lfu"


class PerfectLFU(Cache):
    """Evict the expert needed least often since the run began.

    The control of all that learns: it counts the traffic at hand, in a slot or not, and has no profile and no label.
    """

    name = "perfect-lfu"
    summary = "cache, evict the least often used since the run began"
    eviction = "perfect-lfu"


class LFRU(Cache):
    """Evict by frequency times recency."""

    name = "lfru"
    summary = "cache, evict the lowest product of uses and time of the last use"
    eviction = "lfru"


class DecayedLFU(Cache):
    """Evict the expert needed least often, where old uses count less."""

    name = "decayed-lfu"
    summary = "cache, evict the least often used since the run began, old uses counting less"
    eviction = "decayed-lfu"


class Min(Cache):
    """Evict the expert needed last (L. A. Belady, IBM Systems J. 5(2), 1966).

    Where calls need one expert each, of one size, no cache that admits whatever it fetches has more hits. One that may
    run an expert without keeping it can have more.
    """

    name = "min"
    summary = "reference: fetches on demand, knows the future, evicts what is needed last (MIN)"
    clairvoyant = True
    eviction = "next-use"


class LeastStale(Cache):
    """Evict what this step has used already, the latest first."""

    name = "least-stale"
    summary = "cache, evict what this step has used already, the latest first (SpecMD)"
    eviction = "least-stale"
