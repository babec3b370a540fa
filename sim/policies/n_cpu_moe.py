"""llama.cpp's ``--n-cpu-moe N``: the experts of N layers live on the host and are computed there, others on the GPU.

Pull request 15077 of github.com/ggml-org/llama.cpp. Nothing moves while tokens are decoded. A step of many rows, such
as a prompt, copies what it needs of those layers to the GPU instead (``sim.policies.hosting.STREAM_FROM``).

Decided here: by default N is the smallest for which the others fit, beside room for one copied expert.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from ground.errors import InputError
from sim.plan import Plan
from sim.policies.hosting import STREAM_FROM, HostingPolicy, HostParameters, placed
from sim.view import View


class NCpuMoeParameters(HostParameters):
    """Parameters of n-cpu-moe."""

    layers: int | None = Field(default=None, ge=0, le=2**20)
    """N, routed layers whose experts are on the host; None for as few as possible."""
    side: Literal["first", "last"] = "first"
    """which layers these are."""
    stream_from: int = Field(default=STREAM_FROM, ge=0, le=2**30)
    """rows of a step from which experts are copied to the GPU rather than computed on the host; 1 for always."""


class NCpuMoe(HostingPolicy):
    """Whole layers on the host, the others on the GPU."""

    name = "n-cpu-moe"
    summary = "llama.cpp's --n-cpu-moe: the experts of whole layers stay on the CPU and run there, others on the GPU"
    takes = NCpuMoeParameters
    variants = ("side=last",)
    parameters: NCpuMoeParameters

    def plan(self, view: View) -> Plan:
        """Place whole layers for good; raises InputError where those that are to be on the GPU do not fit."""
        given, model = self.parameters, self.setting.model
        layers = np.arange(view.n_layers)
        kept = layers[::-1] if given.side == "first" else layers  # the first to be kept first
        order = (kept[:, None] * view.n_experts + np.arange(view.n_experts)).ravel()
        fitting = len(self._fitting(order)) // view.n_experts
        if given.layers is not None:
            wanted = max(0, view.n_layers - given.layers)
            if wanted > fitting:
                raise InputError(
                    f"n-cpu-moe: layers is {given.layers}; the experts of the other {wanted} do not fit; expected at "
                    f"least {view.n_layers - fitting}"
                )
            fitting = wanted
        order = np.sort(order[: fitting * view.n_experts])
        requests = placed(order, view.n_layers, view.n_experts, view.n_steps)
        host = self._host(order, trips=model.top_k, stream_from=given.stream_from)
        return Plan(eviction="fifo", keep=False, requests=requests, host=host)
