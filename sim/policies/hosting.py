"""What policies share that compute experts on the host: what an expert takes there.

The time on the host is an input. Reading an expert's weights takes ``host_gbps``, and ``shared_gbps`` while the link
reads host memory too: by default the machine's where its profile has them, else what others measured elsewhere.
Arithmetic takes the time of one copy for ``tokens`` rows: what the host's cores unpack in that time, where the machine
has them (``--host``), else 10, the ratio of the constants in Fiddler's published code (commit 227715b of
efeslab/fiddler: 7 a token, 70 a copy). The larger of both counts. Rows cross to the host and back.
"""

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from sim.machine.hardware import HostCompute
from sim.machine.unpacking import core_gweights
from sim.plan import Host, Requests
from sim.policies.base import Parameters, Policy, Setting

HOST_GBPS, SHARED_GBPS = 63.8, 54.0
"""Of a Threadripper PRO 5955WX, whose memory gives 84.5 GB/s: pull request 232 of github.com/FlashML-org/FreeToken."""
STREAM_FROM = 32
"""Rows from which llama.cpp copies experts to the GPU rather than computing them where they lie:
``GGML_OP_OFFLOAD_MIN_BATCH`` of github.com/ggml-org/llama.cpp."""


CacheRule = Literal["lru", "fifo", "lfu", "perfect-lfu", "lfru", "decayed-lfu", "least-stale"]
"""Rules of ``sim.eviction`` that need no prediction."""


class HostParameters(Parameters):
    """Parameters of policies that compute experts on the host."""

    host_gbps: float | None = Field(default=None, ge=0.001, le=1e9)
    """bytes of weights that the host reads in a second while nothing else does, in 10^9; None for the figure of the
    hardware profile, or for 63.8 where it has none."""
    shared_gbps: float | None = Field(default=None, ge=0.001, le=1e9)
    """the same while experts cross the link; None likewise, or for 54.0."""
    tokens: float = Field(default=10.0, ge=0.001, le=1e9)
    """how many tokens an expert serves on the host in the time of copying it."""
    beside: bool = True
    """whether host and GPU work at the same time."""


class HostingPolicy(Policy):
    """Base of policies some of whose experts are computed on the host."""

    takes = HostParameters
    parameters: HostParameters
    hosts = True

    def __init__(self, setting: Setting, parameters: HostParameters) -> None:
        measured = setting.hardware.host
        self._alone_gbps = parameters.host_gbps or (measured.host_gbps.value if measured else HOST_GBPS)
        self._shared_gbps = parameters.shared_gbps or (measured.shared_gbps.value if measured else SHARED_GBPS)
        used = {"host_gbps": self._alone_gbps, "shared_gbps": self._shared_gbps}  # what a report shows
        self._floor_ns = measured.floor_us.value * 1e3 if measured and measured.floor_us else 0.0
        if measured and "tokens" not in parameters.model_fields_set:
            used["tokens"] = _tokens(setting, measured) or parameters.tokens
        super().__init__(setting, parameters.model_copy(update=used))

    def _host(self, reserved: np.ndarray | None = None, *, trips: int = 1, **rules: Any) -> Host:
        """What experts of each layer take on the host, rounded up; copies never make it faster.

        A token's row goes there and back once for every ``trips`` experts. ``rules`` are further fields of the result.
        """
        given, model, hardware = self.parameters, self.setting.model, self.setting.hardware
        sizes = np.array(model.expert_bytes)
        copies = np.array([hardware.copy_ns(size) for size in model.expert_bytes])
        rows = 2 * hardware.copy_ns(2 * model.hidden) / trips  # a row of bfloat16 to the host, and one back
        measured = hardware.host.call_us if hardware.host else None
        call_ns = 0 if measured is None else round(measured.value * 1e3)  # which holds these rows
        rows = rows if measured is None else 0
        return Host(
            fixed_ns=np.full(len(sizes), math.ceil(rows + self._floor_ns), np.int64),
            read_ns=np.ceil(sizes / self._alone_gbps).astype(np.int64),
            shared_ns=np.ceil(sizes / min(self._alone_gbps, self._shared_gbps)).astype(np.int64),
            row_ns=np.ceil(copies / given.tokens).astype(np.int64),
            reserved=np.zeros(0, np.int64) if reserved is None else reserved,
            beside=given.beside,
            call_ns=call_ns,
            **rules,
        )

    def _fitting(self, order: np.ndarray) -> np.ndarray:
        """The first of these experts that leave room for one more of any size, in their order."""
        model = self.setting.model
        sizes = np.repeat(np.array(model.expert_bytes, np.int64), model.experts)
        return order[np.cumsum(sizes[order]) <= self.setting.budget - max(model.expert_bytes)]


def _tokens(setting: Setting, host: HostCompute) -> float | None:
    """How many tokens an expert serves on the cores of ``host`` in the time of copying it, if they are known."""
    model, rate = setting.model, core_gweights(setting.model, host.core_gweights)
    if rate is None or host.cores is None:
        return None
    row_ns = model.expert_parameters / (rate * host.cores)
    return max(0.001, setting.hardware.copy_ns(max(model.expert_bytes)) / row_ns)


def placed(order: np.ndarray, n_layers: int, n_experts: int, n_steps: int) -> Requests:
    """Requests that bring these experts to the GPU as a run begins, in this order, and keep them there."""
    call = (n_steps - 1) * n_layers + order // n_experts
    return Requests.build(np.zeros(len(order), np.int64), call, order, np.arange(len(order)))
