"""The systems that DoMoE is compared with and that need no learning: what each decides, by hand and by closed forms."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, REUSE_HIT
from sim.machine.hardware import HostCompute
from sim.plan import Host, Plan, PlanError, Requests
from sim.policies import make_policy, policy_class
from sim.run.host_costs import host_costs
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from sim.run.terms import TooSmallError
from sim.view import View
from sim.workload import Workload, batched, workload
from tests.sim.run.test_cache import BUNDLED
from tests.support.runs import executed, simpy_run
from tests.support.strategies import make_trace
from tests.support.worlds import MS, Witness, World, handmade, run_of, toy_machine, toy_model, worlds
from traces.schema import PREFILL

MIB = 1_000_000


def asked(plan: Plan) -> set[tuple[int, int, int]]:
    """(moment, call, expert) of every request."""
    r = plan.requests
    assert r is not None
    moment = np.repeat(r.moment, np.diff(r.offsets))
    return set(zip(moment.tolist(), r.call.tolist(), r.expert.tolist(), strict=True))


# -- experts on the host -----------------------------------------------------------------------------------------------


def on_host(read_ns: int, **changed: object) -> Host:
    """One layer's host: no fixed time, a read that slows by half beside the link, no arithmetic."""
    one = np.ones(1, np.int64)
    given = {"fixed_ns": 0 * one, "read_ns": read_ns * one, "shared_ns": 3 * read_ns // 2 * one, "row_ns": 0 * one}
    return Host(**(given | changed))  # type: ignore[arg-type]


def both(work: Workload, plan: Plan, budget: int) -> object:
    """The log of both engines, which agree."""
    reference, compiled = (executed(work, plan, budget, engine=engine).log for engine in ("simpy", "compiled"))
    for name in ("finish", "found", "stall_demand", "stall_late", "stall_host"):
        assert getattr(reference, name).tolist() == getattr(compiled, name).tolist(), name
    assert reference.counters == compiled.counters
    return reference


def test_an_absent_expert_runs_on_the_host_when_that_beats_its_copy() -> None:
    pytest.importorskip("numba", reason="the compiled engine needs numba")
    # Expert 0 has a slot of its own and lands at 10 ms; 1 and 2 take 4 ms each on the host, one after the other, while
    # the GPU waits for 0 (10 ms) and runs it (1 ms). The link is busy, so they take 6 each: 12 ms in all.
    work = handmade([[[0, 1, 2]], [[0, 1, 2]]], 3, expert_ns=MS)
    load = Requests.build(*np.array([[0], [1], [0]]))
    plan = Plan(requests=load, host=on_host(4 * MS, reserved=np.array([0])))
    log = both(work, plan, 2 * MIB)
    assert log.found.tolist() == [LATE_IN_FLIGHT, HOSTED, HOSTED, REUSE_HIT, HOSTED, HOSTED]
    # In the second step the link is idle: 8 ms on the host, 1 of them beside the GPU.
    assert log.finish.tolist() == [12 * MS, 20 * MS]
    assert log.stall_host.tolist() == [1 * MS, 7 * MS]
    assert log.stall_late.tolist() == [10 * MS, 0]
    after = dataclasses.replace(plan, host=dataclasses.replace(plan.host, beside=False))
    assert both(work, after, 2 * MIB).finish.tolist() == [(11 + 8) * MS, (11 + 8 + 1 + 8) * MS]


def test_what_is_cheaper_to_copy_is_copied() -> None:
    work = handmade([[[0]]], 2, expert_ns=MS)  # 10 ms to copy, 1 to run
    for read, found in ((11 * MS - 1, HOSTED), (11 * MS, MISS)):
        log = simpy_run(work, Plan(host=on_host(read)), MIB).log()
        assert log.found.tolist() == [found]
        assert sum(log.counters.demand_bytes) == (0 if found == HOSTED else MIB)
        assert log.finish.tolist() == [read if found == HOSTED else 11 * MS]


def test_more_rows_take_longer_on_the_host_and_not_on_the_link() -> None:
    work = dataclasses.replace(handmade([[[0, 1, 2]]], 3), tokens=np.array([1, 9, 10]))
    host = on_host(3 * MS, row_ns=np.array([MS]))
    costs = host_costs(work, host)
    assert costs.alone.tolist() == [3 * MS, 9 * MS, 10 * MS]
    assert costs.shared.tolist() == [9 * MS // 2, 9 * MS, 10 * MS]
    assert costs.chosen.tolist() == [True, True, False], "a copy takes 10 ms"


def test_slots_of_ones_own_are_nobody_elses() -> None:
    # 0 has its own slot; 1, 2 and 3 go through the other one in waves, and 0 is never evicted.
    work = handmade([[[0, 1, 2, 3]]] * 3, 4)
    never = on_host(2**40 - 1)
    witness_work = World(make_trace([[0]], n_experts=4), toy_model(1, 4, 1, (MIB,)), toy_machine(), 1, work, 2 * MIB)
    plan = Plan(host=dataclasses.replace(never, shared_ns=never.read_ns, reserved=np.array([0])))
    witness = Witness(witness_work, plan)
    log = witness.log()
    assert log.found.reshape(3, 4)[:, 0].tolist() == [MISS, REUSE_HIT, REUSE_HIT]
    assert all(0 not in event.detail[0] for event in witness.of("evicted"))
    with pytest.raises(TooSmallError, match=r"2,000,000 for experts that stay for good \+ 1,000,000 for one expert"):
        simpy_run(work, Plan(host=dataclasses.replace(plan.host, reserved=np.array([0, 1]))), 2 * MIB)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"read_ns": np.array([-1])}, r"plan: host.read_ns\[0\] is -1; expected 0 to"),
        ({"row_ns": np.array([1, 2])}, r"plan: host.row_ns is 'int64 \(2,\)'; expected an array of 1"),
        ({"reserved": np.array([4])}, r"plan: host.reserved\[0\] is 4; expected 0 to 3"),
        ({"reserved": np.array([1, 1])}, r"plan: host.reserved\[1\] is 1; expected more than 1"),
        ({"beside": 1}, "plan: host.beside is 1; expected True or False"),
    ],
)
def test_a_host_that_cannot_be_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simpy_run(handmade([[[0]]], 4), Plan(host=dataclasses.replace(on_host(5), **changed)), 4 * MIB)


@given(worlds())
@settings(max_examples=60)
def test_a_host_that_takes_no_time_leaves_only_compute(world: World) -> None:
    work = dataclasses.replace(world.work, copy_ns=tuple(ns + 1 for ns in world.work.copy_ns))
    zero = np.zeros(work.n_layers, np.int64)
    log = simpy_run(work, Plan(host=Host(zero, zero, zero, zero)), world.budget).log()
    assert (log.found == HOSTED).all()
    assert not log.stall_host.any()
    idle = work.layer_ns.sum() + work.shared_ns.sum() + work.head_ns.sum()
    assert log.finish[-1] == idle


# -- a ring of whole layers --------------------------------------------------------------------------------------------


def test_a_ring_copies_every_layer_whole_and_waits_for_it() -> None:
    pytest.importorskip("numba", reason="the compiled engine needs numba")
    # 4 layers of 2 experts, 10 ms a copy, 1 ms to run one: a layer takes 20 ms on the link, which never rests, and the
    # GPU waits for both of its experts, whichever it needs. The last one needed lands last, and runs then.
    work = handmade([[[0], [1], [0], [0]], [[1], [0], [1], [1]]], 2, expert_ns=MS)
    log = both(work, Plan(eviction="fifo", ring=True, discipline="fifo"), 4 * MIB)
    assert log.finish.tolist() == [80 * MS, 161 * MS]
    assert set(log.found.tolist()) == {LATE_QUEUED, LATE_IN_FLIGHT}
    counters = log.counters
    assert sum(counters.demand_bytes) == 0
    assert sum(counters.prefetch_bytes) == 8 * 2 * MIB
    assert sum(counters.wasted) == 8 * MIB
    assert sum(counters.unused) == 8


@given(st.integers(4, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_se_moe_moves_every_layer_whole(n_layers: int, n_experts: int, tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [[rng.integers(0, n_experts, 2).tolist() for _ in range(n_layers)] for _ in range(tokens)]
    work = handmade(steps, n_experts, expert_ns=MS, layer_ns=int(rng.integers(0, 30)) * MS)
    plan = Plan(eviction="fifo", ring=True, discipline="fifo")
    log = simpy_run(work, plan, 2 * n_experts * MIB).log()
    assert sum(log.counters.prefetch_bytes) == tokens * n_layers * n_experts * MIB, "nothing survives two layers"
    assert sum(log.counters.demand_bytes) == sum(log.counters.cancelled) == 0
    assert log.finish[-1] >= tokens * n_layers * n_experts * 10 * MS


def test_the_ring_of_se_moe_holds_two_layers_of_the_largest() -> None:
    trace = make_trace([[[0], [0], [0]]], n_experts=2)
    model, machine = toy_model(3, 2, 1, (10, 30, 20)), toy_machine()
    world = World(trace, model, machine, 1, workload(trace, model, machine, batched(trace, 1)), 1_000)
    plan = world.plan("se-moe")
    assert plan.most_bytes == 2 * (30 + 20)
    assert plan.discipline == "fifo"
    assert sum(run_of(world, plan).log().counters.prefetch_bytes) == 2 * (10 + 30 + 20), "every layer whole"


# -- policies ----------------------------------------------------------------------------------------------------------


def small(budget: int = 8 * 50_000, batch: int = 2) -> World:
    """Two sequences of 3 prompt and 6 decode tokens over 3 layers of 6 experts, with guesses of the next gate."""
    rng = np.random.default_rng(4)
    routes = rng.random((18, 3, 6)).argsort(axis=2)[:, :, :2]
    ahead = rng.random((18, 3, 6)).argsort(axis=2)[:, :, :2].astype(np.int16)
    ahead[:, -1] = -1
    trace = make_trace(
        routes, n_experts=6, sequence=np.repeat([0, 1], 9), phase=([0] * 3 + [1] * 6) * 2, lookahead=ahead
    )
    model, machine = toy_model(3, 6, 2, (50_000,) * 3), toy_machine()
    return World(trace, model, machine, batch, workload(trace, model, machine, batched(trace, batch)), budget)


@pytest.mark.parametrize("speculate", [0, 1, 2])
def test_cache_moe_asks_for_what_the_next_gate_names_first(speculate: int) -> None:
    world = small()
    trace, schedule = world.trace, world.work.schedule
    expected = set()
    for step in np.flatnonzero(schedule.phase != PREFILL).tolist():
        for row in schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist():
            for layer in (1, 2):
                for expert in trace.lookahead[row, layer - 1, :speculate].tolist():
                    expected.add((step * 4 + layer, step * 3 + layer, layer * 6 + expert))
    plan = world.plan("cache-moe", {"speculate": speculate})
    assert asked(plan) == expected
    assert plan.per_layer and plan.eviction == "lru" and plan.discipline == "demand-first"
    if not speculate:
        plain = world.plan("lru", {"scope": "layer"})
        one, other = (dataclasses.replace(p, discipline="fifo") for p in (plan, plain))
        assert run_of(world, one).log().finish.tolist() == run_of(world, other).log().finish.tolist()


def test_pregated_moe_is_told_the_next_layer_and_no_more() -> None:
    world = small()
    expected = set()
    for call in range(world.work.n_calls):
        step, layer = divmod(call, 3)
        for expert in world.work.expert[world.work.offsets[call] : world.work.offsets[call + 1]].tolist():
            if layer:
                expected.add((step * 4 + layer, call, expert))
    plan, cached = world.plan("pregated-moe"), world.plan("pregated-moe", {"cache": "lfu"})
    assert asked(plan) == asked(cached) == expected
    assert plan.discipline == cached.discipline == "fifo", "one thread copies in order of issue"
    assert (plan.keep, plan.most_bytes) == (False, 2 * 6 * 50_000), "two buffers of a layer each"
    assert (cached.keep, cached.most_bytes, cached.eviction) == (True, 0, "lfu")
    kind = policy_class("pregated-moe")
    assert kind.foresight == 1 and not kind.clairvoyant and "look-ahead" in kind.summary
    with pytest.raises(PermissionError, match="declares foresight"):
        View(world.trace, world.work).foreseen(1)
    told = make_policy("pregated-moe", world.setting).view(world.trace, world.work)
    assert told.foreseen(1).shape[1] == 2
    with pytest.raises(PermissionError):
        told.future()


@given(worlds())
@settings(max_examples=60)
def test_pregated_moe_never_copies_in_vain(world: World) -> None:
    world = dataclasses.replace(world, budget=2 * world.work.n_experts * max(world.work.expert_bytes))
    log = run_of(world, world.plan("pregated-moe")).log()
    first = world.work.call % world.work.n_layers == 0
    assert sum(log.counters.wasted) == 0
    assert (log.found[first] == MISS).all()
    assert (log.found[~first] != MISS).all()


def test_fiddler_keeps_the_popular_and_runs_the_rest_on_the_host() -> None:
    world = small(budget=4 * 50_000)
    counts = np.zeros(18, np.int64)
    for row in np.flatnonzero(world.trace.phase != PREFILL).tolist():
        for layer in range(3):
            counts[layer * 6 + world.trace.experts[row, layer]] += 1
    best = np.lexsort((np.arange(18), -counts))[:3]
    plan = world.plan("fiddler", {"host_gbps": 1e6, "shared_gbps": 1e6, "tokens": 1e6})
    assert plan.host is not None and plan.host.reserved.tolist() == sorted(best.tolist())
    log = run_of(world, plan).log()
    assert set(world.work.expert[log.found == HOSTED].tolist()) == set(world.work.expert.tolist()) - set(best.tolist())
    assert sum(log.counters.demand_bytes) == 0
    slow = world.plan("fiddler", {"host_gbps": 0.001})
    assert not (run_of(world, slow).log().found == HOSTED).any()


def test_fiddlers_host_profile_is_what_its_parameters_say() -> None:
    world = small()
    copy = world.hardware.copy_ns(50_000)
    plan, after = world.plan("fiddler"), world.plan("fiddler", {"beside": False})
    host = plan.host
    assert host is not None and after.host is not None
    assert not plan.keep, "a copied expert is used and dropped"
    assert (host.beside, after.host.beside) == (True, False)
    assert host.read_ns.tolist() == [-(-50_000 // 63.8)] * 3  # 63.8 GB/s are 63.8 bytes a nanosecond
    assert host.shared_ns.tolist() == [-(-50_000 // 54)] * 3
    assert host.row_ns.tolist() == [-(-copy // 10)] * 3
    assert host.fixed_ns.tolist() == [2 * world.hardware.copy_ns(128)] * 3


@pytest.mark.parametrize(
    ("given", "alone", "shared"),
    [
        ({}, 40, 25),
        ({"host_gbps": 50}, 50, 25),
        ({"shared_gbps": 30}, 40, 30),
        ({"host_gbps": 20}, 20, 20),  # copies never make the host faster
        ({"host_gbps": 80, "shared_gbps": 70}, 80, 70),
    ],
)
def test_fiddlers_host_is_the_machines_unless_it_is_given(given: dict[str, object], alone: int, shared: int) -> None:
    world = small()
    source = {"source": "seen"}
    host = HostCompute.model_validate({"host_gbps": source | {"value": 40.0}, "shared_gbps": source | {"value": 25.0}})
    world = dataclasses.replace(world, hardware=world.hardware.model_copy(update={"host": host}))
    plan = world.plan("fiddler", given)
    assert plan.host is not None
    assert plan.host.read_ns.tolist() == [-(-50_000 // alone)] * 3
    assert plan.host.shared_ns.tolist() == [-(-50_000 // shared)] * 3
    told = make_policy("fiddler", world.setting, given).parameters.model_dump()
    assert (told["host_gbps"], told["shared_gbps"]) == (alone, given.get("shared_gbps", 25))


# -- a report of each --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache-moe", "pregated-moe", "se-moe", "fiddler"])
def test_a_real_trace_is_accounted_for_to_the_nanosecond(name: str) -> None:
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    here = scene(BUNDLED[0], learns=name == "fiddler", loop="eager")  # a loop that adds nothing beside kernels
    report = replay(here, name)
    assert report.decode.time_ms["other"] == report.prefill.time_ms["other"] == 0
    assert report.decode.lookups == report.decode.hits + report.decode.late + report.decode.misses
    bounded = name != "fiddler"
    assert (report.efficiency is not None) == bounded
    assert (report.bounds["link_tokens_per_s"] is not None) == bounded
    assert (report.decode.hosted > 0) == (report.decode.time_ms["stall_host"] > 0) == (not bounded)
    if prepare(here, name).plan.most_bytes:
        assert any("has no use for the whole cache" in note for note in report.notes)


def test_perfect_guesses_hit_where_there_is_time() -> None:
    # One layer's copy takes 1 ms, attention 5: what the gate names is there when it is needed.
    routes = np.array([[[0], [1], [2]], [[3], [0], [1]]])
    ahead = np.concatenate([routes[:, 1:], np.full((2, 1, 1), -1)], axis=1).astype(np.int16)
    trace = make_trace(routes, n_experts=4, lookahead=ahead)
    work = handmade([row.tolist() for row in routes], 4, layer_ns=5 * MS, copy_ns=MS)
    world = World(trace, toy_model(3, 4, 1, (MIB,) * 3), toy_machine(), 1, work, 6 * MIB)
    found = run_of(world, world.plan("cache-moe")).log().found.reshape(2, 3)
    assert found.tolist() == [[MISS, PREFETCH_HIT, PREFETCH_HIT]] * 2
