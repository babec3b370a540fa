"""How far a simulated run is from the measured one, component by component.

Errors are simulated over measured, less 1. A ratio of look-ups is compared in points, ``simulated - measured``. Parts
of a run's time are compared by their share of it as well: a part that takes next to no time has no error worth a ratio.

A pair that was measured several times has an error against the run that counts, the fastest, and one against the median
of all. The latter is set against the spread: how far the runs of the pair are apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from sim.report.metrics import Report

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
    """Of the run that counts."""
    trace: str = ""
    """Its file's name."""
    runs: tuple[float | None, ...] = ()
    """What each run of the pair measured, where there were several."""

    @property
    def pair(self) -> tuple[str, str, str]:
        """Whose component it is: policy, cache and trace."""
        return self.policy, self.cache, self.trace

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

    @property
    def size(self) -> float:
        """Of the error; a part that is there on one clock alone is off by all of it."""
        return 1.0 if self.error is None else abs(self.error)

    @property
    def known(self) -> list[float]:
        """What runs measured, those that did."""
        return [value for value in self.runs if value is not None]

    @property
    def of_median(self) -> "Component":
        """The same against the median of all runs; itself where there was one run."""
        return replace(self, measured=median(self.known), runs=()) if self.known else replace(self, runs=())

    @property
    def spread(self) -> float | None:
        """From the lowest run to the highest, as a share of their median, or in points; None for fewer than two."""
        known = self.known
        if len(known) < 2:
            return None
        apart = max(known) - min(known)
        if self.unit == "share" or not apart:
            return apart
        return apart / abs(median(known)) if median(known) else None

    @property
    def in_spreads(self) -> float | None:
        """The error against the median as a multiple of the spread; None where either is not known or all is alike."""
        error, spread = self.of_median.error, self.spread
        return abs(error) / spread if error is not None and spread else None

    @property
    def explained(self) -> bool:
        """Whether the machine's own spread explains the error: some runs were no slower, and some no faster."""
        known = self.known
        return len(known) > 1 and self.simulated is not None and min(known) <= self.simulated <= max(known)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the errors; what several runs tell only where there were several."""
        data = asdict(self) | {"error": self.error}
        runs = data.pop("runs")
        if not data["trace"]:
            del data["trace"]
        if not runs:
            return data
        several = {"median": self.of_median.measured, "median_error": self.of_median.error, "spread": self.spread}
        return data | several | {"in_spreads": self.in_spreads, "explained": self.explained, "runs": list(runs)}


def compare(
    simulated: Report, measured: Report, cache: str, policy: str | None = None, trace: str = "",
    runs: Sequence[Report] = (),
) -> list[Component]:  # fmt: skip
    """Every component of two reports of the same run, the reports' own figures first, then decode's parts.

    ``runs`` are all measured runs of the pair, where there were several.
    """
    name, several = policy or measured.policy, runs if len(runs) > 1 else ()
    return [
        Component(name, cache, what, unit, read(simulated), read(measured), trace, tuple(map(read, several)))
        for what, unit, read in _COMPONENTS
    ]


def _counted(key: str) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        value = getattr(report.decode, key)
        return None if value is None else float(value)

    return read


def _time(*parts: str) -> Callable[[Report], float | None]:
    """Milliseconds of some parts of a decoded token."""
    return lambda report: sum(report.decode.time_ms.get(part, 0.0) for part in parts) / max(1, report.decode.tokens)


def _prefill(*parts: str) -> Callable[[Report], float | None]:
    """Milliseconds of some parts of all prefills together."""
    return lambda report: sum(report.prefill.time_ms.get(part, 0.0) for part in parts)


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
    ("compute and loop", "ms", _time("compute", "host_thread", "other")),
    ("stall demand", "ms", _time("stall_demand")),
    ("stall late", "ms", _time("stall_late")),
    ("stall host", "ms", _time("stall_host")),
    ("predict", "ms", _time("predict")),
    ("bytes demand", "bytes", lambda r: float(r.decode.link_bytes["demand"])),
    ("bytes prefetch", "bytes", lambda r: float(r.decode.link_bytes["prefetch"])),
    ("bytes", "bytes", _counted("moved")),
    ("bytes prefill", "bytes", lambda r: float(r.prefill.moved)),
    ("prefill compute and loop", "ms", _prefill("compute", "host_thread", "other")),
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
    of_run = [r for r in rows if r.component in parts and r.pair == row.pair]
    return max(row.simulated or 0.0, row.measured or 0.0) >= MATTERS * sum(r.measured or 0.0 for r in of_run)


def named(row: Component, rows: Sequence[Component]) -> str:
    """The pair of ``row`` in words; with its trace where the pairs of ``rows`` have several."""
    of = f" of {row.trace}" if len({each.trace for each in rows}) > 1 else ""
    return f"{row.policy} at {row.cache}{of}"


def worst(rows: list[Component], components: tuple[str, ...]) -> Component | None:
    """The one with the largest error of those of ``components`` that matter."""
    parts = [row for row in rows if row.component in components and matters(row, rows)]
    return max(parts, key=lambda row: row.size, default=None)


def summarise(rows: list[Component]) -> Summary:
    """The worst and mean errors; raises ValueError without rows."""

    def errors(*components: str) -> list[float]:
        return [abs(row.error) for row in rows if row.component in components and row.error is not None]

    def of(part: Component | None) -> tuple[float, str]:
        return (part.size, f"{part.component}, {named(part, rows)}") if part else (0.0, "")

    pairs = sum(row.component == "throughput" for row in rows)
    if not pairs:
        raise ValueError("no pair of runs to summarise")
    throughput = errors("throughput")
    return Summary(
        max(throughput, default=None),
        sum(throughput) / len(throughput) if throughput else None,
        max(errors("hits", "late", "misses"), default=0.0),
        *of(worst(rows, PARTS)),
        max(errors("TTFT mean"), default=0.0),
        *of(worst(rows, PREFILL_PARTS)),
        pairs,
    )
