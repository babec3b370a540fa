"""Times of one operation, and how the runs of several are mixed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Key = TypeVar("Key")
Work = Sequence[Callable[[], Any]]
"""The same operation on several inputs, which are used in turn."""
BURSTS = 5
"""How many times each of several things that are timed has its turn."""


@dataclass(frozen=True)
class Timing:
    """Nanoseconds of one operation: median, 10th and 90th percentile of ``runs`` runs."""

    ns: int
    low: int
    high: int
    runs: int

    @staticmethod
    def of(samples: Sequence[float]) -> "Timing":
        """From times in nanoseconds, at least one."""
        ordered = sorted(samples)
        low, high = (ordered[round((len(ordered) - 1) * share)] for share in (0.1, 0.9))
        return Timing(_whole(median(ordered)), _whole(low), _whole(high), len(ordered))

    def over(self, parts: int, beyond: int = 0) -> "Timing":
        """The share of each of ``parts`` equal parts of what is ``beyond`` so many nanoseconds."""
        ns, low, high = (_whole((time - beyond) / parts) for time in (self.ns, self.low, self.high))
        return Timing(ns, low, high, self.runs)

    def __str__(self) -> str:
        return f"{self.ns / 1e3:,.1f} us ({self.low / 1e3:,.1f} to {self.high / 1e3:,.1f})"


def _whole(ns: float) -> int:
    return max(1, round(ns))


def host_ns(work: Callable[[], Any]) -> int:
    """Nanoseconds of ``work`` by the host's clock."""
    begin = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - begin


def bursts(runs: int) -> Iterator[int]:
    """Sizes of the bursts that ``runs`` runs are cut into, as equal as may be, none empty."""
    count = min(BURSTS, runs)
    yield from ((runs * (i + 1) // count) - (runs * i // count) for i in range(count))
