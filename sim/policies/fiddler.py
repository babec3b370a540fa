"""Fiddler: popular experts stay on the GPU, and what is missing runs on the host where that is faster than copying it.

K. Kamahori et al., ICLR 2025, arXiv 2402.07033. Experts are placed once, the most popular of a profile first, as many
as fit. When a layer needs one that is not there, its time on the CPU, which grows with its tokens, is compared with the
time to copy it, which does not; a copied expert is used and dropped.

The time on the host is an input. Reading an expert's weights takes ``host_gbps``, and ``shared_gbps`` while the link
reads host memory too: by default the machine's where its profile has them, else what others measured elsewhere.
Arithmetic takes the time of one copy for ``tokens`` rows: what the host's cores unpack in that time, where the machine
has them (``--host``), else 10, the ratio of the constants in the published code (commit 227715b of efeslab/fiddler: 7 a
token, 70 a copy). The larger of both counts; with ``host_gbps`` and ``shared_gbps`` of 1000000 that is the published
ratio alone. Rows cross to the host and back.

Decided here:

* Host and GPU work side by side and a layer ends with the later of the two: the code's comment means to minimise that
  maximum, while what it runs is the GPU's part and then the CPU's (``beside=false``).
* The most popular experts are copied when the run begins, over the link and in time, like every other policy's.
* One slot takes what is copied and dropped; a prompt's experts pass through it one by one.
* Popularity is counted over decode tokens of the profile split.
"""

import math

import numpy as np
from pydantic import Field

from sim.machine.hardware import HostCompute
from sim.machine.unpacking import core_gweights
from sim.plan import Host, Plan, Requests
from sim.policies.base import Parameters, Policy, Setting
from sim.predictors.popularity import counts_by_domain
from sim.view import View

HOST_GBPS, SHARED_GBPS = 63.8, 54.0
"""Of a Threadripper PRO 5955WX, whose memory gives 84.5 GB/s: pull request 232 of github.com/FlashML-org/FreeToken."""


class FiddlerParameters(Parameters):
    """Parameters of fiddler."""

    host_gbps: float | None = Field(default=None, ge=0.001, le=1e9)
    """bytes of weights that the host reads in a second while nothing else does, in 10^9; None for the figure of the
    hardware profile, or for 63.8 where it has none."""
    shared_gbps: float | None = Field(default=None, ge=0.001, le=1e9)
    """the same while experts cross the link; None likewise, or for 54.0."""
    tokens: float = Field(default=10.0, ge=0.001, le=1e9)
    """how many tokens an expert serves on the host in the time of copying it."""
    beside: bool = True
    """whether host and GPU work at the same time."""


class Fiddler(Policy):
    """Static placement by popularity; absent experts run on the host when that is cheaper."""

    name = "fiddler"
    summary = "Fiddler: popular experts stay on the GPU, absent ones run on the CPU where that beats copying them"
    takes = FiddlerParameters
    variants = ("beside=False",)
    parameters: FiddlerParameters
    learns = True
    hosts = True

    def __init__(self, setting: Setting, parameters: FiddlerParameters) -> None:
        measured = setting.hardware.host
        self._alone_gbps = parameters.host_gbps or (measured.host_gbps.value if measured else HOST_GBPS)
        self._shared_gbps = parameters.shared_gbps or (measured.shared_gbps.value if measured else SHARED_GBPS)
        used = {"host_gbps": self._alone_gbps, "shared_gbps": self._shared_gbps}  # what a report shows
        self._floor_ns = measured.floor_us.value * 1e3 if measured and measured.floor_us else 0.0
        if measured and "tokens" not in parameters.model_fields_set:
            used["tokens"] = _tokens(setting, measured) or parameters.tokens
        super().__init__(setting, parameters.model_copy(update=used))

    def plan(self, view: View) -> Plan:
        """Place the most popular experts for good; leave the rest to the host or to one slot."""
        order = self._popular(view.n_layers * view.n_experts)
        reserved = np.sort(order)
        call = (view.n_steps - 1) * view.n_layers + order // view.n_experts
        place = np.arange(len(order))
        requests = Requests.build(np.zeros(len(order), np.int64), call, order, place)
        return Plan(eviction="fifo", keep=False, requests=requests, host=self._host(reserved))

    def _popular(self, total: int) -> np.ndarray:
        """The most popular experts, the most used first, that leave room for one more of any size."""
        setting = self.setting
        counts = np.sum([np.zeros(total, np.int64), *counts_by_domain(setting.profile).values()], axis=0)
        order = np.lexsort((np.arange(total), -counts))
        sizes = np.repeat(np.array(setting.model.expert_bytes, np.int64), setting.model.experts)
        return order[np.cumsum(sizes[order]) <= setting.budget - max(setting.model.expert_bytes)]

    def _host(self, reserved: np.ndarray) -> Host:
        """What experts of each layer take on the host, rounded up; copies never make it faster."""
        given, model, hardware = self.parameters, self.setting.model, self.setting.hardware
        sizes = np.array(model.expert_bytes)
        copies = np.array([hardware.copy_ns(size) for size in model.expert_bytes])
        rows = 2 * hardware.copy_ns(2 * model.hidden)  # a row of bfloat16 to the host, and one back
        return Host(
            fixed_ns=np.full(len(sizes), math.ceil(rows + self._floor_ns), np.int64),
            read_ns=np.ceil(sizes / self._alone_gbps).astype(np.int64),
            shared_ns=np.ceil(sizes / min(self._alone_gbps, self._shared_gbps)).astype(np.int64),
            row_ns=np.ceil(copies / given.tokens).astype(np.int64),
            reserved=reserved,
            beside=given.beside,
        )


def _tokens(setting: Setting, host: HostCompute) -> float | None:
    """How many tokens an expert serves on the cores of ``host`` in the time of copying it, if they are known."""
    model, rate = setting.model, core_gweights(setting.model, host.core_gweights)
    if rate is None or host.cores is None:
        return None
    row_ns = model.expert_parameters / (rate * host.cores)
    return max(0.001, setting.hardware.copy_ns(max(model.expert_bytes)) / row_ns)
