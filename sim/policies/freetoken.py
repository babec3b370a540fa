"""FreeToken: one cache for all layers; of a call's misses some are copied and kept, the others computed on the host.

arXiv 2608.16157, its policy q*: the split for which link and host end together, by bandwidths that were measured while
both are at work. Here it follows from what copying and computing an expert of one row take; a step of ``stream_from``
rows or more copies everything.
"""

from dataclasses import replace

import numpy as np
from pydantic import Field

from sim.plan import Host, Plan
from sim.policies.hosting import STREAM_FROM, CacheRule, HostingPolicy, HostParameters
from sim.view import View


class FreeTokenParameters(HostParameters):
    """Parameters of freetoken."""

    eviction: CacheRule = "lru"
    """who leaves for what is copied."""
    stream_from: int = Field(default=STREAM_FROM, ge=0, le=2**30)
    """rows of a step from which everything missing is copied."""


class FreeToken(HostingPolicy):
    """Misses split between the link and the host."""

    name = "freetoken"
    summary = "FreeToken: a global cache; misses are split between the link and the CPU so that both end together"
    takes = FreeTokenParameters
    parameters: FreeTokenParameters

    def plan(self, view: View) -> Plan:
        """Keep what is used, and split what is missing."""
        given, setting = self.parameters, self.setting
        host = self._host(trips=setting.model.top_k, stream_from=given.stream_from)
        return Plan(eviction=given.eviction, host=self._split(host, view.n_experts))

    def _split(self, host: Host, n_experts: int) -> Host:
        """``host`` with how many of n missing experts are copied: those for which the later of both ends first."""
        copies = np.array([self.setting.hardware.copy_ns(size) for size in self.setting.model.expert_bytes], np.int64)
        number = np.arange(n_experts + 1)
        copied = np.zeros((len(copies), n_experts + 1), np.int64)
        for layer, copy in enumerate(copies.tolist()):
            shared, alone = (
                int(host.fixed_ns[layer] + max(read[layer], host.row_ns[layer]))
                for read in (host.shared_ns, host.read_ns)
            )
            for missing in range(1, n_experts + 1):
                on_host = number[missing::-1]
                ends = np.maximum(number[: missing + 1] * copy, on_host * shared + (on_host > 0) * host.call_ns)
                ends[0] = missing * alone + host.call_ns
                copied[layer, missing] = int(ends.argmin())
        return replace(host, copied=copied)
