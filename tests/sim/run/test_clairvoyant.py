"""Knowing the future: what that must give, proven, and what it gives, seen on fixed worlds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds import fewest_loads
from sim.plan import Discipline
from tests.support.strategies import make_trace
from tests.support.worlds import MS, World, handmade, made, run_of, toy_machine, toy_model, worlds


@pytest.mark.parametrize("loads", ["early", "fewest"])
@given(worlds())
@settings(max_examples=100)
def test_clairvoyant_with_room_for_all_is_never_slower_than_lru(loads: str, world: World) -> None:
    # Both copy each expert once and in the order of need, so none that is asked for beforehand comes later. What lru
    # does not pay is left out: copies that cost the layers beside them, and other costs of experts waited for.
    work = dataclasses.replace(world.work, beside_copy_ns=0, awaited_ns=None)
    everything = work.n_experts * sum(work.expert_bytes)
    beside = int(np.diff(work.offsets).max()) * max(work.expert_bytes)  # a call's room, which it leaves to a call
    world = dataclasses.replace(world, work=work, budget=everything + beside)
    lru = run_of(world, world.plan("lru")).log()
    clairvoyant = run_of(world, world.plan("clairvoyant", {"loads": loads})).log()
    assert (clairvoyant.finish <= lru.finish).all()


def toy_world(
    routes: np.ndarray, n_experts: int, slots: int, layer_ns: int, expert_ns: int, discipline: Discipline | None = None
) -> World:
    """Routes (T, L, K), 10 ns a copy."""
    _, n_layers, top_k = routes.shape
    work = handmade(
        routes.tolist(), n_experts, layer_ns=layer_ns, expert_ns=expert_ns, copy_ns=10, expert_bytes=100, chunks=3
    )
    trace, model = make_trace(routes, n_experts=n_experts), toy_model(n_layers, n_experts, top_k, (100,) * n_layers)
    return World(trace, model, toy_machine(), 1, work, slots * 100, discipline)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(0, 15),
    st.integers(0, 15),
    st.sampled_from(["fifo", "demand-first", "preemptive"]),
)
@settings(max_examples=100)
def test_clairvoyant_of_the_fewest_loads_is_never_slower_than_lru_with_one_expert_a_call(
    seed: int, slots: int, layer_ns: int, expert_ns: int, discipline: Discipline
) -> None:
    # So lru waits for the whole of each load, and clairvoyant, which has no more of them, only while the link moves.
    rng = np.random.default_rng(seed)
    routes = rng.integers(0, rng.integers(2, 7), (20, rng.integers(1, 4), 1))
    world = toy_world(routes, 6, slots, layer_ns, expert_ns, discipline)
    lru = run_of(world, world.plan("lru")).log()
    clairvoyant = run_of(world, world.plan("clairvoyant", {"loads": "fewest"})).log()
    assert clairvoyant.finish[-1] <= lru.finish[-1]


@pytest.mark.parametrize("loads", ["early", "fewest"])
def test_to_know_the_future_pays(loads: str) -> None:
    """An observation, not a law: faster than lru in each of these 100 worlds, by 17 % in all; elsewhere it may lose.

    It loses in worlds of one or two slots, of calls that run in waves, or of demands behind prefetches in a fifo line.
    """
    times = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        popularity = rng.random((3, 8)) ** 3
        routes = (popularity / rng.exponential(size=(24, 3, 8))).argsort(axis=2)[:, :, -2:]
        world = toy_world(routes, 8, int(rng.integers(4, 24)), int(rng.integers(0, 20)), int(rng.integers(0, 10)))
        plans = world.plan("lru"), world.plan("clairvoyant", {"loads": loads})
        times.append([run_of(world, plan).log().finish[-1] for plan in plans])
    lru, clairvoyant = np.array(times).T
    assert (clairvoyant < lru).mean() > 0.95
    assert clairvoyant.sum() < 0.9 * lru.sum()


def _fits(world: World) -> bool:
    """Whether no call of the world needs waves."""
    return int(np.diff(world.work.offsets).max()) * max(world.work.expert_bytes) <= world.budget


@given(worlds().filter(lambda world: _fits(world) and len(set(world.work.expert_bytes)) == 1))
@settings(max_examples=150)
def test_clairvoyant_moves_the_fewest_bytes(world: World) -> None:
    work, counters = world.work, run_of(world, world.plan("clairvoyant", {"loads": "fewest"})).log().counters
    moved = sum(counters.demand_bytes) + sum(counters.prefetch_bytes)
    assert moved == fewest_loads(work.offsets, work.expert, work.lookup_bytes, world.budget).sum()


def test_clairvoyant_hides_the_link_where_there_is_room() -> None:
    # 3 experts in turn, 2 slots, 10 ms a copy and 20 ms of compute: only the first copy is waited for.
    work = handmade([[[0]], [[1]], [[2]]] * 4, 3, expert_ns=20 * MS)
    trace = make_trace([[0], [1], [2]] * 4, n_experts=3)
    world = World(trace, toy_model(1, 3, 1, (1_000_000,)), toy_machine(), 1, work, 2_000_000)
    log = run_of(world, world.plan("clairvoyant")).log()
    assert log.finish[-1] == (10 + 12 * 20) * MS
    assert run_of(world, world.plan("lru")).log().finish[-1] == 12 * 30 * MS


def test_clairvoyant_asks_for_a_load_when_its_room_is_left() -> None:
    # One expert a call, 3 slots: three loads at once; the fourth when the first expert has been used for the last time
    # (call 0, moment 1), the fifth when the second has (call 1, moment 3). Expert 3 is kept from call 3 to call 4.
    work = handmade([[[0]], [[1]], [[2]], [[3]], [[3]], [[4]]], 5)
    trace = make_trace([[0], [1], [2], [3], [3], [4]], n_experts=5)
    world = World(trace, toy_model(1, 5, 1, (1_000_000,)), toy_machine(), 1, work, 3_000_000)
    asked = made(world.plan("clairvoyant", {"loads": "fewest"}).requests)
    assert [(moment, call) for moment, call, _ in asked] == [(0, 0), (0, 1), (0, 2), (1, 3), (3, 5), (7, 4)]


def test_clairvoyant_asks_as_far_ahead_as_slots_hold() -> None:
    # One expert a call, 3 slots: two calls ahead fit beside the one that runs, so call t is asked for when the route of
    # call t - 2 is known (call 0 and 1 at once). Asking again for an expert that is asked for already needs no room.
    work = handmade([[[0]], [[1]], [[2]], [[3]], [[3]], [[4]]], 5)
    trace = make_trace([[0], [1], [2], [3], [3], [4]], n_experts=5)
    world = World(trace, toy_model(1, 5, 1, (1_000_000,)), toy_machine(), 1, work, 3_000_000)
    asked = made(world.plan("clairvoyant").requests)
    assert [(moment, call) for moment, call, _ in asked] == [(0, 0), (0, 1), (1, 2), (3, 3), (3, 4), (5, 5)]
