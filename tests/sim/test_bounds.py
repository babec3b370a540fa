"""The bounds: optimal where they can be checked exhaustively, and never beaten by any run."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.bounds import Bounds, bounds, fewest_decode_bytes, fewest_loads, joint_bounds, joint_loads
from sim.log import HOSTED, LATE_IN_FLIGHT, REUSE_HIT, Log
from sim.machine.figures import Figure
from sim.plan import Host, Plan, Requests
from sim.policies import Policy, policy_classes
from sim.run.prepared import replay
from sim.run.scene import Scene, scene
from sim.workload import workload
from tests.sim.run.test_cache import BUNDLED, libcachesim_hits
from tests.support.runs import simpy_run
from tests.support.worlds import (
    CHOICES,
    PLANS_TAKE_LONG,
    POLICIES,
    World,
    handmade,
    planned,
    run_of,
    toy_machine,
    worlds,
)
from traces.schema import DECODE


def fewest(calls: list[list[int]], sizes: dict[int, int], capacity: int) -> int:
    ids = [e for call in calls for e in call]
    offsets = np.cumsum([0, *map(len, calls)])
    size = np.array([sizes[e] for e in ids], np.int64)
    return int(fewest_loads(offsets, np.array(ids, np.int64), size, capacity).sum())


def exhaustive(calls: list[list[int]], sizes: dict[int, int], capacity: int) -> int:
    """The fewest bytes over every choice of what to keep after every call, whole experts only.

    A call whose experts do not fit together runs in waves of as many as fit; what is kept across it must fit beside
    such a wave, and what is kept of it afterwards must fit alone.
    """

    def weigh(experts: frozenset[int]) -> int:
        return sum(sizes[e] for e in experts)

    best = {frozenset[int](): 0}
    for call in calls:
        needed = frozenset(call)
        whole = weigh(needed) <= capacity
        one = max((sizes[e] for e in needed), default=0)
        beside = capacity - weigh(needed) if whole else capacity % one
        after: dict[frozenset[int], int] = {}
        for held, cost in best.items():
            total = cost + weigh(needed - held)
            for kept in _subsets(held - needed):
                if weigh(kept) > beside:
                    continue
                for own in [needed] if whole else _subsets(needed):
                    state = kept | own
                    if weigh(state) <= capacity:
                        after[state] = min(total, after.get(state, total))
        best = after
    return min(best.values())


def _subsets(items: frozenset[int]) -> list[frozenset[int]]:
    return [frozenset(chosen) for size in range(len(items) + 1) for chosen in combinations(sorted(items), size)]


tiny = st.lists(st.sets(st.integers(0, 4), max_size=3).map(sorted), min_size=1, max_size=7)


@given(tiny, st.integers(1, 5), st.integers(1, 7), st.integers(0, 6))
@settings(max_examples=150)
def test_equal_sizes_give_the_optimum(calls: list[list[int]], slots: int, size: int, more: int) -> None:
    sizes = dict.fromkeys(range(5), size)
    capacity = slots * size + more % size  # what is left over holds nobody
    assert fewest(calls, sizes, capacity) == exhaustive(calls, sizes, capacity)


@st.composite
def unequal(draw: st.DrawFn) -> tuple[list[list[int]], dict[int, int], int]:
    """Calls of two layers in turn, experts 0..2 and 3..5, of two sizes."""
    layers = [st.sets(st.integers(first, first + 2), max_size=3).map(sorted) for first in (0, 3)]
    count = draw(st.integers(1, 7))
    calls = [draw(layers[i % 2]) for i in range(count)]
    a, b = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    sizes = {e: a if e < 3 else b for e in range(6)}
    return calls, sizes, draw(st.integers(max(a, b), 3 * (a + b)))


@given(unequal())
@settings(max_examples=150)
def test_unequal_sizes_give_a_lower_bound(case: tuple[list[list[int]], dict[int, int], int]) -> None:
    calls, sizes, capacity = case
    bound = fewest(calls, sizes, capacity)
    assert bound <= exhaustive(calls, sizes, capacity)
    assert bound >= sum(sizes[e] for e in {e for call in calls for e in call}), "everything is loaded at least once"


def test_a_small_expert_may_stay_beside_the_waves_of_a_large_call() -> None:
    # 24 bytes: three experts of 10 run in waves of two, which leaves 4 bytes for one of 4, which is needed again.
    sizes = {0: 10, 1: 10, 2: 10, 3: 4}
    calls = [[3], [0, 1, 2], [3]]
    assert fewest(calls, sizes, 24) == exhaustive(calls, sizes, 24) == 34
    work = handmade([[[0], [0, 1, 2]], [[0], []]], 3, expert_bytes=[4, 10], copy_ns=[4, 10])
    log = simpy_run(work, Plan(eviction="fifo"), 24).log()
    assert sum(log.counters.demand_bytes) >= 34


def test_tables_may_leave_a_small_expert_room_beside_smaller_waves() -> None:
    # 20 bytes hold two experts of 10. A table of one byte leaves one at a time, and beside it the one of 4 that layer 1
    # needs again: 24 bytes are moved, not 28.
    work = handmade([[[], [0], []], [[0, 1], [0], []]], 2, expert_bytes=[10, 4, 4], copy_ns=[10, 4, 4])
    log = simpy_run(work, Plan(eviction="next-use", gpu_bytes=1), 20).log()
    assert sum(log.counters.demand_bytes) == 24
    assert bounds(work, 20, 1e9).link_bytes == 24


def test_a_pool_a_layer_keeps_other_layers_while_a_call_runs_in_waves() -> None:
    work = handmade([[[0, 1], [0]]] * 3, 2, expert_bytes=10, copy_ns=10)
    log = simpy_run(work, Plan(eviction="next-use", per_layer=True), 20).log()
    # Of layer 0's two experts one is found each time, and layer 1's own slot is never touched.
    assert sum(log.counters.demand_bytes) == 10 * (2 + 1 + 1 + 1)
    assert bounds(work, 20, 1e9).link_bytes == 50


@given(st.lists(st.integers(0, 15), min_size=1, max_size=120), st.integers(1, 16))
@settings(max_examples=50)
def test_equals_belady_of_libcachesim_access_by_access(ids: list[int], slots: int) -> None:
    misses = len(ids) - libcachesim_hits("Belady", ids, slots)
    assert fewest([[e] for e in ids], dict.fromkeys(range(16), 3), 3 * slots) == 3 * misses


@given(tiny, st.integers(1, 5))
def test_more_capacity_never_moves_more(calls: list[list[int]], slots: int) -> None:
    sizes = dict.fromkeys(range(5), 1)
    assert fewest(calls, sizes, slots + 1) <= fewest(calls, sizes, slots)


def test_decode_starts_warm() -> None:
    steps = [[[0, 1]], [[0]], [[1]], [[0, 1, 2]], [[2]], [[3]]]
    work = handmade(steps, 4, phase=[0, 1, 1, 0, 1, 1], expert_bytes=10)
    # From a cold cache the stretches 0,1 and 2,3 load two each; a warm cache of one slot saves one of each.
    assert fewest_decode_bytes(work, 20) == 0
    assert fewest_decode_bytes(work, 10) == fewest_decode_bytes(work, 19) == 20


def test_what_the_host_computes_needs_no_slot() -> None:
    # One slot holds 0 for good, and 1 is computed on the host each time: with one slot alone, all would be loaded.
    work = handmade([[[0]], [[1]]] * 3, 2, expert_bytes=10, copy_ns=10)
    none = np.zeros(1, np.int64)
    plan = Plan(requests=Requests.build(*np.array([[0], [4], [0]])), host=Host(none, none + 1, none + 1, none))
    log = simpy_run(work, plan, 10).log()
    assert log.found.tolist() == [LATE_IN_FLIGHT, HOSTED, REUSE_HIT, HOSTED, REUSE_HIT, HOSTED]
    assert joint_loads(work, 10) == (20, 10), "of 40 that were moved or computed; in one slot it would be 60"


def test_the_joint_bound_is_reached_where_the_host_computes_all_and_the_link_does_next_to_nothing() -> None:
    work = handmade([[[expert]] for expert in range(4)], 4, layer_ns=5, expert_bytes=10, copy_ns=10**6)
    one = np.ones(1, np.int64)
    log = simpy_run(work, Plan(host=Host(0 * one, 4 * one, 4 * one, 0 * one)), 10).log()
    bound = joint_bounds(work, joint_loads(work, 10), 1e4, np.full(4, 4), np.ones(4, bool))
    assert log.finish[-1] == 4 * (5 + 4)
    assert 0.99 * 36 < bound.ns <= 36


def assert_no_less(one: Bounds, other: Bounds) -> None:
    """No figure of ``one`` is below that of ``other``."""
    for name in ("compute_ns", "decode_compute_ns", "ns", "decode_ns"):
        assert getattr(one, name) >= getattr(other, name), name


def bounds_of(world: World) -> tuple[Bounds, Bounds]:
    """Of runs on the GPU alone, and of those with a host, at the rates of the world's machine."""
    work, rate = world.work, world.hardware.link_bytes_per_s
    alone = work.lookup_bytes // 3 + 1
    return (
        bounds(work, world.budget, rate),
        joint_bounds(work, joint_loads(work, world.budget), rate, alone, np.ones(len(alone), bool)),
    )


@given(worlds(), st.integers(1, 12))
@settings(max_examples=25)
def test_bounds_fall_with_slots_and_rates_and_rise_with_bits(world: World, slots: int) -> None:
    model, trace, schedule = world.model, world.trace, world.work.schedule
    most = max(model.expert_bytes)

    def here(sizes: int = 1, **changed: object) -> World:
        """The world with experts so many times as large, on a machine with such figures."""
        charged = dataclasses.replace(model, expert_bytes=tuple(sizes * size for size in model.expert_bytes))
        machine = toy_machine(gbps=changed.pop("link", 1.0))  # type: ignore[arg-type]
        machine = machine.model_copy(update={"gpu": machine.gpu.model_copy(update=changed)})
        work = workload(trace, charged, machine, schedule)
        return World(trace, charged, machine, world.batch, work, slots * most)

    usual = here()
    faster = Figure(value=600.0, source="twice")
    better = [dataclasses.replace(usual, budget=usual.budget + most), here(link=2.0), here(bandwidth_gbps=faster)]
    for other in better:
        for one, bound in zip(bounds_of(usual), bounds_of(other), strict=True):
            assert_no_less(one, bound)
    if len(set(model.expert_bytes)) == 1 and slots > 1:
        for one, bound in zip(bounds_of(here(sizes=2)), bounds_of(usual), strict=True):
            assert_no_less(one, bound)


def held_to_bounds(world: World, plan: Plan, log: Log) -> None:
    bound = world.bounds() if plan.host is None else world.joint_bounds(plan.host)
    taken = sum(log.counters.demand_bytes) + sum(log.counters.prefetch_bytes)
    taken += int(world.work.lookup_bytes[log.found == HOSTED].sum())
    assert taken >= bound.link_bytes
    assert log.finish[-1] >= bound.compute_ns
    # Rates are floats: a bound may round up by parts in 10^12.
    assert log.finish[-1] * (1 + 1e-12) >= bound.ns
    decode = world.work.schedule.phase == DECODE
    spent = np.diff(log.finish, prepend=0)[decode].sum()
    assert spent >= bound.decode_compute_ns
    assert spent * (1 + 1e-12) >= bound.decode_ns


@given(planned())
@settings(max_examples=200, suppress_health_check=PLANS_TAKE_LONG)
def test_no_run_beats_the_bounds(case: tuple[World, str, Plan]) -> None:
    world, _, plan = case
    log = run_of(world, plan).log()
    if plan.everything_resident:
        assert log.finish[-1] == world.work.compute_ns().sum() >= world.bounds().compute_ns
        if world.work.awaited_ns is None:
            assert log.finish[-1] == world.bounds().compute_ns, "its own bound, reached exactly"
    elif plan.least_bytes <= world.budget:
        held_to_bounds(world, plan, log)


@given(worlds())
@settings(max_examples=30)
def test_no_builtin_policy_beats_the_bounds(world: World) -> None:
    for name in POLICIES:
        for values in CHOICES.get(name, [{}]):
            plan = world.plan(name, values)
            larger = plan.everything_resident or plan.least_bytes > world.budget
            if world.fits(plan) and not larger:
                held_to_bounds(world, plan, run_of(world, plan).log())


@pytest.mark.parametrize(("batch", "cache"), [(1, "4%"), (4, "25%"), (1, "70%")])
def test_real_routes_keep_to_the_bounds_and_clairvoyance_leads(batch: int, cache: str) -> None:
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    here = scene(BUNDLED[0], cache=cache, batch=batch)
    reports = {}
    for name, kind in policy_classes().items():
        if missing(here, kind):
            continue
        try:
            report = replay(here, name)
        except InputError as refused:  # a pool a layer needs more than 4 % of Mixtral's experts
            assert cache == "4%" and "for one expert" in str(refused)
            continue
        if report.efficiency is not None:
            reports[name] = report
    assert all(report.efficiency <= 1 + 1e-9 for report in reports.values())
    rivals = {name: report.efficiency for name, report in reports.items() if name != "all-in-gpu"}
    # An observation of this trace, not a law: see sim.policies.clairvoyant.
    assert max(rivals, key=rivals.__getitem__) == "clairvoyant"


def missing(here: Scene, kind: type[Policy]) -> bool:
    return any(getattr(here.trace, name) is None for name in kind.needs)


@given(worlds())
@settings(max_examples=40)
def test_enough_slots_load_everything_once(world: World) -> None:
    everything = world.work.n_experts * sum(world.work.expert_bytes)
    world = dataclasses.replace(world, budget=everything)
    once = np.unique(world.work.expert)
    assert world.bounds().link_bytes == int(np.array(world.work.expert_bytes)[once // world.work.n_experts].sum())
    assert world.bounds().decode_link_bytes == 0
