"""Evicted experts that cross the link to the host, and calls that wait for all that was asked for them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from sim.plan import Plan
from tests.support.scenes import Scene, asked
from tests.support.worlds import MS, PLANS_TAKE_LONG, World, handmade, planned, run_of


def test_whoever_is_evicted_is_copied_to_the_host_first() -> None:
    work = handmade([[[0]], [[1]], [[2]]], 3)  # 10 ms a copy
    scene = Scene(work, Plan(write_back=True), slots=1)
    assert (scene.log.finish / MS).tolist() == [10, 30, 50]
    assert scene.counters.written_back == [0, 2_000_000]
    assert scene.counters.demand_bytes == [0, 3_000_000]
    assert (Scene(work, Plan(), slots=1).log.finish / MS).tolist() == [10, 20, 30]


def test_a_demand_waits_for_a_copy_to_the_host_that_has_begun() -> None:
    # Step 1 begins at 30: a prefetch of 6 sends 0 to the host, which is needed at 35.
    work = handmade([[[0], [1]], [[0], [3]]], 4, layer_ns=5 * MS)
    plan = Plan(write_back=True, eviction="fifo", requests=asked((3, 3, 6)))
    scene = Scene(work, plan, slots=2)
    assert scene.of("transfer")[2:] == [
        (50, 60, 0, "demand", True),
        (60, 70, 6, "prefetch", True),
        (80, 90, 7, "demand", True),
    ]
    assert scene.of("back") == [(30, 40, 0), (40, 50, 5), (70, 80, 6)]
    assert scene.counters.written_back == [0, 3_000_000]


@given(planned())
@settings(max_examples=60, suppress_health_check=PLANS_TAKE_LONG)
def test_as_many_bytes_go_to_the_host_as_are_evicted(case: tuple[World, str, Plan]) -> None:
    world, _, plan = case
    size = 1000
    work = dataclasses.replace(world.work, expert_bytes=(size,) * world.work.n_layers)
    world = dataclasses.replace(world, work=work, budget=size * max(1, world.budget // size // 7))
    plan = dataclasses.replace(plan, write_back=True, gpu_bytes=0, least_bytes=0, host=None, per_layer=False)
    counters = run_of(world, plan).log().counters
    lost = counters.cancelled[0] + counters.cancelled[1] + counters.in_flight[0] + counters.in_flight[1]
    evicted, written = sum(counters.evictions), sum(counters.written_back)
    # A prefetch that is given up, or still waits to begin, before its victim was copied, has none copied.
    assert evicted * size - lost * size <= written <= evicted * size


def test_a_call_that_insists_waits_for_what_it_does_not_need() -> None:
    work = handmade([[[0], [0]]], 3, layer_ns=5 * MS)
    asks = asked((0, 1, 3), (0, 1, 4), (0, 1, 5))  # all three of layer 1, as the step begins; it needs the first
    patient = Scene(work, Plan(insist=True, requests=asks), slots=6)
    # 0 is demanded at 5, behind it come 3 (5 ms done), 4 and 5.
    assert (patient.log.finish / MS).tolist() == [40]
    hasty = Scene(work, Plan(requests=asks), slots=6)
    assert hasty.log.finish[-1] < patient.log.finish[-1]
    assert patient.log.stall_late.sum() > hasty.log.stall_late.sum()


@pytest.mark.parametrize("field", ["insist", "write_back"])
def test_what_nobody_asks_for_changes_nothing(field: str) -> None:
    work = handmade([[[0], [1]], [[1], [0]]], 2)
    plain, other = (Scene(work, plan, slots=4) for plan in (Plan(), Plan(**{field: True})))
    np.testing.assert_array_equal(plain.log.finish, other.log.finish)
