"""The report of a run: one form for simulated and measured runs, made from the log alone.

Counters at the top of a report are those of decode; ``prefill`` holds the same of prefill. What became of a prefetch is
counted in the phase that issued it. Times in a report are in milliseconds, sizes in bytes.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.bounds import Bounds
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, REUSE_HIT, Log
from sim.workload import Workload
from traces.schema import DECODE, PREFILL

if TYPE_CHECKING:
    import pandas


BINDS = 0.01
"""The share of a phase's time from which on waits for the host's thread are said."""


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
    """Look-ups, bytes and prefetches of one phase, or of the whole run.

    Of ``misses``, those ``hosted`` were computed on the host and the others waited for a copy. ``uploaded`` are missed
    experts that were copied: these, and those that ran on the host and were inserted beside. So one may be in both.
    """

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
    uploaded: int
    hit_ratio: float | None
    late_ratio: float | None
    miss_ratio: float | None
    compulsory_misses: int
    evictions: int
    link_bytes: dict[str, int]
    prefetches: dict[str, int]
    time_ms: dict[str, float]

    @property
    def moved(self) -> int:
        """Bytes that crossed the link."""
        return self.link_bytes["demand"] + self.link_bytes["prefetch"] + self.link_bytes.get("written_back", 0)

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
    settings: dict[str, Any]
    notes: list[str]

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
    work: Workload, log: Log, bound: Bounds | None, *, policy: str, parameters: dict[str, Any],
    gpu_bytes: dict[str, int], clock: str, provenance: dict[str, Any], settings: dict[str, Any], notes: list[str],
    joint: Bounds | None = None,
) -> Report:  # fmt: skip
    """Reduce a log to its report; ``bound`` is None where experts run on the host: they need neither GPU nor link.

    ``joint`` is then what link and host together are held to.

    The keywords are what a log does not tell; see `Report`.
    """
    begin = np.concatenate([[0], log.finish[:-1]])
    decode = work.schedule.phase == DECODE
    decode_ns = int((log.finish - begin)[decode].sum())
    tokens = int(np.diff(work.schedule.offsets)[decode].sum())
    ttft, tpot = _latencies(work, log.finish, begin)
    run_ns = int(log.finish[-1])
    compulsory = _compulsory(work, log)
    thread = _host_thread(work, log, begin)
    return Report(
        decode=_counts(work, log, begin, compulsory, [DECODE]),
        tokens_per_s=ratio(tokens * 1e9, decode_ns),
        ttft_ms=Spread.of(ttft),
        tpot_ms=Spread.of(tpot),
        bounds={
            "compute_tokens_per_s": ratio(tokens * 1e9, bound.decode_compute_ns) if bound else None,
            "link_tokens_per_s": ratio(tokens * bound.bytes_per_s, bound.decode_link_bytes) if bound else None,
            "min_hit_ratio": bound.decode_hit_ratio if bound else None,
            "loop_share": bound.loop_share if bound else None,
            "joint_tokens_per_s": ratio(tokens * 1e9, joint.decode_ns) if joint else None,
        },
        efficiency=ratio(bound.ns, run_ns) if bound else None,
        run_ms=run_ns / 1e6,
        per_layer=_per_layer(work, log),
        prefill=_counts(work, log, begin, compulsory, [PREFILL]),
        total=_counts(work, log, begin, compulsory, [PREFILL, DECODE]),
        policy=policy, parameters=parameters, gpu_bytes=gpu_bytes, clock=clock, provenance=provenance,
        settings=settings | ({"host_thread": thread} if thread else {}), notes=notes + _binding(thread),
    )  # fmt: skip


def ratio(a: float, b: float) -> float | None:
    """``a / b``, None where that is undefined."""
    return float(a) / float(b) if b else None


def _latencies(work: Workload, finish: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Time to first token of each prefill, and between tokens of a sequence for each decode row, ns.

    The clock of a prefill starts when the machine turns to it. A sequence that waits while another prefills pays for
    that in its time between tokens.
    """
    schedule = work.schedule
    first = np.flatnonzero((schedule.phase == PREFILL) & ~schedule.part)
    last = np.flatnonzero((schedule.phase == PREFILL) & ~np.append(schedule.part[1:], False))
    ttft = finish[last] - begin[first]
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


def _compulsory(work: Workload, log: Log) -> np.ndarray:
    """Whether a look-up is a miss and the first of its expert since the cache was empty (N,) bool."""
    first = np.zeros(len(work.expert), bool)
    begun = np.searchsorted(log.cold, work.call // work.n_layers, side="right")
    first[np.unique(begun * (work.n_layers * work.n_experts) + work.expert, return_index=True)[1]] = True
    return first & (log.found >= MISS)


def _counts(work: Workload, log: Log, begin: np.ndarray, compulsory: np.ndarray, phases: list[int]) -> Counts:
    steps = np.isin(work.schedule.phase, phases)
    calls = np.repeat(steps, work.n_layers)
    lookup = np.isin(work.lookup_phase, phases)
    found = np.bincount(log.found[lookup], minlength=6).tolist()
    hits, late, misses = _kinds(found)
    lookups = int(lookup.sum())
    compute = int(work.compute_ns(work.expert_ns * (log.found != HOSTED))[steps].sum())
    parts = {
        "compute": compute + _sum(log.waited, calls),
        "stall_demand": _sum(log.stall_demand, calls),
        "stall_late": _sum(log.stall_late, calls),
        "stall_host": _sum(log.stall_host, calls),
        "predict": _sum(log.predict, steps),
    }
    if any(log.counters.host_busy):
        parts["host_thread"] = sum(log.counters.host_waits[phase] for phase in phases)
    parts["other"] = _sum(log.finish - begin, steps) - sum(parts.values())

    def counted(name: str) -> int:
        return sum(getattr(log.counters, name)[phase] for phase in phases)

    fates = ("issued", "useful", "late", "unused", "cancelled", "in_flight")
    return Counts(
        tokens=_sum(np.diff(work.schedule.offsets), steps),
        activations=_sum(work.activations, steps),
        lookups=lookups,
        hits=hits,
        reuse_hits=found[REUSE_HIT],
        prefetch_hits=found[PREFETCH_HIT],
        late=late,
        late_queued=found[LATE_QUEUED],
        late_in_flight=found[LATE_IN_FLIGHT],
        misses=misses,
        hosted=found[HOSTED],
        uploaded=found[MISS] + counted("inserted"),
        hit_ratio=ratio(hits, lookups),
        late_ratio=ratio(late, lookups),
        miss_ratio=ratio(misses, lookups),
        compulsory_misses=int((compulsory & lookup).sum()),
        evictions=counted("evictions"),
        link_bytes={
            "demand": counted("demand_bytes"), "prefetch": counted("prefetch_bytes"), "wasted": counted("wasted"),
            **({"written_back": counted("written_back")} if any(log.counters.written_back) else {}),
        },
        prefetches={fate: counted(fate) for fate in fates},
        time_ms={part: ns / 1e6 for part, ns in parts.items()},
    )  # fmt: skip


def _host_thread(work: Workload, log: Log, begin: np.ndarray) -> dict[str, dict[str, float]]:
    """Of each phase: how long the host's thread worked, ms, and the shares of its time that it did and was waited for.

    Empty where its acts take no time.
    """
    found = {}
    for name, phase in (("prefill", PREFILL), ("decode", DECODE)) if any(log.counters.host_busy) else ():
        busy, waits = log.counters.host_busy[phase], log.counters.host_waits[phase]
        took = max(1, _sum(log.finish - begin, work.schedule.phase == phase))
        found[name] = {"busy_ms": busy / 1e6, "busy_share": busy / took, "waits_share": waits / took}
    return found


def _binding(thread: dict[str, dict[str, float]]) -> list[str]:
    """A sentence for each phase in which the host's thread keeps the GPU waiting for more than 1 % of the time."""
    return [
        f"the host's thread binds: {name} waits for it {shares['waits_share']:.1%} of the time (it is busy for "
        f"{shares['busy_share']:.1%})"
        for name, shares in thread.items()
        if shares["waits_share"] > BINDS
    ]


def _kinds(found: list[int]) -> tuple[int, int, int]:
    """Hits, lates and misses, of the number of look-ups that found each of what there is to be found."""
    hits, late = found[REUSE_HIT] + found[PREFETCH_HIT], found[LATE_QUEUED] + found[LATE_IN_FLIGHT]
    return hits, late, found[MISS] + found[HOSTED]


def _sum(values: np.ndarray, chosen: np.ndarray) -> int:
    """Of those that are ``chosen``; 0 where a log says nothing of the kind."""
    return int(values[chosen].sum()) if len(values) else 0


def _per_layer(work: Workload, log: Log) -> list[dict[str, Any]]:
    """Decode's look-ups and stalls of each routed layer."""
    lookup = work.lookup_phase == DECODE
    layer = (work.expert // work.n_experts)[lookup]
    table = np.zeros((work.n_layers, 6), np.int64)
    np.add.at(table, (layer, log.found[lookup]), 1)
    calls = np.repeat(work.schedule.phase == DECODE, work.n_layers)
    stalls = log.stall_demand + log.stall_late + (log.stall_host if len(log.stall_host) else 0)
    stall = np.where(calls, stalls, 0).reshape(-1, work.n_layers).sum(0).tolist()
    layers = []
    for index, found in enumerate(table.tolist()):
        lookups, (hits, late, misses) = sum(found), _kinds(found)
        layers.append({
            "layer": index, "lookups": lookups, "hits": hits, "late": late, "misses": misses,
            "hit_ratio": ratio(hits, lookups), "stall_ms": stall[index] / 1e6,
        })  # fmt: skip
    return layers
