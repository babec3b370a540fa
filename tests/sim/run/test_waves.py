"""Slots by hand: which are never taken, and calls that need more than there are."""

from collections.abc import Iterator

import pytest

from sim.eviction import LRU
from sim.log import LATE_QUEUED, MISS, PREFETCH_HIT
from sim.plan import Plan
from sim.run.simpy_engine import SimulationError
from sim.run.slots import LOADING, RESIDENT, ExpertCache
from tests.support.runs import simpy_run
from tests.support.scenes import Scene, asked
from tests.support.worlds import MS, handmade


def test_pinned_and_loading_slots_are_never_given_away() -> None:
    cache = ExpertCache([1], 4, [2], [0])
    assert cache.allot(0, 0, demand=True) == []
    assert cache.allot(1, 0, demand=True) == []
    assert cache.state[0] == cache.state[1] == LOADING
    assert cache.allot(2, 0, demand=True) is None, "both load"
    for expert in (0, 1):
        cache.landed(expert)
        cache.pinned[expert] = 1
    assert cache.state[0] == RESIDENT
    assert cache.allot(2, 0, demand=True) is None, "both are pinned"
    cache.pinned[1] = 0
    assert cache.allot(2, 0, demand=True) == [1]
    assert cache.state[0] == RESIDENT


def test_wanted_experts_go_only_for_a_demand_and_last() -> None:
    cache = ExpertCache([1], 4, [2], [0])
    for expert in (0, 1):
        cache.allot(expert, 0, demand=True)
        cache.landed(expert)
        cache.needed(expert)
    cache.requested(0, 5)
    assert cache.allot(2, 4, demand=False) == [1]
    cache.landed(2)
    cache.requested(2, 5)
    assert cache.allot(3, 4, demand=False) is None
    assert cache.allot(3, 4, demand=True) == [0]
    assert cache.allot(1, 5, demand=False) is not None, "once the call has passed it is like any other"


def test_a_call_larger_than_its_slots_runs_in_waves_residents_first() -> None:
    # Two slots; step 0 brings 0 and 1, step 1 needs 0, 1, 2 and 3: the first two at once, then 2 and 3 in their slots.
    scene = Scene(handmade([[[0, 1]], [[0, 1, 2, 3]]], 4, expert_ns=MS), Plan(), 2)
    assert [t[:3] for t in scene.of("transfer")] == [(0, 10, 0), (10, 20, 1), (23, 33, 2), (33, 43, 3)]
    assert scene.log.finish.tolist() == [21 * MS, 44 * MS]


def test_what_is_queued_comes_in_a_wave_before_what_is_absent() -> None:
    # Two slots; 2 is queued behind 4 (of layer 1) when layer 0 needs 0, 1 and 2. In the first wave it is copied once;
    # left for the second, it would be evicted by the first and copied again.
    work = handmade([[[0, 1, 2], []]], 3, layer_ns=[1 * MS, 0])
    plan = Plan(requests=asked((0, 1, 4), (0, 0, 2), priority=[0, 1]), discipline="demand-first")
    scene = Scene(work, plan, 2)
    assert [t[2] for t in scene.of("transfer")].count(2) == 1
    assert scene.log.found.tolist() == [MISS, MISS, LATE_QUEUED]


def test_a_request_for_what_a_later_wave_will_demand_is_met_by_that_demand() -> None:
    # One slot; layer 0 needs 0, then 1. When its route is known the policy asks for 1 again, for the next step.
    work = handmade([[[0, 1]], [[1]]], 2)
    scene = Scene(work, Plan(requests=asked((1, 1, 1))), 1)
    assert scene.of("requested") == [(0, 1, "queued")]
    assert [t[2:4] for t in scene.of("transfer")] == [(0, "demand"), (1, "demand")]
    assert scene.counters.issued == [0, 0]


def test_what_waves_have_demanded_may_be_prefetched_afterwards() -> None:
    # One slot; 1 comes in layer 0's second wave, then 0 again takes its slot: asking for 1 now issues a copy.
    work = handmade([[[0, 1]], [[0]], [[1]]], 2, layer_ns=20 * MS)
    scene = Scene(work, Plan(requests=asked((3, 2, 1))), 1)
    assert scene.of("requested") == [(60, 1, "issued")]
    assert scene.log.found.tolist() == [MISS, MISS, MISS, PREFETCH_HIT]


class Unwilling(LRU):
    """A broken rule: nobody may ever leave."""

    def candidates(self) -> Iterator[int]:
        return iter(())


def test_a_deadlock_is_an_error_that_names_what_is_waited_for() -> None:
    run = simpy_run(handmade([[[0]], [[1]]], 2), Plan(eviction=Unwilling), 1_000_000)
    with pytest.raises(SimulationError, match=r"deadlock at 10000000 ns.*\[1\]"):
        run.log()


def test_two_tokens_that_need_two_slots_each_do_not_wait_for_each_other() -> None:
    # A batch needs 0, 1, 2, 3 with two slots: waves, not a deadlock; and all slots are free to evict afterwards.
    scene = Scene(handmade([[[0, 1, 2, 3]], [[0, 1]]], 4), Plan(), 2)
    assert len(scene.log.finish) == 2
    assert not any(scene.run.cache.pinned)
    assert len(scene.of("transfer")) == 6
