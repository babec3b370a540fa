"""A cache whose misses run on the host at once and come in beside: for the next token, not for this one.

Pull request 27861 of github.com/ggml-org/llama.cpp: a pool a layer, least recently used first; a missing expert is
computed on the CPU, and inserted while that goes on. Steps of many rows copy what they lack. There so many a layer and
step are inserted at most (``each``; its speed was measured with 2), here so many a step (``cap``), too.

Decided here: what is inserted is wanted until the next visit of its layer, and is no longer asked for after that. Where
``cap`` binds, the first layers' misses come in and the last layers' do not: ``cap=1000,each=2`` is the source's form.
"""

from typing import Literal

from pydantic import Field

from sim.plan import Plan
from sim.policies.hosting import STREAM_FROM, CacheRule, HostingPolicy, HostParameters
from sim.view import View


class LruHostParameters(HostParameters):
    """Parameters of lru-host."""

    cap: int = Field(default=8, ge=0, le=2**20)
    """experts that are inserted in a step, at most."""
    each: int | None = Field(default=None, ge=0, le=2**20)
    """experts that are inserted in a layer and step, at most; None for ``cap`` alone."""
    eviction: CacheRule = "lru"
    """who leaves for them."""
    scope: Literal["all", "layer"] = "layer"
    """all: one pool of slots; layer: as many slots for every layer."""
    stream_from: int = Field(default=STREAM_FROM, ge=0, le=2**30)
    """rows of a step from which experts are copied to the GPU rather than computed on the host."""


class LruHost(HostingPolicy):
    """Misses on the host, insertion beside."""

    name = "lru-host"
    summary = "a cache whose misses are computed on the CPU at once, and copied beside for the next token"
    takes = LruHostParameters
    variants = ("scope=all", "cap=1000,each=2")
    parameters: LruHostParameters

    def plan(self, view: View) -> Plan:
        """Keep what is used, and ask for what ran on the host."""
        given = self.parameters
        host = self._host(
            trips=self.setting.model.top_k,
            stream_from=given.stream_from,
            insert=given.cap,
            insert_each=given.cap if given.each is None else given.each,
        )
        return Plan(eviction=given.eviction, per_layer=given.scope == "layer", host=host)
