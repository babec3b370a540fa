"""How far a simulated run is from the measured one, component by component.

Errors are simulated over measured, less 1. A ratio of look-ups is compared in points, ``simulated - measured``. Parts
of a run's time are compared by their share of it as well: a part that takes next to no time has no error worth a ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sim.report.metrics import Counts, Report

Unit = Literal["tokens/s", "ms", "look-ups", "share", "bytes"]

MATTERS = 0.01
"""A part of the time that is less than this share of the run is not compared by itself."""


@dataclass(frozen=True)
class Component:
    """One component of one pair of runs."""

    policy: str
    cache: str
    component: str
    unit: Unit
    simulated: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative, or the difference for a share; None where either is undefined or the measured one is 0."""
        if self.simulated is None or self.measured is None:
            return None
        if self.unit == "share":
            return self.simulated - self.measured
        if self.measured == 0:
            return 0.0 if self.simulated == 0 else None
        return self.simulated / self.measured - 1


def compare(simulated: Report, measured: Report, cache: str, policy: str | None = None) -> list[Component]:
    """Every component of two reports of the same run, the reports' own figures first, then decode's parts."""
    name = policy or measured.policy
    rows = []
    for component, unit, read in _COMPONENTS:
        rows.append(Component(name, cache, component, unit, read(simulated), read(measured)))
    return rows


def _counted(key: str) -> Callable[[Report], float | None]:
    return lambda report: _plain(getattr(report.decode, key))


def _plain(value: Any) -> float | None:
    return None if value is None else float(value)


def _time(*parts: str) -> Callable[[Report], float | None]:
    """Milliseconds of some parts of a decoded token."""
    return lambda report: sum(report.decode.time_ms.get(part, 0.0) for part in parts) / max(1, report.decode.tokens)


def _prefill(*parts: str) -> Callable[[Report], float | None]:
    """Milliseconds of some parts of all prefills together."""
    return lambda report: sum(report.prefill.time_ms.get(part, 0.0) for part in parts)


def _moved(counts: Counts) -> float:
    return float(counts.link_bytes["demand"] + counts.link_bytes["prefetch"])


_COMPONENTS: tuple[tuple[str, Unit, Callable[[Report], float | None]], ...] = (
    ("throughput", "tokens/s", lambda r: r.tokens_per_s),
    ("TTFT mean", "ms", lambda r: r.ttft_ms.mean),
    ("TPOT mean", "ms", lambda r: r.tpot_ms.mean),
    ("TPOT p50", "ms", lambda r: r.tpot_ms.p50),
    ("TPOT p95", "ms", lambda r: r.tpot_ms.p95),
    ("TPOT p99", "ms", lambda r: r.tpot_ms.p99),
    ("hits", "share", _counted("hit_ratio")),
    ("late", "share", _counted("late_ratio")),
    ("misses", "share", _counted("miss_ratio")),
    ("look-ups", "look-ups", _counted("lookups")),
    ("hit look-ups", "look-ups", _counted("hits")),
    ("prefetches", "look-ups", lambda r: float(r.decode.prefetches["issued"])),
    # What the loop adds to kernels is part of a layer's time in simulation and stands apart in a measurement.
    ("compute and loop", "ms", _time("compute", "other")),
    ("stall demand", "ms", _time("stall_demand")),
    ("stall late", "ms", _time("stall_late")),
    ("stall host", "ms", _time("stall_host")),
    ("predict", "ms", _time("predict")),
    ("bytes demand", "bytes", lambda r: float(r.decode.link_bytes["demand"])),
    ("bytes prefetch", "bytes", lambda r: float(r.decode.link_bytes["prefetch"])),
    ("bytes", "bytes", lambda r: _moved(r.decode)),
    ("bytes prefill", "bytes", lambda r: _moved(r.prefill)),
    ("prefill compute and loop", "ms", _prefill("compute", "other")),
    ("prefill stall demand", "ms", _prefill("stall_demand")),
    ("prefill stall late", "ms", _prefill("stall_late")),
    ("prefill predict", "ms", _prefill("predict")),
)

PARTS = ("compute and loop", "stall demand", "stall late", "stall host", "predict")
PREFILL_PARTS = ("prefill compute and loop", "prefill stall demand", "prefill stall late", "prefill predict")


@dataclass(frozen=True)
class Summary:
    """The targets, over all pairs of a table."""

    throughput_worst: float | None
    throughput_mean: float | None
    """None where no run decoded a token."""
    shares_worst: float
    """Hits, late, misses: the largest difference, as a share of look-ups."""
    parts_worst: float
    """The largest relative error of a part that matters."""
    parts_worst_of: str
    ttft_worst: float
    prefill_worst: float
    """As ``parts_worst``, of prefills."""
    prefill_worst_of: str
    pairs: int


def matters(row: Component, rows: list[Component]) -> bool:
    """Whether a part of the time is at least `MATTERS` of its run's time per token, in either clock."""
    parts = PARTS if row.component in PARTS else PREFILL_PARTS
    whole = sum(r.measured or 0.0 for r in rows if r.component in parts and _same(r, row))
    return max(row.simulated or 0.0, row.measured or 0.0) >= MATTERS * whole


def summarise(rows: list[Component]) -> Summary:
    """The worst and mean errors; raises ValueError without rows."""
    pairs = [row for row in rows if row.component == "throughput"]
    throughput = [abs(row.error) for row in pairs if row.error is not None]
    shares = [abs(row.error) for row in rows if row.unit == "share" and row.error is not None]
    ttft = [abs(row.error) for row in rows if row.component == "TTFT mean" and row.error is not None]
    if not pairs:
        raise ValueError("no pair of runs to summarise")
    return Summary(
        max(throughput, default=None),
        sum(throughput) / len(throughput) if throughput else None,
        max(shares, default=0.0),
        *_worst(rows, PARTS),
        max(ttft, default=0.0),
        *_worst(rows, PREFILL_PARTS),
        len(pairs),
    )


def _worst(rows: list[Component], components: tuple[str, ...]) -> tuple[float, str]:
    """The largest error of those of ``components`` that matter, and whose it is."""
    parts = [(_size(row), row) for row in rows if row.component in components and matters(row, rows)]
    worst, part = max(parts, key=lambda pair: pair[0], default=(0.0, None))
    return worst, f"{part.component}, {part.policy} at {part.cache}" if part else ""


def _size(row: Component) -> float:
    """A part that is there on one clock alone is off by all of it."""
    return 1.0 if row.error is None else abs(row.error)


def _same(a: Component, b: Component) -> bool:
    return (a.policy, a.cache) == (b.policy, b.cache)
