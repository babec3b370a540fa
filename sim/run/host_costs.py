"""What experts cost on the host, a look-up: ``sim.plan.Host`` applied to a workload, in whole nanoseconds."""

from dataclasses import dataclass

import numpy as np

from sim.plan import Host
from sim.workload import Workload


@dataclass(frozen=True)
class HostCosts:
    """Time of each look-up's expert on the host, and whether it runs there if it is absent; all (N,).

    Attributes:
        alone: int64 ns with host memory to itself.
        shared: int64 ns while the link takes its part of host memory.
        chosen: bool, by the rows of the step where the plan says from how many on experts are copied, else where
            ``alone`` is less than copying the expert and running it on the GPU.
    """

    alone: np.ndarray
    shared: np.ndarray
    chosen: np.ndarray


def host_costs(work: Workload, host: Host) -> HostCosts:
    """The costs of every look-up of ``work``."""
    layer = work.expert // work.n_experts
    rows_ns = work.tokens * host.row_ns[layer]
    alone, shared = (host.fixed_ns[layer] + np.maximum(read[layer], rows_ns) for read in (host.read_ns, host.shared_ns))
    if host.stream_from is not None:
        rows = np.diff(work.schedule.offsets)[work.call // work.n_layers]
        return HostCosts(alone, shared, rows < host.stream_from)
    return HostCosts(alone, shared, alone < np.array(work.copy_ns, np.int64)[layer] + work.if_awaited_ns)
