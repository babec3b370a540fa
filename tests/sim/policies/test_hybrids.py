"""Policies that leave experts to the host: what each places, splits and inserts, by properties and by brute force."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.log import HOSTED, MISS
from sim.plan import Host, Plan
from sim.predictors.popularity import counts_by_domain
from sim.run.host_costs import host_costs
from sim.workload import batched, workload
from tests.support.strategies import make_trace
from tests.support.worlds import World, run_of, toy_machine, toy_model, worlds
from traces.schema import DECODE

SHORT = settings(max_examples=25)


def host_of(plan: Plan) -> Host:
    assert plan.host is not None
    return plan.host


def roomy(world: World, slots: int) -> World:
    """The same with room for so many experts of any size."""
    return dataclasses.replace(world, budget=slots * max(world.work.expert_bytes))


def placed_in(plan: Plan, world: World) -> list[int]:
    """How many experts of each layer are placed."""
    return np.bincount(host_of(plan).reserved // world.work.n_experts, minlength=world.work.n_layers).tolist()


@given(worlds(), st.integers(1, 30), st.sampled_from(["first", "last"]))
@SHORT
def test_whole_layers_are_on_the_host_as_few_as_fit_from_one_side(world: World, slots: int, side: str) -> None:
    here = roomy(world, slots)
    each, sizes = here.work.n_experts, here.work.expert_bytes
    held = placed_in(here.plan("n-cpu-moe", {"side": side}), here)
    assert set(held) <= {0, each}
    order = held if side == "first" else held[::-1]
    assert order == sorted(order), "those of the other side are on the GPU"
    on_host = order.count(0)
    if on_host:
        larger = (sizes if side == "first" else sizes[::-1])[on_host - 1 :]
        assert each * sum(larger) + max(sizes) > here.budget, "one layer more would not fit"
        with pytest.raises(InputError, match=rf"layers is {on_host - 1}; .* expected at least {on_host}"):
            here.plan("n-cpu-moe", {"side": side, "layers": on_host - 1})
    more = placed_in(here.plan("n-cpu-moe", {"side": side, "layers": on_host + 1}), here)
    assert more.count(0) == min(on_host + 1, here.work.n_layers)


@given(worlds(), st.integers(1, 30), st.sampled_from(["n-cpu-moe", "kt"]))
@SHORT
def test_nothing_but_what_is_placed_moves_while_tokens_are_decoded(world: World, slots: int, name: str) -> None:
    here = roomy(world, slots)
    plan = here.plan(name, {"stream_from": 2**20})
    log, work = run_of(here, plan).log(), here.work
    assert sum(log.counters.demand_bytes) <= work.lookup_bytes[np.isin(work.expert, host_of(plan).reserved)].sum()
    elsewhere = ~np.isin(work.expert, host_of(plan).reserved)
    assert (log.found[elsewhere] == HOSTED).all()


@given(worlds(), st.integers(1, 30))
@SHORT
def test_placements_of_kt(world: World, slots: int) -> None:
    here = roomy(world, slots)
    total = here.work.n_layers * here.work.n_experts
    uniform = placed_in(here.plan("kt"), here)
    assert len(set(uniform)) == 1, "as many in every layer"
    front = host_of(here.plan("kt", {"place": "front-loading"})).reserved
    assert front.tolist() == list(range(len(front))), "whole layers from the first on"
    frequent = host_of(here.plan("kt", {"place": "frequency"})).reserved
    counts = np.sum([np.zeros(total, np.int64), *counts_by_domain((here.trace,)).values()], axis=0)
    others = np.setdiff1d(np.arange(total), frequent)
    assert not len(frequent) or not len(others) or counts[frequent].min() >= counts[others].max()


@given(worlds(), st.integers(1, 12), st.floats(0.01, 50), st.floats(0.1, 1))
@SHORT
def test_freetoken_splits_a_calls_misses_so_that_the_later_of_both_ends_first(
    world: World, slots: int, gbps: float, part: float
) -> None:
    here = roomy(world, slots)
    host = host_of(here.plan("freetoken", {"host_gbps": gbps, "shared_gbps": gbps * part}))
    copies = [here.hardware.copy_ns(size) for size in here.model.expert_bytes]
    assert host.copied is not None
    for layer, copy in enumerate(copies):
        alone, shared = (
            int(host.fixed_ns[layer] + max(read[layer], host.row_ns[layer])) for read in (host.read_ns, host.shared_ns)
        )
        for missing, copied in enumerate(host.copied[layer].tolist()):
            ends = [max(n * copy, (missing - n) * (shared if n else alone)) for n in range(missing + 1)]
            assert ends[copied] == min(ends)


@given(worlds(), st.integers(1, 12), st.integers(0, 3), st.sampled_from(["all", "layer"]))
@SHORT
def test_lru_host_inserts_no_more_than_its_cap_in_a_step(world: World, slots: int, cap: int, scope: str) -> None:
    here = roomy(world, slots if scope == "all" else slots * world.work.n_layers)
    plan = here.plan("lru-host", {"cap": cap, "scope": scope, "stream_from": 2**20})
    log = run_of(here, plan).log()
    assert sum(log.counters.issued) <= cap * here.work.schedule.n_steps
    assert sum(log.counters.demand_bytes) == 0, "misses run on the host at once"
    if not cap:
        assert (log.found == HOSTED).all()


@given(worlds(), st.integers(1, 12), st.sampled_from(["n-cpu-moe", "lru-host", "kt", "freetoken"]), st.integers(1, 4))
@SHORT
def test_steps_of_so_many_rows_run_nothing_on_the_host(world: World, slots: int, name: str, rows: int) -> None:
    here = roomy(world, slots * world.work.n_layers)
    log, work = run_of(here, here.plan(name, {"stream_from": rows})).log(), here.work
    large = (np.diff(work.schedule.offsets) >= rows)[work.call // work.n_layers]
    assert not (log.found[large] == HOSTED).any()


@given(worlds(), st.integers(1, 12), st.sampled_from(["fiddler", "n-cpu-moe", "lru-host", "kt", "freetoken"]))
@SHORT
def test_copies_never_make_the_host_faster(world: World, slots: int, name: str) -> None:
    here = roomy(world, slots * world.work.n_layers)
    costs = host_costs(here.work, host_of(here.plan(name)))
    assert (costs.shared >= costs.alone).all() and (costs.alone > 0).all()


@given(worlds())
@settings(max_examples=15)
def test_misses_of_lru_in_each_layer_fall_with_slots(world: World) -> None:
    # Where a call runs in waves this is no law: which of them ran last decides who is still there.
    work = world.work
    counts = []
    for slots in range(int(np.diff(work.offsets).max()), work.n_experts + 1):
        here = roomy(world, slots * work.n_layers)
        missed = run_of(here, here.plan("lru", {"scope": "layer"})).log().found >= MISS
        counts.append(np.bincount(work.expert // work.n_experts, missed, minlength=work.n_layers))
    assert (np.diff(counts, axis=0) <= 0).all()


def test_kt_keeps_what_each_prompt_used_most() -> None:
    prompt, decode = [[0], [3], [3], [0], [1]], [[3], [0], [1], [2]]
    again, then = [[1], [2], [2], [1], [3]], [[1], [2], [0]]
    routes = np.array([*prompt, *decode, *again, *then])[:, None]
    phase = [0] * 5 + [1] * 4 + [0] * 5 + [1] * 3
    trace = make_trace(routes, n_experts=4, sequence=[0] * 9 + [1] * 8, phase=phase)
    model, machine = toy_model(1, 4, 1, (1_000,)), toy_machine()
    work = workload(trace, model, machine, batched(trace, 1))
    world = World(
        trace, model, machine, 1, work, 3_000
    )  # room for two and a copied one, here the last that a prompt used
    log = run_of(world, world.plan("kt", {"dynamic": True, "stream_from": 2})).log()
    found = log.found[work.lookup_phase == DECODE].tolist()
    assert [one == HOSTED for one in found] == [False, False, False, True, False, False, True]
    never = run_of(world, world.plan("kt", {"dynamic": True, "stream_from": 6})).log()
    assert [one == HOSTED for one in never.found[work.lookup_phase == DECODE].tolist()] == [
        True, False, False, True, False, True, False,
    ], "no prompt is that long: the first two stay"  # fmt: skip
