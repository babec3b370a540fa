"""The built-in policies: what each decides, beside naive versions of it, and what must hold of all of them."""

import dataclasses
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.log import MISS, PREFETCH_HIT, REUSE_HIT
from sim.machine.prediction_costs import PredictionCosts
from sim.plan import Plan, Prediction, Requests
from sim.policies import Parameters, Policy, Setting, make_policy, policy_class, policy_classes
from sim.run.serve import serve
from sim.run.slots import ExpertCache
from sim.run.terms import split_slots
from sim.view import View
from sim.workload import batched, workload
from tests.support.runs import simpy_run
from tests.support.strategies import make_trace
from tests.support.worlds import CHOICES, MS, POLICIES, World, handmade, made, run_of, toy_machine, toy_model, worlds
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

DEMAND = {"lru": "lru", "fifo": "fifo", "lfu": "lfu", "perfect-lfu": "perfect-lfu"}


def test_the_baselines_are_there() -> None:
    wanted = {"on-demand", "lru", "lfu", "fifo", "previous-token", "popularity", "all-in-gpu", "clairvoyant"}
    assert wanted | {"perfect-lfu"} <= set(policy_classes())
    for name, kind in policy_classes().items():
        assert kind.name == name
        assert kind.summary
        assert kind.takes.model_fields or kind.takes is Parameters


# -- all of them -------------------------------------------------------------------------------------------------------


@given(worlds())
@settings(max_examples=50)
def test_an_infinite_cache_misses_each_expert_once(world: World) -> None:
    once = len(np.unique(world.work.expert))
    everything = world.work.n_experts * sum(world.work.expert_bytes)
    for name in ("lru", "fifo", "lfu", "previous-token", "popularity", "clairvoyant"):
        for values in CHOICES.get(name, [{}]):
            large = dataclasses.replace(world, budget=4 * everything)
            run = run_of(large, plan := large.plan(name, values))
            log = run.log()
            assert sum(log.counters.evictions) == 0
            if plan.requests is None and not plan.stream_prefill:
                assert int((log.found == MISS).sum()) == once
                assert int((log.found == REUSE_HIT).sum()) == len(log.found) - once
            else:
                assert int((log.found != REUSE_HIT).sum()) == once, "whatever comes comes once"
            huge = dataclasses.replace(large, budget=10 * large.budget)
            again = run_of(huge, huge.plan(name, values)).log()
            assert again.finish.tolist() == log.finish.tolist()
            assert again.found.tolist() == log.found.tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_one_byte_below_an_expert_is_the_same_error_for_all(name: str) -> None:
    work = handmade([[[0]]], 2, expert_bytes=100)
    trace = make_trace(
        [[0]],
        n_experts=2,
        probs=np.array([[[200, 55]]], np.uint8),
        lookahead=np.full((1, 1, 1), -1, np.int16),
        predicted_experts=np.zeros((1, 1, 1), np.int16),
        predicted_probs=np.full((1, 1, 1), 255, np.uint8),
        embeddings=np.ones((1, 2, 3), np.int8),
        prefill_embeddings=np.zeros((0, 3), np.int8),
        embedding_scale=np.ones(2, np.float32),
        meta={
            "embedding": {"basis_sha256": "0", "dims": 3, "bits": 8, "prefill_layer": 0},
            "predictor": {"sha256": "1" * 64},
        },
    )
    model = toy_model(1, 2, 1, (100,))
    # Tables of predictors lie on the host, so that experts have the whole budget.
    world = World(trace, model, toy_machine(), 1, work, 99, software=PredictionCosts.load("paper"))
    plan = world.plan(name)
    if plan.everything_resident:
        assert simpy_run(work, plan, 99).log().found.tolist() == [REUSE_HIT]
        return
    with pytest.raises(InputError, match="cache: 99 bytes cannot hold one expert of 100 bytes; give at least that"):
        simpy_run(work, plan, 99)


@given(worlds())
@settings(max_examples=60)
def test_caches_in_time_find_what_caches_without_time_find(world: World) -> None:
    for name, rule in DEMAND.items():
        for per_layer in (False, True):
            plan = Plan(eviction=rule, per_layer=per_layer)
            if not world.fits(plan):
                continue
            log = run_of(world, plan).log()
            work = world.work
            slots = split_slots(world.budget, work.expert_bytes, per_layer)
            cache = ExpertCache(work.expert_bytes, work.n_experts, slots.capacity, slots.pool, rule, work.first_call())
            hit = serve(cache, work.offsets, work.expert)
            assert (log.found == REUSE_HIT).tolist() == hit.tolist(), name
            assert sum(log.counters.evictions) == (~hit).sum() - np.count_nonzero(cache.state)


def test_every_slot_is_used_when_slots_are_split_over_layers() -> None:
    assert split_slots(7 * 10 + 9, (10,) * 3, per_layer=True).capacity == (30, 20, 20)
    assert split_slots(61, (10, 20), per_layer=True).capacity == (30, 30)
    assert split_slots(61, (10, 20), per_layer=False).capacity == (61,)
    with pytest.raises(
        InputError, match=r"29 B split over 3 routed layers .* give --cache 3 \(slots\), which is 30 B, or more"
    ):
        split_slots(29, (10, 10, 10), per_layer=True)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 8, 9, 80])
def test_capacities_around_what_one_call_and_one_token_take(slots: int) -> None:
    # 4 layers, 2 experts a token: k - 1, k, more, one below all, all, and ten times as much. Every one finishes.
    rng = np.random.default_rng(1)
    steps = [[rng.choice(4, 2, replace=False).tolist() for _ in range(4)] for _ in range(12)]
    work = handmade(steps, 4, expert_ns=MS, layer_ns=MS)
    for plan in (Plan(), Plan(keep=False), Plan(eviction="next-use"), Plan(eviction="lfu")):
        log = simpy_run(work, plan, slots * 1_000_000).log()
        assert len(log.finish) == 12
        assert sum(log.counters.demand_bytes) >= len(set(work.expert.tolist())) * 1_000_000


def test_uniform_routes_hit_as_often_as_there_are_slots() -> None:
    ids = np.random.default_rng(3).integers(0, 64, 20_000)
    work = handmade([[[int(e)]] for e in ids], 64, copy_ns=10, expert_bytes=1)
    for rule in ("lru", "fifo", "lfu"):
        log = simpy_run(work, Plan(eviction=rule), 32).log()
        assert (log.found == REUSE_HIT).mean() == pytest.approx(0.5, abs=0.02)


# -- each --------------------------------------------------------------------------------------------------------------


@given(worlds())
@settings(max_examples=60)
def test_on_demand_keeps_nothing(world: World) -> None:
    log = run_of(world, world.plan("on-demand")).log()
    assert (log.found == MISS).all()
    assert sum(log.counters.demand_bytes) == int(world.work.lookup_bytes.sum())


@given(worlds())
@settings(max_examples=60)
def test_all_in_gpu_never_waits(world: World) -> None:
    log = run_of(world, world.plan("all-in-gpu")).log()
    assert (log.found == REUSE_HIT).all()
    assert log.finish.tolist() == np.cumsum(world.work.compute_ns()).tolist()
    assert sum(log.counters.demand_bytes) + sum(log.counters.prefetch_bytes) == 0


@given(worlds(), st.integers(0, 4))
@settings(max_examples=60)
def test_previous_token_asks_for_what_the_token_before_took(world: World, ahead: int) -> None:
    trace, work = world.trace, world.work
    n_layers, n_experts = work.n_layers, work.n_experts
    expected = set()
    schedule = work.schedule
    for step in range(schedule.n_steps):
        if schedule.phase[step] == PREFILL:
            continue
        for row in schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist():
            if row == 0 or trace.sequence[row - 1] != trace.sequence[row]:
                continue
            for layer in range(n_layers):
                point = 0 if ahead == 0 else max(0, layer + 1 - ahead)
                for expert in trace.experts[row - 1, layer].tolist():
                    if expert >= 0:
                        moment = step * (n_layers + 1) + point
                        expected.add((moment, step * n_layers + layer, layer * n_experts + expert))
    assert made(world.plan("previous-token", {"ahead": ahead}).requests) == sorted(expected)


def test_previous_token_is_right_where_tokens_repeat() -> None:
    trace = make_trace(np.tile([[[0, 1], [2, 3]]], (5, 1, 1)), n_experts=4)
    model = toy_model(2, 4, 2, (1_000, 1_000))
    machine = toy_machine(gbps=20.0)
    world = World(trace, model, machine, 1, workload(trace, model, machine, batched(trace, 1)), 2_000)
    # Two slots for two layers of two: what is asked for when a layer's route is known comes while it computes.
    log = run_of(world, world.plan("previous-token", {"ahead": 1})).log()
    assert (log.found[:2] == MISS).all()
    assert set(log.found[4:].tolist()) == {PREFETCH_HIT}


@given(worlds())
@settings(max_examples=60)
def test_popularity_values_experts_by_their_use_in_the_profile(world: World) -> None:
    trace = world.trace
    plan = world.plan("popularity")
    counts: Counter[int] = Counter()
    for row in np.flatnonzero(trace.phase == DECODE).tolist():
        for layer in range(trace.n_layers):
            for expert in trace.experts[row, layer].tolist():
                if expert >= 0:
                    counts[layer * trace.n_experts + expert] += 1
    assert plan.values is not None
    assert plan.values.table.shape == (1, trace.n_layers * trace.n_experts)
    assert {e: v for e, v in enumerate(plan.values.table[0].tolist()) if v} == dict(counts)
    asked = [expert for _, _, expert in made(plan.requests)]
    assert len(asked) == len(set(asked))
    sizes = [world.work.expert_bytes[e // trace.n_experts] for e in asked]
    assert sum(sizes) <= world.budget
    if len(set(world.work.expert_bytes)) == 1:
        slots = world.budget // world.work.expert_bytes[0]
        best = sorted(counts, key=lambda e: (-counts[e], e))[:slots]
        assert set(asked) == set(best)


def test_popularity_by_domain_follows_the_label() -> None:
    trace = make_trace(
        [[0], [0], [1], [1], [2], [0]],
        n_experts=3,
        sequence=[0, 0, 1, 1, 2, 3],
        domain=["law", "code", "unheard of", "law"],
    )
    profile = trace.select("all", ["law", "code"])
    model, machine = toy_model(1, 3, 1, (1_000,)), toy_machine()
    work = workload(trace, model, machine, batched(trace, 1))
    world = World(trace, model, machine, 1, work, 1_000, profile=profile)
    values = world.plan("popularity", {"by": "domain"}).values
    assert values is not None
    table = values.table[values.index].tolist()
    # law, then code; a domain without a profile is judged by all of it; law again.
    assert values.moment.tolist() == [0, 4, 8, 10]
    assert table == [[3, 0, 0], [0, 2, 0], [3, 2, 0], [3, 0, 0]]


def test_popularity_counts_each_domain_of_all_profiles() -> None:
    rng = np.random.default_rng(0)

    def trace(domains: int, split: str) -> Trace:
        routes = rng.integers(0, 4, (3 * domains, 2, 1))
        names = [f"d{i}" for i in rng.permutation(domains)]
        return make_trace(
            routes, n_experts=4, sequence=np.repeat(np.arange(domains), 3), domain=names, split=split,
            phase=[0, 1, 1] * domains,
        )  # fmt: skip

    profiles, runs = [trace(400, "profile"), trace(300, "profile")], trace(500, "eval")
    model = toy_model(2, 4, 1, (1000, 1000))
    work = workload(runs, model, toy_machine(), batched(runs, 1))
    policy = make_policy("popularity", Setting(model, 3000, profiles), {"by": "domain"})
    plan = policy.plan(View(runs, work))
    assert plan.values is not None
    counts = np.zeros((500, 2, 4), np.int64)
    for profile in profiles:
        for row in np.flatnonzero(profile.phase == DECODE):
            number = int(str(profile.domain[profile.sequence[row]])[1:])
            np.add.at(counts[number], (np.arange(2), profile.experts[row, :, 0]), 1)
    counts[400:] = counts.sum(0)  # domains without a profile
    running = [int(str(name)[1:]) for name in runs.domain]
    np.testing.assert_array_equal(plan.values.table[plan.values.index], counts.reshape(500, 8)[running])


class EverythingParameters(Parameters):
    """Which layers."""

    ahead: int = 1


class PrefetchEverything(Policy):
    """Copies every expert of the next layer, like a system that moves whole tensors."""

    name = "everything"
    summary = "prefetch all experts of the next layer"
    takes: ClassVar[type[Parameters]] = EverythingParameters

    def plan(self, view: object) -> Plan:
        work = view._work  # type: ignore[attr-defined]
        n_layers, n_experts = work.n_layers, work.n_experts
        call = np.repeat(np.arange(1, work.n_calls), n_experts)
        expert = call % n_layers * n_experts + np.tile(np.arange(n_experts), work.n_calls - 1)
        step, layer = np.divmod(call - 1, n_layers)
        return Plan(requests=Requests.build(step * (n_layers + 1) + layer + 1, call, expert), discipline="fifo")


def test_prefetching_everything_shows_as_a_loss() -> None:
    rng = np.random.default_rng(2)
    routes = rng.random((30, 4, 8)).argsort(axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=8, phase=[0] * 6 + [1] * 24)
    model, machine = toy_model(4, 8, 2, (200_000,) * 4), toy_machine(gbps=4.0)
    world = World(trace, model, machine, 1, workload(trace, model, machine, batched(trace, 1)), 16 * 200_000)
    everything = PrefetchEverything(world.setting, EverythingParameters()).plan(type("V", (), {"_work": world.work}))
    greedy = run_of(world, everything).log()
    plain = run_of(world, world.plan("lru")).log()
    moved = [sum(log.counters.demand_bytes) + sum(log.counters.prefetch_bytes) for log in (greedy, plain)]
    assert moved[0] > 2 * moved[1]
    assert sum(greedy.counters.wasted) > 0
    assert greedy.finish[-1] > plain.finish[-1]


# -- names and parameters ----------------------------------------------------------------------------------------------


def _world() -> World:
    trace = make_trace([[0]], n_experts=2)
    return World(trace, toy_model(1, 2, 1, (100,)), toy_machine(), 1, handmade([[[0]]], 2, expert_bytes=100), 100)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "lru",
            {"scope": "galaxy"},
            "policy lru: parameter scope = 'galaxy'; expected 'global' or 'layer'.*parameters: scope",
        ),
        ("lru", {"size": 3}, "policy lru: parameter size = 3; expected no such field"),
        ("previous-token", {"ahead": -1}, "parameter ahead = -1; expected 0 or more"),
        ("on-demand", {"x": 1}, r"parameter x = 1; .*\(parameters: none\)"),
        ("nonsense", {}, "policy 'nonsense' is unknown; expected one of all-in-gpu, .*popularity.*module:Class"),
        ("no.such.module:Class", {}, "cannot import 'no.such.module:Class'"),
        ("sim.plan:Plan", {}, "'sim.plan:Plan': is not a sim.policies.Policy"),
        ("sim.policies.base:Policy", {}, "has no method plan; expected that of a policy"),
    ],
)
def test_wrong_names_and_parameters_are_one_clear_line(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        make_policy(name, _world().setting, values)
    assert "\n" not in str(error.value)


def test_a_class_by_its_import_path_is_a_policy() -> None:
    assert policy_class("tests.sim.policies.test_policies:PrefetchEverything") is PrefetchEverything


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (([1], [0], [0]), "request 0 at step 0, point 1 is for call 0, which has passed"),
        (([2], [0], [0]), "request 0 at step 1, point 0 is for call 0, which has passed"),
        (([0], [0], [5]), r"requests.expert\[0\] is 5; expected 0 to 1"),
        (([0], [0], [-1]), r"requests.expert\[0\] is -1; expected 0 to 1"),
        (([0], [7], [0]), r"requests.call\[0\] is 7; expected 0 to 1"),
    ],
)
def test_impossible_requests_are_refused_by_number(
    requests: tuple[list[int], list[int], list[int]], message: str
) -> None:
    plan = Plan(requests=Requests.build(*(np.array(a) for a in requests)))
    with pytest.raises(InputError, match=message):
        simpy_run(handmade([[[0]], [[0]]], 2), plan, 1_000_000)


def test_unknown_eviction_and_senseless_chunks_are_refused() -> None:
    work = handmade([[[0]]], 2)
    with pytest.raises(InputError, match="eviction 'belady' is unknown; expected one of lru, fifo"):
        simpy_run(work, Plan(eviction="belady"), 1_000_000)
    for chunks in (0, -3):
        with pytest.raises(InputError, match=f"chunks: {chunks} pieces of a transfer; give at least 1"):
            simpy_run(work, Plan(), 1_000_000, chunks=chunks)


def test_prediction_is_charged_and_gpu_bytes_are_taken_from_slots() -> None:
    work = handmade([[[0]], [[0]], [[1]], [[0]]], 2, layer_ns=MS, phase=[0, 1, 0, 1])
    plan = Plan(prediction=Prediction(np.array([2]), np.array([3 * MS]), prompt_ns=7 * MS), gpu_bytes=1_000_000)
    log = simpy_run(work, plan, 2_000_000).log()
    assert log.predict.tolist() == [7 * MS, 3 * MS, 7 * MS, 0]
    assert (log.found == MISS).tolist() == [True, False, True, True], "one slot is left"
    with pytest.raises(InputError, match="the cache of 1,999,999 bytes is too small"):
        simpy_run(work, plan, 1_999_999)


def test_a_plain_cache_names_the_rule_that_it_evicts_by() -> None:
    """LFU, made from LRU, said that its rule was lru."""
    view = View(make_trace([[[0]]], n_experts=2), handmade([[[0]]], 2))
    setting = Setting(toy_model(1, 2, 1, (1000,)), 1000, ())
    rules = []
    for name, values in (("lru", {}), ("fifo", {}), ("lfu", {}), ("lfu", {"counts": "always"}), ("perfect-lfu", {})):
        cache: Any = make_policy(name, setting, dict(values))
        assert cache.plan(view).eviction == cache.eviction
        rules.append(cache.eviction)
    assert rules == ["lru", "fifo", "lfu", "perfect-lfu", "perfect-lfu"]
    assert not any(issubclass(policy_class(name), policy_class("lru")) for name in ("fifo", "lfu"))
