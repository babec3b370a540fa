"""The report of a run: one form for simulated and measured runs, made from the log alone.

Counters at the top of a report are those of decode; ``prefill`` holds the same of prefill. What became of a prefetch is
counted in the phase that issued it. Times in a report are in milliseconds, sizes in bytes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.bounds import Bounds
from sim.log import DECODE, HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, PREFILL, REUSE_HIT, Log
from sim.workload import Workload

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of a set of times in ms; all None where the set is empty."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @staticmethod
    def of(ns: np.ndarray) -> "Spread":
        """From nanoseconds, any shape."""
        if not ns.size:
            return Spread(None, None, None, None)
        p50, p95, p99 = np.percentile(ns, [50, 95, 99])
        return Spread(*(float(v) / 1e6 for v in (ns.mean(), p50, p95, p99)))


@dataclass(frozen=True)
class Counts:
    """Look-ups, bytes and prefetches of one phase, or of the whole run."""

    tokens: int
    activations: int
    lookups: int
    hits: int
    reuse_hits: int
    prefetch_hits: int
    late: int
    late_queued: int
    late_in_flight: int
    misses: int
    hosted: int
    hit_ratio: float | None
    late_ratio: float | None
    miss_ratio: float | None
    compulsory_misses: int
    evictions: int
    link_bytes: dict[str, int]
    prefetches: dict[str, int]
    time_ms: dict[str, float]

    def columns(self) -> dict[str, Any]:
        """All of them side by side, units in their names: ``link_demand_bytes``, ``time_compute_ms``."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, dict)}
        plain |= {f"link_{kind}_bytes": size for kind, size in self.link_bytes.items()}
        plain |= {f"prefetches_{fate}": count for fate, count in self.prefetches.items()}
        return plain | {f"time_{part}_ms": ms for part, ms in self.time_ms.items()}


@dataclass(frozen=True)
class Report:
    """One run; see the module. ``total`` counts prefill and decode together, ``notes`` are sentences for a person."""

    policy: str
    parameters: dict[str, Any]
    decode: Counts
    tokens_per_s: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    gpu_bytes: dict[str, int]
    bounds: dict[str, float | None]
    efficiency: float | None
    run_ms: float
    per_layer: list[dict[str, Any]]
    prefill: Counts
    total: Counts
    clock: str
    provenance: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data with decode's counters at the top; strict JSON, None for what is undefined."""
        data = asdict(self)
        decode = data.pop("decode")
        head = {"policy": data.pop("policy"), "parameters": data.pop("parameters")}
        return head | decode | data

    def to_frame(self) -> "pandas.DataFrame":
        """A row for each phase, prefill and decode, with all its counters; units are in the names of the columns.

        A ratio that is not defined is NaN. Raises ModuleNotFoundError where pandas is not installed.
        """
        import pandas

        run = {"policy": self.policy, "clock": self.clock}
        phases = {"prefill": self.prefill, "decode": self.decode}
        frame = pandas.DataFrame([run | {"phase": phase} | counts.columns() for phase, counts in phases.items()])
        ratios = [name for name in frame if str(name).endswith("_ratio")]
        return frame.astype(dict.fromkeys(ratios, float))


def report(
    work: Workload,
    log: Log,
    bound: Bounds | None,
    *,
    policy: str,
    parameters: Mapping[str, Any],
    gpu_bytes: dict[str, int],
    clock: str,
    provenance: dict[str, Any],
    settings: dict[str, Any],
    notes: list[str],
) -> Report:
    """Reduce a log to its report; ``bound`` is None where experts run on the host: they need neither GPU nor link."""
    begin = np.concatenate([[0], log.finish[:-1]])
    decode = work.schedule.phase == DECODE
    decode_ns = int((log.finish - begin)[decode].sum())
    tokens = int(np.diff(work.schedule.offsets)[decode].sum())
    ttft, tpot = _latencies(work, log.finish, begin)
    run_ns = int(log.finish[-1])
    return Report(
        policy=policy,
        parameters=dict(parameters),
        decode=_counts(work, log, begin, [DECODE]),
        tokens_per_s=_ratio(tokens * 1e9, decode_ns),
        ttft_ms=Spread.of(ttft),
        tpot_ms=Spread.of(tpot),
        gpu_bytes=gpu_bytes,
        bounds={
            "compute_tokens_per_s": _ratio(tokens * 1e9, bound.decode_compute_ns) if bound else None,
            "link_tokens_per_s": _ratio(tokens * bound.bytes_per_s, bound.decode_link_bytes) if bound else None,
            "min_hit_ratio": bound.decode_hit_ratio if bound else None,
        },
        efficiency=_ratio(bound.ns, run_ns) if bound else None,
        run_ms=run_ns / 1e6,
        per_layer=_per_layer(work, log),
        prefill=_counts(work, log, begin, [PREFILL]),
        total=_counts(work, log, begin, [PREFILL, DECODE]),
        clock=clock,
        provenance=provenance,
        settings=settings,
        notes=notes,
    )


def _ratio(a: float, b: float) -> float | None:
    return float(a) / float(b) if b else None


def _latencies(work: Workload, finish: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Time to first token of each prefill, and between tokens of a sequence for each decode row, ns.

    The clock of a prefill starts when the machine turns to it. A sequence that waits while another prefills pays for
    that in its time between tokens.
    """
    schedule = work.schedule
    prefills = np.flatnonzero(schedule.phase == PREFILL)
    ttft = (finish - begin)[prefills]
    sequence_end: dict[int, int] = {}
    gaps: list[int] = []
    rows, offsets, ends, starts = schedule.rows.tolist(), schedule.offsets.tolist(), finish.tolist(), begin.tolist()
    for step, phase in enumerate(schedule.phase.tolist()):
        for row in rows[offsets[step] : offsets[step + 1]]:
            if phase == DECODE:
                # The row before of the same sequence is the trace's row before; a sequence without one starts here.
                gaps.append(ends[step] - sequence_end.pop(row - 1, starts[step]))
            sequence_end[row] = ends[step]
    return ttft, np.array(gaps, np.int64)


def _counts(work: Workload, log: Log, begin: np.ndarray, phases: list[int]) -> Counts:
    steps = np.isin(work.schedule.phase, phases)
    lookup = np.isin(work.lookup_phase, phases)
    found = np.bincount(log.found[lookup], minlength=6).tolist()
    lookups = int(lookup.sum())
    hits = found[REUSE_HIT] + found[PREFETCH_HIT]
    late = found[LATE_QUEUED] + found[LATE_IN_FLIGHT]
    misses = found[MISS] + found[HOSTED]
    first = np.zeros(len(work.expert), bool)
    begun = np.searchsorted(log.cold, work.call // work.n_layers, side="right")
    first[np.unique(begun * (work.n_layers * work.n_experts) + work.expert, return_index=True)[1]] = True
    c = log.counters
    calls = np.repeat(steps, work.n_layers)
    stall_demand, stall_late = int(log.stall_demand[calls].sum()), int(log.stall_late[calls].sum())
    wall = int((log.finish - begin)[steps].sum())
    stall_host = int(log.stall_host[calls].sum()) if len(log.stall_host) else 0
    compute = int(work.compute_ns(work.expert_ns * (log.found != HOSTED))[steps].sum())
    compute += int(log.waited[calls].sum()) if len(log.waited) else 0
    predict = int(log.predict[steps].sum())

    def counted(pair: list[int]) -> int:
        return sum(pair[phase] for phase in phases)

    return Counts(
        tokens=int(np.diff(work.schedule.offsets)[steps].sum()),
        activations=int(work.activations[steps].sum()),
        lookups=lookups,
        hits=hits,
        reuse_hits=found[REUSE_HIT],
        prefetch_hits=found[PREFETCH_HIT],
        late=late,
        late_queued=found[LATE_QUEUED],
        late_in_flight=found[LATE_IN_FLIGHT],
        misses=misses,
        hosted=found[HOSTED],
        hit_ratio=_ratio(hits, lookups),
        late_ratio=_ratio(late, lookups),
        miss_ratio=_ratio(misses, lookups),
        compulsory_misses=int((first & lookup & (log.found >= MISS)).sum()),
        evictions=counted(c.evictions),
        link_bytes={
            "demand": counted(c.demand_bytes),
            "prefetch": counted(c.prefetch_bytes),
            "wasted": counted(c.wasted),
        },
        prefetches={
            fate: counted(getattr(c, fate))
            for fate in ("issued", "useful", "late", "unused", "cancelled", "in_flight")
        },
        time_ms={
            "compute": compute / 1e6,
            "stall_demand": stall_demand / 1e6,
            "stall_late": stall_late / 1e6,
            "stall_host": stall_host / 1e6,
            "predict": predict / 1e6,
            "other": (wall - compute - stall_demand - stall_late - stall_host - predict) / 1e6,
        },
    )


def _per_layer(work: Workload, log: Log) -> list[dict[str, Any]]:
    """Decode's look-ups and stalls of each routed layer."""
    lookup = work.lookup_phase == DECODE
    layer = (work.expert // work.n_experts)[lookup]
    table = np.zeros((work.n_layers, 6), np.int64)
    np.add.at(table, (layer, log.found[lookup]), 1)
    calls = np.repeat(work.schedule.phase == DECODE, work.n_layers)
    stalls = log.stall_demand + log.stall_late + (log.stall_host if len(log.stall_host) else 0)
    stall = np.where(calls, stalls, 0).reshape(-1, work.n_layers).sum(0)
    return [
        {
            "layer": index,
            "lookups": int(row.sum()),
            "hits": int(row[REUSE_HIT] + row[PREFETCH_HIT]),
            "late": int(row[LATE_QUEUED] + row[LATE_IN_FLIGHT]),
            "misses": int(row[MISS] + row[HOSTED]),
            "hit_ratio": _ratio(row[REUSE_HIT] + row[PREFETCH_HIT], row.sum()),
            "stall_ms": int(stall[index]) / 1e6,
        }
        for index, row in enumerate(table)
    ]
