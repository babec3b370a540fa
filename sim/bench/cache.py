"""How fast the cache alone is: accesses a second beside libCacheSim and beside a loop that does nothing else.

All three replay the same accesses under LRU, one expert at a time, and must miss equally often. The bare loop is the
limit: an intrusive list over plain arrays, no rules, pools, sizes or record. libCacheSim reads the accesses from a file
in its own format, as its fast path requires, with a hash table of a size that suits so few objects.
"""

import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sim.bench.speeds import CacheSpeed
from sim.compiled.jit import entry
from sim.compiled.machine import build
from sim.compiled.serve import serve
from sim.plan import Plan
from sim.run.terms import settle
from sim.workload import Workload

HASHPOWER = 14


def measure_caches(work: Workload, budget: int) -> list[CacheSpeed]:
    """Best of three each; reading the accesses counts, preparing them does not.

    Raises RuntimeError if two caches disagree about the misses.
    """
    slots = budget // max(work.expert_bytes)
    ids = np.ascontiguousarray(work.expert, np.int64)
    rows = [
        _best("compiled engine's cache", ids, slots, _ours(work, budget)),
        _best("bare loop (the limit)", ids, slots, lambda: lambda: _bare_lru(ids, slots, ids.max() + 1) / len(ids)),
    ]
    if find_spec("libcachesim") is None:
        rows.append(CacheSpeed("libCacheSim, native LRU (not installed)", len(ids), slots))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "accesses.oracleGeneral"
            _write_oracle_general(path, ids)
            rows.append(_best("libCacheSim, native LRU", ids, slots, _libcachesim(path, slots)))
    if len({round(row.miss_ratio * len(ids)) for row in rows if row.miss_ratio is not None}) > 1:
        raise RuntimeError(f"caches disagree: {rows}")
    return rows


Prepare = Callable[[], Callable[[], float]]
"""Makes a run that returns the share of misses."""


def _best(what: str, ids: np.ndarray, slots: int, prepare: Prepare) -> CacheSpeed:
    prepare()()  # compile, warm up
    best, missed = float("inf"), 0.0
    for _ in range(3):
        run = prepare()
        begin = time.perf_counter()
        missed = run()
        best = min(best, time.perf_counter() - begin)
    return CacheSpeed(what, len(ids), slots, missed, len(ids) / best)


def _ours(work: Workload, budget: int) -> Prepare:
    def prepare() -> Callable[[], float]:
        plan = Plan(eviction="lru")
        machine = build(work, plan, settle(work, plan, budget))
        return lambda: 1 - float(serve(machine).mean())

    return prepare


def _libcachesim(path: Path, slots: int) -> Prepare:
    from libcachesim import LRU, TraceReader, TraceType

    def prepare() -> Callable[[], float]:
        reader = TraceReader(str(path), TraceType.ORACLE_GENERAL_TRACE)
        lru = LRU(slots, hashpower=HASHPOWER)
        return lambda: lru.process_trace(reader)[0]

    return prepare


def _write_oracle_general(path: Path, ids: np.ndarray) -> None:
    """Write libCacheSim's binary format: time, object, size (one unit each here), next access (unknown)."""
    layout = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records = np.zeros(len(ids), layout)
    records["time"], records["object"], records["size"], records["next"] = np.arange(len(ids)), ids, 1, -1
    records.tofile(path)


@entry
def _bare_lru(ids: np.ndarray, slots: int, total: int) -> int:
    """Misses of an LRU cache of ``slots`` experts: a ring through ``total``, the head of the list."""
    older, newer = np.full(total + 1, total), np.full(total + 1, total)
    resident = np.zeros(total, np.bool_)
    free, misses = slots, 0
    for expert in ids:
        if resident[expert]:
            older[newer[expert]] = older[expert]
            newer[older[expert]] = newer[expert]
        else:
            misses += 1
            resident[expert] = True
            if free:
                free -= 1
            else:
                oldest = newer[total]
                resident[oldest] = False
                newer[total] = newer[oldest]
                older[newer[oldest]] = total
        older[expert], newer[expert] = older[total], total
        newer[older[total]] = expert
        older[total] = expert
    return misses
