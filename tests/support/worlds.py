"""Small random worlds (trace, model, machine, memory, link), runs of them, and a witness that checks every event."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st

from ground.errors import InputError
from sim.bounds import Bounds, bounds, joint_bounds, joint_loads
from sim.eviction import EVICTIONS, goes_by_values
from sim.log import Log
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts, builtin_software
from sim.plan import Discipline, Host, Plan, Prediction, Requests, Values
from sim.policies import Setting, make_policy, policy_classes
from sim.run.host_costs import host_costs
from sim.run.simpy_engine import Run
from sim.run.slots import LOADING, RESIDENT
from sim.run.terms import slots_of
from sim.schedules.kv_cache import with_moves
from sim.schedules.lockstep import lockstep
from sim.scorer import Scorer
from sim.shares import Shares
from sim.workload import Schedule, Workload, batched, workload
from tests.support.runs import simpy_run
from tests.support.scorers import decayed
from tests.support.strategies import traces
from traces.models.spec import Attention, ModelSpec
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

MS = 1_000_000
ONLY_PYTHON = {"arc", "s3-fifo", "w-tinylfu"}
"""Rules, and the policies that go by them, that the compiled engine does not have."""
TWINNED = sorted(set(EVICTIONS) - ONLY_PYTHON)
POLICIES = sorted(policy_classes())
CHOICES: dict[str, list[dict[str, object]]] = {
    "lru": [{}, {"scope": "layer"}],
    "fifo": [{}, {"scope": "layer"}],
    "lfu": [{}, {"scope": "layer"}, {"counts": "always"}],
    "previous-token": [{}, {"ahead": 1}, {"ahead": 2}],
    "popularity": [{}, {"by": "domain"}],
    "perfect-lfu": [{}, {"scope": "layer"}],
    "lfru": [{}, {"scope": "layer"}],
    "decayed-lfu": [{}, {"scope": "layer"}],
    "least-stale": [{}, {"scope": "layer"}],
    "arc": [{}, {"scope": "layer"}],
    "s3-fifo": [{}, {"scope": "layer"}],
    "w-tinylfu": [{}, {"scope": "layer"}],
    "layer-lru": [{}, {"scope": "layer"}],
    "pathwise": [{"start": "nothing"}, {"start": "nothing", "beside": True}],
    "min": [{}, {"scope": "layer"}],
    "mrs": [{}, {"scope": "layer"}],
    "n-cpu-moe": [{}, {"side": "last", "stream_from": 2}, {"beside": False}],
    "lru-host": [{}, {"cap": 1, "scope": "all", "eviction": "least-stale"}, {"cap": 9, "each": 1}, {"stream_from": 1}],
    "kt": [
        {}, {"place": "frequency"}, {"place": "front-loading", "stream_from": 2}, {"dynamic": True, "stream_from": 2},
        {"dynamic": True, "stream_from": 0},
    ],
    "freetoken": [{}, {"eviction": "lfru"}, {"host_gbps": 0.05, "shared_gbps": 0.01}, {"beside": False}],
    "cache-moe": [
        {}, {"speculate": 0}, {"speculate": 1}, {"eviction": "perfect-lfu", "scope": "global"}, {"eviction": "lfu"},
        {"most": 1}, {"idle": True, "most": 1}, {"idle": True}, {"writeback": True, "speculate": 1},
    ],
    "se-moe": [{}, {"memory": "own"}],
    "pregated-moe": [{}, {"cache": "lfu"}, {"cache": "lru"}],
    "fiddler": [{}, {"beside": False}, {"host_gbps": 1e6, "tokens": 0.5}, {"host_gbps": 0.05, "shared_gbps": 0.01}],
    "oracle": [
        {}, {"accuracy": 0.5, "ahead": 2}, {"accuracy": 0.0, "ahead": 0, "eviction": "lfu"}, {"random": True},
        {"accuracy": 0.7, "eviction": "perfect-lfu"}, {"accuracy": 0.6, "eviction": "score", "scope": "layer"},
        {"eviction": "next-use", "prefetch": False}, {"accuracy": 0.5, "eviction": "fifo"},
    ],
    "moe-infinity": [
        {},
        {"capacity": 2, "most": 1},
        {"beside": True, "search": "before"},
        {"code": True},
        {"code": True, "search": "after", "most": 2},
    ],
    "finemoe": [{}, {"capacity": 2, "distance": 1}, {"distance": 2}, {"beside": False, "search": "before"}],
    "fmoe": [
        {}, {"entries": 3, "top_k": 1}, {"keys": "token", "eviction": "lru"}, {"search": "before"},
        {"eviction": "perfect-lfu"},
    ],
    "promoe": [
        {"epochs": 1},
        {"epochs": 1, "stride": 2, "window": 2},
        {"epochs": 1, "beside": False, "first": 3, "search": "before"},
        {"epochs": 1, "eviction": "score", "scope": "global"},
        {"epochs": 1, "stride": 2, "window": 2, "eviction": "score"},
        {"epochs": 1, "eviction": "perfect-lfu"},
    ],
    "expertflow": [
        {},
        {"plec": False, "first": 2.0},
        {"split": "order", "correction": False},
        {"sure": 0.5, "eviction": "perfect-lfu", "charge": "beside"},
        {"first": 1.5, "charge": "free", "prefetch": False},
        {"code": True},
        {"eviction": "score-count", "first": 1.5},
    ],
    "expertflow-guess": [{}, {"guess": "slp", "first": 2.0}, {"guess": "popularity", "plec": False}],
    "expertflow-oracle": [{}, {"accuracy": 0.5}, {"random": True, "correction": False, "split": "order"}],
    "domoe": [
        {},
        {"search": "before", "layers": "all"},
        {"eviction": "perfect-lfu"},
        {"eviction": "lfu"},
        {"mode": "best"},
        {"mode": "best", "grow": True, "entries": 3, "prototypes": 2},
        {"grow": True, "layers": "sampled", "margin": 2},
        {"keys": "token", "sure": 0.5, "eviction": "vote", "recency": 1, "search": "before"},
    ],
}
"""Parameters worth trying, a policy; any other is tried with its defaults."""
REPORT_FIELDS = {
    "policy", "parameters", "tokens", "tokens_per_s", "activations", "lookups", "hits", "reuse_hits", "prefetch_hits",
    "late", "late_queued", "late_in_flight", "misses", "hit_ratio", "late_ratio", "miss_ratio", "compulsory_misses",
    "evictions", "link_bytes", "prefetches", "ttft_ms", "tpot_ms", "time_ms", "gpu_bytes", "bounds", "efficiency",
    "per_layer", "prefill", "clock", "provenance",
}  # fmt: skip
"""What every report holds."""


@dataclass(frozen=True)
class World:
    """Everything of a run but the policy."""

    trace: Trace
    model: ModelSpec
    hardware: Hardware
    batch: int
    work: Workload
    budget: int
    discipline: Discipline | None = None
    chunks: int | None = None
    profile: Trace | None = None
    software: PredictionCosts = field(default_factory=lambda: PredictionCosts.load("fast"))

    @property
    def setting(self) -> Setting:
        """What a policy knows beforehand; it learns from this very trace unless there is a profile."""
        return Setting(self.model, self.budget, (self.profile or self.trace,), 7, self.hardware, self.software)

    def plan(self, policy: str, values: dict[str, object] | None = None) -> Plan:
        """What ``policy`` decides here."""
        made = make_policy(policy, self.setting, values)
        return made.plan(made.view(self.trace, self.work))

    def bounds(self) -> Bounds:
        """Bounds at the most bytes a second that one copy reaches."""
        return bounds(self.work, self.budget, self._link_rate())

    def joint_bounds(self, host: Host) -> Bounds:
        """The same of runs that may compute experts on ``host``."""
        costs = host_costs(self.work, host)
        loads = joint_loads(self.work, self.budget)
        return joint_bounds(self.work, loads, self._link_rate(), costs.alone, costs.chosen)

    def _link_rate(self) -> float:
        spared = self.work.latency_ns if self.work.chained else 0
        times = [max(1, ns - spared) for ns in self.work.copy_ns]
        return max(size / ns * 1e9 for size, ns in zip(self.work.expert_bytes, times, strict=True))

    def fits(self, plan: Plan) -> bool:
        """Whether the engine takes this budget for this plan."""
        try:
            slots_of(self.work, plan, self.budget - plan.gpu_bytes)
        except InputError:
            return plan.everything_resident
        return True

    def with_room(self, plan: Plan) -> "World":
        """This world, with memory for the plan's tables and an expert a pool beside what it had, if that was short."""
        if self.fits(plan):
            return self
        pools = self.work.n_layers if plan.per_layer else 1
        least = pools * max(self.work.expert_bytes)
        return dataclasses.replace(self, budget=plan.gpu_bytes + max(self.budget, least))


def toy_model(n_layers: int, n_experts: int, top_k: int, expert_bytes: tuple[int, ...], **other: Any) -> ModelSpec:
    """A small decoder whose every layer is routed."""
    return ModelSpec(
        name="toy", layers=n_layers, moe_layers=tuple(range(n_layers)), hidden=64, experts=n_experts, top_k=top_k,
        expert_ffn=128, expert_bytes=expert_bytes, attention=Attention.grouped(64, 4, 2, 16), windows=(0,) * n_layers,
        vocab=100, tied=True, **other,
    )  # fmt: skip


def toy_machine(
    gbps: float = 1.0, latency_us: float = 0.0, curve: list[list[int]] | None = None, **more: Any
) -> Hardware:
    """A small machine: launches take microseconds, so that copies and kernels are of like length."""
    link: dict[str, Any] = {"name": "toy link"}
    link |= {"h2d": {"points": curve, "source": "toy"}} if curve else {"gbps": gbps, "latency_us": latency_us}
    return Hardware.from_dict(
        {
            "name": "toy",
            "gpu": {
                "memory_gb": 8.0, "bandwidth_gbps": 300.0, "bandwidth_fraction": 1.0, "tflops": 20.0,
                "tflops_fraction": 1.0,
            },
            "link": link,
            "software": {
                "kind": "toy", "operation_us": 5.0, "expert_floor_us": 20.0, "layer_floor_us": 50.0,
                "route_wait_us": 10.0, "waits_for_route": True,
            },
            **more,
        }
    )  # fmt: skip


MACHINES = [
    toy_machine(),
    toy_machine(gbps=0.05, latency_us=12.5),
    toy_machine(gbps=20.0, latency_us=500.0),
    toy_machine(curve=[[1_000, 9_000], [50_000, 40_000], [200_000, 170_000]]),
    toy_machine(
        ffn=[
            {
                "hidden": 64,
                "width": 128,
                "matrices": 3,
                "source": "toy",
                "points": [[1, 5_000], [2, 40_000], [9, 90_000]],
                "waited": {"source": "toy", "points": [[2, 9_000], [9, 95_000]]},
            }
        ]
    ),
]
TIMED = 2 * 3 * 64 * 128
"""Bytes of an expert whose FFN the last of the machines has times of."""


SOFTWARE = [PredictionCosts.load(name) for name in builtin_software()]


@st.composite
def worlds(draw: st.DrawFn, *, prefill: bool | None = None, ragged: bool | None = None) -> World:
    """Random worlds; half of them with costs of a few ns, so that many things happen at one instant."""
    trace = draw(traces(max_layers=3, max_rows=5, optional=True, prefill=prefill, ragged=ragged))
    n_layers, n_experts = trace.n_layers, trace.n_experts
    size = st.sampled_from([1_000, 3_000, 7_001, 50_000, TIMED])
    sizes = draw(st.one_of(size.map(lambda s: [s] * n_layers), st.lists(size, min_size=n_layers, max_size=n_layers)))
    model = toy_model(n_layers, n_experts, trace.top_k, tuple(sizes), shared_ffn=draw(st.sampled_from([0, 64])))
    machine = draw(st.sampled_from(MACHINES))
    batch = draw(st.integers(1, 4))
    turns = draw(st.sampled_from([None, None, "none", "random"]))  # whether two batches take turns
    schedule = batched(trace, batch) if turns is None else lockstep(trace, batch, turns, pairs=draw(st.integers(1, 2)))
    work = with_moves(workload(trace, model, machine, schedule), trace, model, machine)
    if draw(st.booleans()):
        work = coarse(work, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    beside, pieces = draw(st.sampled_from([0, 0, 1, 3, 30_000])), draw(st.sampled_from([1, 3, 42]))
    work = dataclasses.replace(work, beside_copy_ns=beside, chunks=pieces)
    if change := draw(st.sampled_from([0, 0, 1, 20_000, -3, -20_000])):
        work = dataclasses.replace(work, awaited_ns=np.maximum(0, work.expert_ns + change))
    most = max(sizes)
    budget = draw(
        st.one_of(
            st.integers(1, 12).map(lambda slots: slots * most),
            st.integers(most, 12 * most),
            st.sampled_from([n_experts * sum(sizes), 10 * n_experts * sum(sizes)]),
        )
    )
    discipline = draw(st.sampled_from([None, "fifo", "demand-first", "preemptive"]))
    chunks = draw(st.sampled_from([None, 1, 2, 3, 7, 42]))
    software = draw(st.sampled_from(SOFTWARE))
    return World(trace, model, machine, batch, work, budget, discipline, chunks, software=software)


def coarse(work: Workload, rng: np.random.Generator) -> Workload:
    """The same calls with costs of a few ns."""
    latency = int(rng.integers(0, 4))

    def few(like: np.ndarray, most: int) -> np.ndarray:
        return rng.integers(0, most, len(like))

    return dataclasses.replace(
        work,
        layer_ns=few(work.layer_ns, 6),
        shared_ns=few(work.shared_ns, 3),
        expert_ns=few(work.expert_ns, 4),
        head_ns=few(work.head_ns, 3),
        copy_ns=tuple(latency + int(ns) for ns in rng.integers(1, 12, work.n_layers)),
        latency_ns=latency,
        chained=bool(rng.integers(2)),
    )


def plan_of(draw: st.DrawFn, world: World) -> tuple[World, str, Plan]:
    """A built-in policy with any of its parameters: the world with room for its plan, its name and the plan."""
    name = draw(st.sampled_from([name for name in POLICIES if name not in ONLY_PYTHON]))
    values = draw(st.sampled_from(CHOICES.get(name, [{}])))
    plan = world.plan(name, values)
    roomy = world.with_room(plan)
    return roomy, name, plan if roomy is world else roomy.plan(name, values)


PLANS_TAKE_LONG = [HealthCheck.too_slow]
"""For tests that draw plans: some policies train first, and a busy machine is no fault."""


@st.composite
def planned(draw: st.DrawFn, *, prefill: bool | None = None) -> tuple[World, str, Plan]:
    """A world and a plan for it: of a built-in policy, or one that asks for anything that may be asked for."""
    world = draw(worlds(prefill=prefill))
    if draw(st.booleans()):
        return plan_of(draw, world)
    seed = draw(st.integers(0, 2**32 - 1))
    wanted = draw(st.integers(0, 40))
    plan = arbitrary_plan(np.random.default_rng(seed), world, wanted)
    return world, "arbitrary", plan if world.fits(plan) else undemanding(plan)


def undemanding(plan: Plan) -> Plan:
    """``plan`` in one pool that any budget makes."""
    host = None if plan.host is None else dataclasses.replace(plan.host, reserved=np.zeros(0, np.int64))
    return dataclasses.replace(plan, per_layer=False, gpu_bytes=0, most_bytes=0, host=host)


def arbitrary_plan(rng: np.random.Generator, world: World, wanted: int) -> Plan:
    """Requests for any call that has not passed, values, costs of prediction and switches, all at random."""
    work = world.work
    n_layers, n_steps = work.n_layers, work.schedule.n_steps
    moment = rng.integers(0, n_steps * (n_layers + 1), wanted)
    step, point = np.divmod(moment, n_layers + 1)
    first = step * n_layers + point
    call = first + rng.integers(0, 2 * n_layers + 2, wanted)
    good = call < work.n_calls
    moment, call = moment[good], call[good]
    expert = call % n_layers * work.n_experts + rng.integers(0, work.n_experts, len(call))
    again = rng.random(len(call)) < 0.4  # often what some call will really take
    likely = [work.expert[work.offsets[c] : work.offsets[c + 1]] for c in call.tolist()]
    for i, ids in enumerate(likely):
        if again[i] and len(ids):
            expert[i] = rng.choice(ids)
    some = np.unique(rng.integers(0, n_steps * (n_layers + 1), 6))
    eviction = str(rng.choice(TWINNED))
    valued = goes_by_values(eviction) or rng.random() < 0.5
    ring = rng.random() < 0.2
    host = _host(rng, work) if not ring and rng.random() < 0.4 else None
    may_share = eviction not in ("lru", "fifo") and rng.random() < 0.6
    return Plan(
        eviction=eviction,
        per_layer=(per_layer := bool(rng.random() < 0.3)),
        shares=_shares(rng, work) if may_share and not per_layer and host is None else None,
        keep=bool(rng.random() < 0.8),
        requests=Requests.build(moment, call, expert, rng.integers(-3, 4, len(call)) if rng.random() < 0.5 else None),
        most_issued=int(rng.choice([0, 0, 1, 2])),
        only_idle=bool(rng.random() < 0.2),
        values=_values(rng, some, n_layers, work.n_experts) if valued else None,
        scorer=_scorer(rng, work) if eviction == "scored" else None,
        prediction=Prediction(
            some,
            rng.integers(0, 12, len(some)) * int(rng.choice([1, 10_000])),
            critical=bool(rng.random() < 0.5),
            prompt_ns=int(rng.integers(0, 2)) * 5,
            before_demands=bool(rng.random() < 0.5),
        ),
        stream_prefill=bool(rng.random() < 0.5),
        ring=bool(ring),
        insist=bool(rng.random() < 0.2),
        write_back=bool(rng.random() < 0.2),
        host=host,
        gpu_bytes=int(rng.integers(0, 2)) * 500,
        most_bytes=int(rng.integers(1, 9)) * max(work.expert_bytes) if rng.random() < 0.2 else 0,
        least_bytes=world.budget if rng.random() < 0.1 else 0,
        discipline=rng.choice(["fifo", "demand-first", "preemptive"]),
        chunks=int(rng.integers(0, 8)),
    )


def _shares(rng: np.random.Generator, work: Workload) -> Shares:
    """Shares of each layer at a few moments."""
    moments = np.unique(rng.integers(0, work.schedule.n_steps * (work.n_layers + 1), 5))
    return Shares(moments, rng.integers(0, 4, (len(moments), work.n_layers)))


def _host(rng: np.random.Generator, work: Workload) -> Host:
    """A host about as fast as copying, and now and then some experts with slots of their own."""
    copies = np.array(work.copy_ns, np.int64)
    fixed, read, shared, row = (rng.integers(0, copies + 2) for _ in range(4))
    every = np.arange(work.n_layers * work.n_experts)
    own = every[rng.random(len(every)) < rng.choice([0, 1.5 / len(every), 0.3])]
    split = rng.integers(0, np.arange(1, work.n_experts + 2), (work.n_layers, work.n_experts + 1))
    return Host(
        fixed // 2, read, read + shared, row // 2, own, beside=bool(rng.random() < 0.5),
        stream_from=int(rng.integers(0, 5)) if rng.random() < 0.5 else None,
        copied=split if rng.random() < 0.3 else None,
        insert=int(rng.integers(0, 4)) if rng.random() < 0.5 else 0,
        insert_each=int(rng.integers(0, 3)),
        call_ns=int(rng.choice([0, 0, int(copies.max()) // 3])),
    )  # fmt: skip


def _scorer(rng: np.random.Generator, work: Workload) -> Scorer:
    ns = rng.integers(0, 12, work.n_calls) * int(rng.choice([0, 1, 10_000]))
    return decayed(work, ns, beside=bool(rng.random() < 0.5))


def _values(rng: np.random.Generator, moments: np.ndarray, n_layers: int, n_experts: int) -> Values:
    """Values of all layers at these moments, or of some layers each."""
    if rng.random() < 0.5:
        return Values(moments, rng.integers(0, 3, len(moments)), rng.integers(-5, 6, (3, n_layers * n_experts)))
    at, layer = np.nonzero(rng.random((len(moments), n_layers)) < 0.7)
    return Values(moments[at], rng.integers(0, 4, len(at)), rng.integers(-5, 6, (4, n_experts)), layer)


def run_of(world: World, plan: Plan, observer: Any = None) -> Run:
    """The run of a plan in a world, not begun yet."""
    return simpy_run(world.work, plan, world.budget, world.discipline, world.chunks, observer)


def made(requests: Requests | None) -> list[tuple[int, int, int]]:
    """Requests as (moment, call, expert), in order."""
    assert requests is not None
    moment = np.repeat(requests.moment, np.diff(requests.offsets))
    return sorted(zip(moment.tolist(), requests.call.tolist(), requests.expert.tolist(), strict=True))


def digest(log: Log) -> tuple[Any, ...]:
    """All integers of a log, to compare two."""
    arrays = (log.finish, log.found, log.stall_demand, log.stall_late, log.predict, log.stall_host, log.waited)
    return (*(array.tobytes() for array in arrays), dataclasses.asdict(log.counters))


@dataclass
class Event:
    """One thing that an observer was told of."""

    kind: str
    begin: int
    end: int
    detail: tuple[Any, ...]
    phase: int = -1


class Witness:
    """An observer that records every event and checks the slots at each of them.

    Phases are known from the order of events: those between the ends of two steps belong to the later one.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.events: list[Event] = []
        self.work = world.work
        self.run = run_of(world, plan, self)
        self._pool = np.array(self.run.cache.pool)
        self._sizes = np.repeat(self.work.expert_bytes, self.work.n_experts)
        self._first = 0
        self._seen: tuple[bytes, list[int]] | None = None
        self._loading: list[int] = []
        self._begin = self.run.calls.begin
        self.run.calls.begin = self._look_up  # type: ignore[method-assign]

    def _look_up(self, call: int, needed: list[int], first: int) -> None:
        self._note("lookup", self.run.env.now, self.run.env.now, call)
        self._begin(call, needed, first)

    def log(self) -> Log:
        """Run."""
        log = self.run.log()
        self._check()
        return log

    def _note(self, kind: str, begin: int, end: int, *detail: Any) -> None:
        self.events.append(Event(kind, begin, end, detail))
        if kind != "requested":  # which moves nothing
            self._check()

    def _check(self) -> None:
        cache = self.run.cache
        seen = bytes(cache.state), list(cache.free)
        if seen != self._seen:
            self._seen = seen
            self._check_sizes()
        for expert in self._loading:
            assert expert in self.run.link.transfers, "a slot is loading and nothing is on its way to it"

    def _check_sizes(self) -> None:
        cache = self.run.cache
        state = np.frombuffer(cache.state, np.uint8)
        sizes = np.bincount(self._pool, self._sizes * (state > 0), len(cache.capacity))
        for used, capacity, free in zip(sizes.tolist(), cache.capacity, cache.free, strict=True):
            assert used == capacity - free
            assert 0 <= used <= capacity
        assert state.max() <= max(LOADING, RESIDENT)
        self._loading = np.flatnonzero(state == LOADING).tolist()

    # -- what an observer is told --------------------------------------------------------------------------------

    def transfer(self, begin: int, end: int, expert: int, kind: str, whole: bool) -> None:
        self._note("transfer", begin, end, expert, kind, whole)

    def written_back(self, begin: int, end: int, expert: int) -> None:
        self._note("back", begin, end, expert)

    def evicted(self, now: int, victims: list[int], by: int) -> None:
        self._note("evicted", now, now, tuple(victims), by)
        for victim in victims:
            assert not self.run.cache.pinned[victim], f"pinned {victim} evicted at {now}"
            assert self.run.cache.state[victim] == 0

    def compute(self, begin: int, end: int, what: str, call: int) -> None:
        self._note("compute", begin, end, what, call)

    def stall(self, begin: int, end: int, expert: int, call: int, kind: str) -> None:
        self._note("stall", begin, end, expert, call, kind)

    def requested(self, now: int, expert: int, call: int, outcome: str) -> None:
        self._note("requested", now, now, expert, call, outcome)

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None:
        self._note("step", begin, end, step)
        for event in self.events[self._first :]:
            event.phase = PREFILL if prefill else DECODE
        self._first = len(self.events)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, in order; those after the last step's end are of its phase."""
        for event in self.events[self._first :]:
            event.phase = int(self.work.schedule.phase[-1])
        return [event for event in self.events if event.kind == kind]


def handmade(
    steps: list[list[list[int]]],
    n_experts: int,
    *,
    layer_ns: int | list[int] = 0,
    expert_ns: int = 0,
    head_ns: int = 0,
    copy_ns: int | list[int] = 10 * MS,
    latency_ns: int = 0,
    chunks: int = 1,
    expert_bytes: int | list[int] = 1_000_000,
    phase: list[int] | None = None,
) -> Workload:
    """A workload written out: ``steps[s][l]`` are the experts that layer ``l`` of step ``s`` needs; one row a step.

    ``layer_ns``, ``copy_ns`` and ``expert_bytes`` are one for all layers or one a layer.
    """
    n_layers = len(steps[0])

    def each(value: int | list[int]) -> list[int]:
        return [value] * n_layers if isinstance(value, int) else value

    calls = [sorted({layer * n_experts + e for e in ids}) for step in steps for layer, ids in enumerate(step)]
    ids = np.array([e for call in calls for e in call], np.int64)
    offsets = np.cumsum([0, *map(len, calls)])
    n_steps = len(steps)
    return Workload(
        schedule=Schedule(np.array(phase or [DECODE] * n_steps, np.int64), np.arange(n_steps + 1), np.arange(n_steps)),
        n_layers=n_layers,
        n_experts=n_experts,
        offsets=offsets,
        expert=ids,
        tokens=np.ones(len(ids), np.int64),
        layer_ns=np.array(each(layer_ns) * n_steps, np.int64),
        shared_ns=np.zeros(n_layers * n_steps, np.int64),
        expert_ns=np.full(len(ids), expert_ns, np.int64),
        head_ns=np.full(n_steps, head_ns, np.int64),
        activations=np.array([sum(map(len, step)) for step in steps], np.int64),
        expert_bytes=tuple(each(expert_bytes)),
        copy_ns=tuple(each(copy_ns)),
        latency_ns=latency_ns,
        chunks=chunks,
    )


def toy_meta(n_layers: int) -> dict[str, Any]:
    """What to add to the meta of a trace whose model is ``toy``, for the command line: a config of tiny experts."""
    return {
        "config": {
            "model_type": "mixtral", "num_hidden_layers": n_layers, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 100, "tie_word_embeddings": True,
        }
    }  # fmt: skip
