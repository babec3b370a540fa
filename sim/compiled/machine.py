"""Everything that a compiled run reads and writes, as records of integers.

``MACHINE`` holds what exists once and the addresses of the rest: a ``SLOT`` and a ``TRANSFER`` an expert, a ``POOL`` a
pool, a ``LAYER`` a routed layer, the plan's moments and requests. Experts are known by their flat number; -1 is nobody.
Words mean what they mean in ``sim.run.slots`` and ``sim.run.link``.
"""

from dataclasses import dataclass, fields
from typing import Any, cast, get_args

import numpy as np

from sim.compiled.heap import HEAP, Heaps
from sim.compiled.records import address, records_of
from sim.eviction import EVICTIONS, NEVER, foresees, goes_by_values
from sim.log import Counters, Log
from sim.machine.loop_overheads import HostTimes
from sim.plan import Discipline, Plan
from sim.run.terms import RunTerms, Slots
from sim.schedules.pipeline import LANES, Preparation
from sim.scorer import Scoring
from sim.workload import Workload

NOBODY = -1
FOREVER = NEVER

RULES = tuple(EVICTIONS)
"""The eviction rules by number; ``sim.compiled.order`` has those that are compiled."""
DISCIPLINES: tuple[str, ...] = get_args(Discipline)
IN_LINE, PREEMPTIVE = map(DISCIPLINES.index, ("fifo", "preemptive"))

SLOT = np.dtype(
    [
        ("size", np.int64),
        ("wanted_until", np.int64),  # the last call that a prefetch asked it for
        ("uses", np.int64),  # the lfu rules: how often it was needed; next-use: the call that needs it next;
        # least-stale: 1 if this pass has needed it
        ("value", np.int64),  # the score rules: what it is worth
        ("rank", np.int64),  # its place in the order of leaving (not lru, fifo), with ties by ...
        ("tie", np.int64),
        ("pool", np.int32),
        ("group", np.int32),  # in whose order it leaves: its layer's where layers have shares, else its pool's
        ("layer", np.int32),
        ("place", np.int32),  # which slot of memory it holds, in a real run
        ("older", np.int32),  # neighbours in its group's list (lru, fifo)
        ("newer", np.int32),
        ("next_wanted", np.int32),  # the next of its layer's wanted experts
        ("state", np.int8),
        ("pinned", np.int8),
        ("used", np.int8),
        ("ranked", np.int8),  # it has a place in the order of leaving
        ("wanted", np.int8),  # wanted_until has not passed
        ("awaited", np.int8),  # a later wave of the running call will demand it
        ("reserved", np.int8),  # no other expert gets its slot
        ("brought", np.int8),  # 1 + phase of the prefetch that brought it, until somebody needs it; else 0
    ],
    align=True,
)
TRANSFER = np.dtype(
    [
        ("startup", np.int64),  # ns before the first byte on an idle link, the same for every transfer of this expert
        ("lead", np.int64),  # ns before the first byte of the present stretch
        ("body", np.int64),  # ns of copying, likewise
        ("priority", np.int64),
        ("serial", np.int64),
        ("moved", np.int64),  # ns of body done at the last boundary
        ("begin", np.int64),  # when the present stretch began
        ("handed", np.int64),  # when the host has handed it over, -1 if it was not told to
        ("late_at", np.int64),  # the last look-up that found it under way
        ("back_ns", np.int64),  # copying those that it evicted to the host, while that is to come
        ("back_bytes", np.int64),
        ("next_demand", np.int32),  # who stands behind it in the line of demands
        ("phase", np.int8),
        ("live", np.int8),  # queued, running or paused
        ("prefetch", np.int8),
        ("demand", np.int8),
        ("needed", np.int8),  # a call waits for it and will run it
        ("started", np.int8),
    ],
    align=True,
)
POOL = np.dtype(
    [
        ("places", np.int64),  # in a real run the address of the slots of memory that hold no expert, and their number
        ("n_places", np.int64),
        ("free", np.int64),  # bytes that hold no expert
        ("spare", np.int64),  # bytes of experts that may leave: resident, not pinned, not wanted
        ("wanted", np.int64),  # bytes of those that may leave for a demand alone: resident, not pinned, wanted
    ]
)
GROUP = np.dtype(
    [
        ("oldest", np.int64),  # ends of the list (lru, fifo)
        ("newest", np.int64),
        ("held", np.int64),  # slots that its experts have, and should have, where layers have shares
        ("share", np.int64),
        ("ticks", np.int64),  # counts what breaks ties by recency
        ("last", np.int64),  # whom a call needed last, and how often numbers did not rise (decayed-lfu, least-stale)
        ("passes", np.int64),
    ]
)
LAYER = np.dtype([("fit", np.int64), ("first_wanted", np.int64)])  # fit: how many of its experts its pool can hold
# An expert of the running call, the time of its kernel if it is there and if it is waited for, how it stood as its
# wave began, READY, UNDER_WAY or LACKING, and when the host has launched it, if it is waited for.
PIECE = np.dtype([(name, np.int64) for name in ("expert", "cost", "wait", "stood", "launched")])
READY, UNDER_WAY, LACKING = range(3)
# Requests first to last and values first_value to last_value are of a moment, and a row of shares if it is not -1.
MOMENT = np.dtype([(n, np.int64) for n in ("moment", "cost", "first", "last", "first_value", "last_value", "shares")])
# New values come into force for ``count`` experts from ``expert`` on; they stand from ``row`` on in the table.
VALUED = np.dtype([(name, np.int64) for name in ("expert", "count", "row")])
# Work beside the GPU: tasks first to last are of a step.
TASK = np.dtype([(name, np.int64) for name in ("lane", "after", "ns")])
REQUEST = np.dtype([(name, np.int64) for name in ("expert", "call", "priority")])
NUMBER = np.dtype([("n", np.int64)])
BYTE = np.dtype([("n", np.uint8)])
COUNTS = np.dtype([(f.name, np.int64) for f in fields(Counters) if f.name != "landed_unused"])

_CALLS = ("offsets", "expert", "expert_ns", "if_awaited_ns", "layer_ns", "shared_ns", "head_ns")
_LOG = ("finish", "found", "stall_demand", "stall_late", "predict", "stall_host", "waited")
_ADDRESSES = (*_CALLS, *_LOG, "next_call", "phase_of", "to_host", "copied", "host_alone", "host_shared",
              "split_wave_ns", "single", "slots", "transfers", "pools", "groups", "share_table", "layers", "counts",
              "leaving", "queue", "aside", "pieces", "moments", "requests", "valued", "table", "move_ns", "tasks",
              "tasks_of", "lanes", "leaves", "score_ns", "score_due")  # fmt: skip
# Settings of a run, as work, plan and prediction have them, and those that are worked out.
_OF_WORK = ("chained", "launch_ns", "beside_copy_ns", "n_layers", "n_experts")
_OF_PLAN = ("keep", "stream_prefill", "ring", "insist", "write_back", "everything_resident", "most_issued", "only_idle")
_OF_HOST = tuple(field.name for field in fields(HostTimes))  # here with host_ before each
_OF_PREDICTION = ("critical", "prompt_ns", "before_demands")
_OTHERS = ("shared", "rule", "foresees", "discipline", "chunks", "host", "beside", "n_slots", "n_pools", "n_moments",
           "n_steps", "waits", "parts", "moves", "prepares", "host_acts", "yields", "splits",
           "insert", "insert_each", "host_call", "real", "scores", "score_beside")  # fmt: skip
_OF_SCORER = ("score_state", "score_observe", "score_worths", "worths")
_SETTINGS = (*_OF_WORK, *_OF_PLAN, *_OF_PREDICTION, *_OTHERS, *_OF_SCORER, *(f"host_{name}" for name in _OF_HOST))
_STATE = (
    "now",
    "phase",
    "passed",  # the last call whose experts have been looked up
    "moment",  # index of the next moment of the plan
    "running",
    "flying",  # in a real run: copies that are handed over and have not arrived
    "paused",
    "committed",  # handed over to follow the running one
    "ending",  # when the stretch on the link ends, FOREVER for none
    "busy_until",  # when the last stretch that took any time ended
    "boundary",  # ns of body at which it then gives way, -1 if it runs to its end
    "serial",
    "first_demand",  # ends of the line of demands
    "last_demand",
    "n_queued",
    "inserted",  # experts that ran on the host and were requested, in this step
    "announced",  # calls whose routes a scorer may see, and which it has seen
    "observed",
    "scored_until",  # when it will have seen all of them
    "host_free",  # when the host's thread will have done all that has come up so far
)
MACHINE = np.dtype([(name, np.int64) for name in (*_ADDRESSES, *_SETTINGS, *_STATE)])

slot_at = records_of(SLOT)
transfer_at = records_of(TRANSFER)
pool_at = records_of(POOL)
group_at = records_of(GROUP)
layer_at = records_of(LAYER)
piece_at = records_of(PIECE)
moment_at = records_of(MOMENT)
request_at = records_of(REQUEST)
valued_at = records_of(VALUED)
task_at = records_of(TASK)
number_at = records_of(NUMBER)
byte_at = records_of(BYTE)
counts_at = records_of(COUNTS)
heap_at = records_of(HEAP)


@dataclass(frozen=True)
class Machine:
    """Memory of one run: ``record`` () MACHINE and the arrays whose addresses it holds, by name."""

    record: np.void
    arrays: dict[str, np.ndarray]
    heaps: tuple[Heaps, ...]
    code: Any = None
    """What computes worths, by address."""

    def log(self) -> Log:
        """What the run left behind."""
        counts = self.arrays["counts"]
        counters = Counters(**{name: counts[name].tolist() for name in COUNTS.names or ()})
        return Log(**{name: self.arrays[name] for name in _LOG}, counters=counters)


def build(work: Workload, plan: Plan, terms: RunTerms) -> Machine:
    """An empty machine at the beginning of a run."""
    shares = terms.slots
    n_slots, n_pools = work.n_layers * work.n_experts, len(shares.capacity) + bool(shares.reserved)
    future = foresees(plan.eviction)
    slots = _slots(work, shares, future)
    largest_call = int(np.diff(work.offsets).max(initial=0))
    moments, requests, valued = _moments(plan, work.n_experts)
    values = plan.values if goes_by_values(plan.eviction) else None

    pools = np.zeros(n_pools, POOL)
    pools["free"][: len(shares.capacity)] = shares.capacity
    groups = np.zeros(work.n_layers if shares.shared else n_pools, GROUP)
    groups["oldest"] = groups["newest"] = groups["last"] = NOBODY
    if shares.reserved:
        pools["free"][-1] = slots["size"][list(shares.reserved)].sum()
    layers = np.zeros(work.n_layers, LAYER)
    layers["fit"] = np.array(shares.capacity)[list(shares.pool)] // np.array(work.expert_bytes)
    layers["first_wanted"] = NOBODY

    members = np.bincount(slots["pool"], minlength=n_pools).tolist()
    grouped = np.bincount(slots["group"], minlength=len(groups)).tolist()
    leaving = Heaps([n for n in grouped for _ in range(2)], n_slots)  # of group g: 2g, and 2g + 1 for demands alone
    queue = Heaps(members, n_slots)
    aside = Heaps([0 if plan.prediction.critical else len(moments)], len(moments))
    n_steps, costs, parts = work.schedule.n_steps, terms.host, work.split_wave_ns is not None
    acts = work.host_thread
    arrays: dict[str, np.ndarray] = {
        **{name: _whole(getattr(work, name)) for name in _CALLS},
        "next_call": _whole(work.next_call() if future else None),
        "phase_of": _whole(work.schedule.phase),
        "finish": np.zeros(n_steps, np.int64),
        "found": np.zeros(len(work.expert), np.uint8),
        "stall_demand": np.zeros(work.n_calls, np.int64),
        "stall_late": np.zeros(work.n_calls, np.int64),
        "predict": np.zeros(n_steps, np.int64),
        "stall_host": np.zeros(0 if plan.host is None else work.n_calls, np.int64),
        "waited": np.zeros(0 if work.awaited_ns is None else work.n_calls, np.int64),
        "to_host": _whole(costs.chosen if costs else None),
        "copied": _whole(plan.host.copied if plan.host is not None else None),
        "host_alone": _whole(costs.alone if costs else None),
        "host_shared": _whole(costs.shared if costs else None),
        "split_wave_ns": _whole(work.split_wave_ns),
        "single": work.single.astype(np.uint8) if parts or acts else np.zeros(0, np.uint8),
        "slots": slots,
        "transfers": _transfers(work),
        "pools": pools,
        "groups": groups,
        "share_table": _whole(plan.shares.table if plan.shares is not None else None),
        "layers": layers,
        "counts": np.zeros(2, COUNTS),
        "leaving": leaving.heaps,
        "queue": queue.heaps,
        "aside": aside.heaps,
        "pieces": np.zeros(largest_call, PIECE),
        "moments": moments,
        "requests": requests,
        "valued": valued,
        "table": _whole(values.table if values else None),
        "move_ns": _whole(work.move_ns),
        "tasks": _tasks(terms.preparation),
        "tasks_of": _whole(terms.preparation.offsets if terms.preparation else None),
        "lanes": np.zeros(len(LANES), np.int64),
        "leaves": np.zeros(n_slots if plan.scorer else 0, np.uint8),
        "score_ns": _whole(plan.scorer.ns if plan.scorer else None),
        "score_due": np.zeros(work.n_calls if plan.scorer else n_slots, np.int64),
    }
    machine = np.zeros((), MACHINE)
    for name in _ADDRESSES:
        machine[name] = address(arrays[name])
    code = Scoring(plan.scorer, n_slots).code if plan.scorer else None
    settings = {
        **{name: getattr(work, name) for name in _OF_WORK},
        **{name: getattr(plan, name) for name in _OF_PLAN},
        **{name: getattr(plan.prediction, name) for name in _OF_PREDICTION},
        **{f"host_{name}": getattr(acts or HostTimes(), name) for name in _OF_HOST},
        "host_acts": acts is not None,
        "yields": terms.discipline != "fifo" and not (acts and acts.copies_ahead),
        "moves": work.move_ns is not None,
        "prepares": terms.preparation is not None,
        "shared": shares.shared,
        "rule": RULES.index(str(plan.eviction)),
        "foresees": future,
        "discipline": DISCIPLINES.index(terms.discipline),
        "chunks": terms.chunks,
        "waits": work.awaited_ns is not None,
        "parts": parts,
        "host": plan.host is not None,
        "beside": plan.host is not None and plan.host.beside,
        "splits": plan.host is not None and plan.host.copied is not None,
        "insert": plan.host.insert if plan.host is not None else 0,
        "insert_each": plan.host.insert_each if plan.host is not None else 0,
        "host_call": plan.host.call_ns if plan.host is not None else 0,
        "real": False,
        "scores": code is not None,
        "score_beside": plan.scorer is not None and plan.scorer.beside,
        **(dict.fromkeys(_OF_SCORER, address(arrays["score_due"])) if code is None else code.addresses),
        "n_steps": n_steps,
        "n_slots": n_slots,
        "n_pools": n_pools,
        "n_moments": len(moments),
    }
    for name in _SETTINGS:
        machine[name] = settings[name]
    for name in ("passed", "running", "paused", "committed", "busy_until", "boundary", "first_demand", "last_demand"):
        machine[name] = -1
    machine["ending"] = FOREVER
    return Machine(cast(np.void, machine[()]), arrays, (leaving, queue, aside), code)


def _whole(numbers: np.ndarray | None) -> np.ndarray:
    """Numbers as compiled code reads them, in 64 bits one after the other; nothing where a run has none."""
    return np.ascontiguousarray([] if numbers is None else numbers, np.int64)


def _slots(work: Workload, shares: Slots, future: bool) -> np.ndarray:
    layer = np.repeat(np.arange(work.n_layers), work.n_experts)
    slots = np.zeros(len(layer), SLOT)
    slots["size"], slots["pool"] = np.array(work.expert_bytes)[layer], np.array(shares.pool)[layer]
    slots["layer"] = layer
    slots["group"] = layer if shares.shared else slots["pool"]
    slots["reserved"][list(shares.reserved)] = 1
    slots["pool"][list(shares.reserved)] = slots["group"][list(shares.reserved)] = len(shares.capacity)
    for name in ("wanted_until", "older", "newer", "next_wanted"):
        slots[name] = NOBODY
    if future:
        slots["uses"] = work.first_call()
    return slots


def _transfers(work: Workload) -> np.ndarray:
    copy_ns = np.repeat(np.array(work.copy_ns, np.int64), work.n_experts)
    transfers = np.zeros(len(copy_ns), TRANSFER)
    transfers["body"] = np.maximum(1, copy_ns - work.latency_ns)
    transfers["startup"] = copy_ns - transfers["body"]
    transfers["late_at"] = -1
    return transfers


def _tasks(preparation: Preparation | None) -> np.ndarray:
    tasks = np.zeros(0 if preparation is None else len(preparation.ns), TASK)
    if preparation is not None:
        tasks["lane"], tasks["after"], tasks["ns"] = preparation.lane, preparation.after, preparation.ns
    return tasks


def _moments(plan: Plan, n_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The plan: (M,) MOMENT at which something is decided, (N,) REQUEST, (V,) VALUED."""
    asked, worth, predicted, shares = plan.requests, plan.values, plan.prediction, plan.shares
    parts = [predicted.moment] + [part.moment for part in (asked, worth, shares) if part is not None]
    every = np.sort(np.concatenate(parts).astype(np.int64), kind="stable")  # a few rising runs: next to no work
    distinct = every[np.diff(every, prepend=-1) > 0]
    moments = np.zeros(len(distinct), MOMENT)
    moments["moment"] = distinct
    moments["cost"][np.searchsorted(distinct, predicted.moment)] = predicted.ns
    moments["shares"] = NOBODY
    if shares is not None:
        moments["shares"][np.searchsorted(distinct, shares.moment)] = np.arange(len(shares.moment))
    requests = np.zeros(0 if asked is None else len(asked.call), REQUEST)
    valued = np.zeros(0 if worth is None else len(worth.moment), VALUED)
    if asked is not None:
        at = np.searchsorted(distinct, asked.moment)
        moments["first"][at], moments["last"][at] = asked.offsets[:-1], asked.offsets[1:]
        requests["expert"], requests["call"], requests["priority"] = asked.expert, asked.call, asked.priority
    if worth is not None:
        moments["first_value"] = np.searchsorted(worth.moment, distinct)
        moments["last_value"] = np.searchsorted(worth.moment, distinct, side="right")
        valued["count"] = columns = worth.table.shape[1]
        valued["expert"] = worth.layer * n_experts if worth.by_layer else 0
        valued["row"] = worth.index.astype(np.int64) * columns
    return moments, requests, valued
