"""What happened in a run, as integers: the common record of every engine, from which reports are made."""

from dataclasses import dataclass, field

import numpy as np

REUSE_HIT, PREFETCH_HIT, LATE_QUEUED, LATE_IN_FLIGHT, MISS, HOSTED = range(6)
"""What a look-up found. HOSTED is a miss too: of an expert that runs on the host and is not copied."""


def _pair() -> list[int]:
    return [0, 0]


@dataclass
class Counters:
    """Totals of a run, one a phase each: ``[prefill, decode]``, which `traces.schema.PREFILL` and ``DECODE`` index.

    Transfers and what becomes of a prefetch are counted in the phase that issued it, evictions in the phase in which
    they happen.
    """

    issued: list[int] = field(default_factory=_pair)
    useful: list[int] = field(default_factory=_pair)
    late: list[int] = field(default_factory=_pair)
    unused: list[int] = field(default_factory=_pair)
    cancelled: list[int] = field(default_factory=_pair)
    in_flight: list[int] = field(default_factory=_pair)
    demand_bytes: list[int] = field(default_factory=_pair)
    prefetch_bytes: list[int] = field(default_factory=_pair)
    wasted: list[int] = field(default_factory=_pair)
    evictions: list[int] = field(default_factory=_pair)
    written_back: list[int] = field(default_factory=_pair)
    """Bytes of those evicted that crossed the link to the host."""
    host_busy: list[int] = field(default_factory=_pair)
    """Nanoseconds that the host's thread worked, where its acts take time."""
    host_waits: list[int] = field(default_factory=_pair)
    """Nanoseconds that the GPU waited for it."""
    inserted: list[int] = field(default_factory=_pair)
    """Experts that ran on the host and whose copies were asked for then, for later."""
    landed_unused: dict[int, int] = field(default_factory=dict)
    """Experts that a prefetch brought and that nobody has needed yet: the phase that issued it."""

    def moved(self, prefetch: bool, phase: int, size: int) -> None:
        """``size`` bytes crossed the link."""
        (self.prefetch_bytes if prefetch else self.demand_bytes)[phase] += size

    def useful_prefetch(self, expert: int) -> None:
        """An expert that a prefetch brought is needed for the first time."""
        phase = self.landed_unused.pop(expert, None)
        if phase is not None:
            self.useful[phase] += 1

    def unused_prefetch(self, expert: int, size: int) -> None:
        """An expert that a prefetch brought leaves, or the run ends, before anybody needed it."""
        phase = self.landed_unused.pop(expert, None)
        if phase is not None:
            self.unused[phase] += 1
            self.wasted[phase] += size


@dataclass(frozen=True)
class Log:
    """One run.

    Attributes:
        finish: when each step ended (S,) int64 ns.
        found: what each look-up found (N,) uint8, in the order of ``Workload.expert``.
        stall_demand, stall_late: GPU time spent waiting, a call (S * L,) int64 ns.
        predict: time spent predicting on the critical path, a step (S,) int64 ns.
        counters: totals.
        stall_host: GPU time spent waiting for the host, a call (S * L,) int64 ns; empty where no expert may run there.
        waited: GPU time of experts that were waited for, beyond what they take where they are there, a call (S * L,)
            int64 ns, maybe below 0; empty where no such difference is made.
        cold: steps before which the cache was emptied; empty where only the first begins so.
    """

    finish: np.ndarray
    found: np.ndarray
    stall_demand: np.ndarray
    stall_late: np.ndarray
    predict: np.ndarray
    counters: Counters
    stall_host: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    waited: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cold: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
