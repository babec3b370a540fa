"""KTransformers' static placement: some experts of every layer are on the GPU, the others are computed on the host.

doc/en/kt-kernel/experts-sched-Tutorial.md of github.com/kvcache-ai/ktransformers: ``uniform`` places as many in every
layer, ``frequency`` the most used of a profile wherever they are, ``front-loading`` whole layers from the first on.

Decided here: as many are placed as fit, beside room for one copied expert; steps of many rows copy what they lack. What
is placed stays: placing anew at each prompt is left out.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from sim.plan import Plan
from sim.policies.hosting import HostingPolicy, HostParameters, placed
from sim.predictors.popularity import counts_by_domain
from sim.view import View


class KtParameters(HostParameters):
    """Parameters of kt."""

    place: Literal["uniform", "frequency", "front-loading"] = "uniform"
    """which experts are on the GPU."""
    stream_from: int = Field(default=512, ge=0, le=2**30)
    """rows of a step from which experts are copied to the GPU rather than computed on the host; the tutorial's
    ``--kt-gpu-prefill-token-threshold``."""


class Kt(HostingPolicy):
    """A static mask of experts on the GPU."""

    name = "kt"
    summary = "KTransformers: a static choice of experts is on the GPU, the CPU computes the others"
    takes = KtParameters
    variants = ("place=frequency", "place=front-loading")
    parameters: KtParameters
    learns = True

    def plan(self, view: View) -> Plan:
        """Place experts for good."""
        given, total = self.parameters, view.n_layers * view.n_experts
        order = np.arange(total)
        if given.place == "uniform":
            order = order.reshape(view.n_layers, view.n_experts).T.ravel()
        elif given.place == "frequency":
            counts = np.sum([np.zeros(total, np.int64), *counts_by_domain(self.setting.profile).values()], axis=0)
            order = np.lexsort((order, -counts))
        kept = self._fitting(order)
        if given.place == "uniform":  # as many in every layer
            kept = kept[: len(kept) // view.n_layers * view.n_layers]
        requests = placed(kept, view.n_layers, view.n_experts, view.n_steps)
        host = self._host(np.sort(kept), trips=self.setting.model.top_k, stream_from=given.stream_from)
        return Plan(eviction="fifo", keep=False, requests=requests, host=host)
