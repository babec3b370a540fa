"""Mixtral-offloading, called Cache-MoE where it is a baseline: an LRU cache a layer, and the next layer's gate.

A. Eliseev, D. Mazur, arXiv 2312.17238. Every layer keeps its k most recently used experts. Once a layer's own experts
are loaded, the next layer's gate is asked about this layer's hidden state, and the one or two experts that it names
first are loaded while the layer computes.

Where the published code (commit ce54518 of dvmazur/mixtral-offloading) and the paper differ, this is the paper: the
code has the cache alone (``speculate=0``), and it swaps (``writeback=true``): the expert that leaves is copied to the
host first, on the same stream, so twice the bytes move. Else evicting is free, as in the paper's account of what is
transferred.

Decided here:

* A guess takes its slot in the next layer's cache when its copy begins. The paper loads it into a spare buffer, to be
  swapped in when it is used: a wrong guess there costs a copy, here also the least recent expert of that layer. The
  memory of the spare buffers is slots here.
* Transfers are not interrupted, and demands go before guesses that have not begun: the code's one copy stream.
* Prompts are encoded layer by layer with no guesses: almost every expert of a layer is needed by some token.
* Sequences that decode together: the guesses of all, each sequence's first ones first.
* ``eviction`` and ``scope`` put another rule, or one pool of all layers, in the place of the paper's LRU a layer. There
  is no ``eviction=score``: a gate names experts of the next layer alone, and says nothing of how long to keep them.
"""

from typing import Literal

from pydantic import Field

from sim.plan import Plan
from sim.policies.base import Parameters, Policy
from sim.predictors.decode_requests import best_first
from sim.view import View


class CacheMoEParameters(Parameters):
    """Parameters of cache-moe."""

    speculate: int = Field(default=2, ge=0, le=10_000)
    """how many experts that the next layer's gate names are loaded early; the paper takes 1 or 2."""
    most: int = Field(default=0, ge=0)
    """of those named, at most so many are loaded, the first that are absent; 0 for all. AdapMoE loads 1."""
    idle: bool = False
    """load early only if the link has nothing to do once the layer's demands are made."""
    eviction: Literal["lru", "lfu", "perfect-lfu"] = "lru"
    """the paper's lru, lfu, or perfect-lfu."""
    writeback: bool = False
    """copy the expert that leaves a slot to the host first, as the published code does."""
    scope: Literal["global", "layer"] = "layer"
    """split the slots evenly, a pool a layer, as in the paper, or share them over all layers."""


class CacheMoE(Policy):
    """An LRU cache a layer, with speculative loading by the next layer's gate."""

    name = "cache-moe"
    summary = "Mixtral-offloading: LRU a layer, load early what the next layer's gate names"
    takes = CacheMoEParameters
    variants = ("speculate=0",)
    parameters: CacheMoEParameters
    needs = frozenset({"lookahead"})

    def plan(self, view: View) -> Plan:
        """After each layer's demands, ask for what the next one's gate names."""
        layers = range(1, view.n_layers)
        named = [view.lookahead(layer)[view.decoding, None, : self.parameters.speculate] for layer in layers]
        requests = best_first(view, zip(layers, layers, named, strict=True))
        given = self.parameters
        return Plan(
            eviction=given.eviction,
            per_layer=given.scope == "layer",
            requests=requests,
            most_issued=given.most,
            only_idle=given.idle,
            write_back=given.writeback,
            discipline="demand-first",
        )
