"""The link by hand: who is served first, what gives way and when, what is dropped."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.log import LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, Counters
from sim.plan import Discipline, Plan, Prediction
from sim.run.clock import Clock
from sim.run.link import Link
from sim.run.slots import ABSENT, ExpertCache
from tests.support.runs import simpy_run
from tests.support.scenes import Scene, asked
from tests.support.worlds import MS, Witness, World, arbitrary_plan, handmade, undemanding, worlds
from traces.schema import DECODE

# -- joining -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["fifo", "demand-first", "preemptive"])
def test_a_demand_joins_the_prefetch_under_way(discipline: Discipline) -> None:
    work = handmade([[[0]]], 1, layer_ns=4 * MS)
    scene = Scene(work, Plan(requests=asked((0, 0, 0)), discipline=discipline), 1)
    assert scene.of("transfer") == [(0, 10, 0, "joined", True)]
    assert scene.of("stall") == [(4, 10, 0, "late")]
    assert scene.log.found.tolist() == [LATE_IN_FLIGHT]
    assert scene.log.stall_late.tolist() == [6 * MS]
    assert scene.counters.late == [0, 1]
    assert scene.counters.prefetch_bytes == [0, 1_000_000]
    assert scene.counters.demand_bytes == [0, 0]
    assert scene.counters.wasted == [0, 0]


def test_a_demand_joins_a_prefetch_that_is_queued() -> None:
    # Experts 0 and 1 are asked for; 1 waits behind 0 when layer 0 needs it at 4 ms, and then overtakes nothing.
    work = handmade([[[1], [0]]], 2, layer_ns=[4 * MS, 0])
    plan = Plan(requests=asked((0, 1, 2), (0, 0, 1), priority=[0, 1]), discipline="demand-first")
    scene = Scene(work, plan, 4)
    assert scene.log.found.tolist() == [LATE_QUEUED, PREFETCH_HIT]
    assert scene.of("transfer") == [(0, 10, 2, "prefetch", True), (10, 20, 1, "joined", True)]
    assert scene.of("stall") == [(4, 20, 1, "late")]


# -- disciplines -----------------------------------------------------------------------------------------------------

# Layer 0 needs Y = expert 0 at 1 ms; A, B, C = experts 4, 5, 6 are asked for when the step begins, for layer 1.
CROWD = asked((0, 1, 4), (0, 1, 5), (0, 1, 6))


def crowd(discipline: Discipline, chunks: int, latency_ns: int = 0) -> Scene:
    work = handmade([[[0], [0]]], 4, layer_ns=[1 * MS, 100 * MS], latency_ns=latency_ns)
    return Scene(work, Plan(requests=CROWD, discipline=discipline, chunks=chunks), 8)


@pytest.mark.parametrize(
    ("discipline", "chunks", "ready"),
    [
        ("demand-first", 10, 20),
        ("fifo", 10, 40),
        ("preemptive", 10, 11),
        ("preemptive", 1, 20),
        ("demand-first", 1, 20),
        ("fifo", 1, 40),
    ],
)
def test_a_demand_among_three_prefetches(discipline: Discipline, chunks: int, ready: int) -> None:
    scene = crowd(discipline, chunks)
    assert scene.of("stall") == [(1, ready, 0, "demand")]
    assert [t[1] for t in scene.of("transfer") if t[2] == 0] == [ready]
    assert max(t[1] for t in scene.of("transfer")) == 40, "the link is never idle meanwhile"
    assert scene.counters.prefetch_bytes[DECODE] == 3_000_000


def test_a_prefetch_gives_way_at_the_boundary_of_its_chunk() -> None:
    third = 10 * MS // 3
    scene = crowd("preemptive", 3)
    assert scene.of("stall") == [(1, (third + 10 * MS) / MS, 0, "demand")]
    first, second, third_stretch = scene.of("transfer")[:3]
    assert first == (0, third / MS, 4, "prefetch", False)
    assert second[2:] == (0, "demand", True)
    assert third_stretch == ((third + 10 * MS) / MS, 20, 4, "prefetch", True)


def test_resuming_pays_the_latency_again() -> None:
    # 10 ms a copy of which 2 ms are latency; 8 chunks of 1 ms. Y comes at 1 ms, while A has not moved a byte: A gives
    # way when its latency is over, at 2 ms.
    scene = crowd("preemptive", 8, latency_ns=2 * MS)
    assert scene.of("transfer")[:3] == [
        (0, 2, 4, "prefetch", False),
        (2, 12, 0, "demand", True),
        (12, 22, 4, "prefetch", True),
    ]
    # And at 5 ms, after 3 chunks: 2 ms of latency and 5 of copying remain.
    work = handmade([[[0], [0]]], 4, layer_ns=[5 * MS, 100 * MS], latency_ns=2 * MS)
    scene = Scene(work, Plan(requests=CROWD, discipline="preemptive", chunks=8), 8)
    assert scene.of("transfer")[:3] == [
        (0, 5, 4, "prefetch", False),
        (5, 15, 0, "demand", True),
        (15, 22, 4, "prefetch", True),
    ]


def test_what_follows_at_once_is_spared_the_latency_where_copies_are_chained() -> None:
    # As above: the demand follows what gave way, and the rest of that follows the demand.
    work = handmade([[[0], [0]]], 4, layer_ns=[5 * MS, 100 * MS], latency_ns=2 * MS)
    scene = Scene(dataclasses.replace(work, chained=True), Plan(requests=CROWD, discipline="preemptive", chunks=8), 8)
    assert scene.of("transfer")[:3] == [
        (0, 5, 4, "prefetch", False),
        (5, 13, 0, "demand", True),
        (13, 18, 4, "prefetch", True),
    ]
    # One after the other by demand: an expert computes between two copies, and the link falls idle.
    apart = dataclasses.replace(handmade([[[e]] for e in range(5)], 5, expert_ns=1, latency_ns=2 * MS), chained=True)
    assert simpy_run(apart, Plan(keep=False), 1_000_000).log().finish[-1] == 5 * (10 * MS + 1)
    together = dataclasses.replace(handmade([[list(range(5))]], 5, latency_ns=2 * MS), chained=True)
    assert simpy_run(together, Plan(keep=False), 5_000_000).log().finish[-1] == 10 * MS + 4 * 8 * MS


@pytest.mark.parametrize("discipline", ["fifo", "demand-first", "preemptive"])
def test_small_copies_are_bound_by_latency(discipline: Discipline) -> None:
    # 1000 copies of 1 KB at 10 us latency and 25 GB/s.
    work = handmade(
        [[[e] for e in range(4)] for _ in range(250)], 4, copy_ns=10_040, latency_ns=10_000, expert_bytes=1000
    )
    log = simpy_run(work, Plan(keep=False, discipline=discipline), 4000).log()
    assert log.finish[-1] == 1000 * 10_040


# -- one instant -----------------------------------------------------------------------------------------------------


def bare_link(discipline: Discipline, slots: int = 4, chunks: int = 1) -> tuple[Link, list[tuple[int, int]]]:
    """A link alone, 10 ns a copy, one layer of 8 experts; and what lands on it, as (time, expert)."""
    env, landed = Clock(), []
    cache = ExpertCache([1], 8, [slots], [0], "lru")

    class Landings:
        def transfer(self, begin: int, end: int, expert: int, kind: str, whole: bool) -> None:
            if whole:
                landed.append((end, expert))

        def evicted(self, now: int, victims: list[int], by: int) -> None: ...

        def requested(self, now: int, expert: int, call: int, outcome: str) -> None: ...

    observer: Any = Landings()
    link = Link(
        env, cache, copy_ns=lambda _: 10, latency_ns=0, chunks=chunks, discipline=discipline, counters=Counters(),
        observer=observer,
    )  # fmt: skip
    return link, landed


@pytest.mark.parametrize("discipline", ["demand-first", "preemptive"])
@pytest.mark.parametrize("kick_between", [False, True])
@pytest.mark.parametrize("demand_first", [False, True])
def test_at_one_instant_a_demand_goes_first_whatever_came_first(
    discipline: Discipline, kick_between: bool, demand_first: bool
) -> None:
    link, landed = bare_link(discipline)
    actions = [lambda: link.request(1, 0, 0), lambda: link.demand(2)]
    for act in reversed(actions) if demand_first else actions:
        act()
        if kick_between:
            link.kick()
    link.kick()
    link.env.run()
    assert landed == [(10, 2), (20, 1)]
    assert link.idle


@pytest.mark.parametrize("demand_first", [False, True])
def test_at_one_instant_fifo_keeps_the_order_of_issue(demand_first: bool) -> None:
    link, landed = bare_link("fifo")
    actions = [lambda: link.request(1, 0, 0), lambda: link.demand(2)]
    for act in reversed(actions) if demand_first else actions:
        act()
        link.kick()
    link.env.run()
    assert landed == ([(10, 2), (20, 1)] if demand_first else [(10, 1), (20, 2)])


def test_a_landing_at_the_instant_of_a_look_up_is_a_hit() -> None:
    # Copied in 10 ms, needed after 10 ms of attention.
    scene = Scene(handmade([[[0]]], 1, layer_ns=10 * MS), Plan(requests=asked((0, 0, 0))), 1)
    assert scene.log.found.tolist() == [PREFETCH_HIT]
    assert scene.log.finish.tolist() == [10 * MS]
    assert scene.counters.useful == [0, 1]


def test_priorities_order_prefetches_and_equal_ones_keep_their_order() -> None:
    link, landed = bare_link("demand-first")
    for expert, priority in [(0, 5), (1, 3), (2, 3), (3, 1)]:
        link.request(expert, 0, priority)
    link.request(0, 0, 2)  # a better priority counts, a worse one does not
    link.request(3, 0, 9)
    link.kick()
    link.env.run()
    assert [expert for _, expert in landed] == [3, 0, 1, 2]


def test_fifo_serves_joined_prefetches_where_they_were_queued() -> None:
    # 5, 4 and 6 are asked for in that order, then 4, 5 and 7 are needed: joining changes no place in a fifo line.
    link, landed = bare_link("fifo", slots=8)
    for expert in (3, 5, 6, 4):
        link.request(expert, 0, 0)
    link.kick()
    for expert in (4, 5, 7):
        link.demand(expert)
    link.kick()
    link.env.run()
    assert [expert for _, expert in landed] == [3, 5, 6, 4, 7]


@given(worlds(), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_fifo_begins_in_the_order_of_issue(world: World, seed: int) -> None:
    plan = arbitrary_plan(np.random.default_rng(seed), world, 30)
    plan = dataclasses.replace(undemanding(plan), stream_prefill=False)
    everything = 10 * world.work.n_experts * sum(world.work.expert_bytes)  # room for all: nothing waits for a slot
    world = dataclasses.replace(world, discipline="fifo", budget=everything)
    witness = Witness(world, plan)
    witness.log()
    issued: dict[int, int] = {}
    order = []
    for number, event in enumerate(witness.events):
        if event.kind == "requested" and event.detail[2] == "issued":
            issued[event.detail[0]] = number
        elif event.kind == "transfer" and event.detail[1] != "demand":
            order.append(issued[event.detail[0]])
            assert event.detail[2] or event.end == witness.run.env.now, "nothing gives way in a fifo"
    assert order == sorted(order)


# -- dropping --------------------------------------------------------------------------------------------------------


def test_a_prefetch_that_gave_way_and_is_passed_meanwhile_is_dropped() -> None:
    # X = expert 1 is asked for layer 0 and starts at 0; layer 0 needs Y = 0 at 1.5 ms instead. X gives way at 2 ms, its
    # call has passed, so it is dropped when Y has landed: 2 of its 10 chunks moved for nothing.
    work = handmade([[[0], [2]]], 3, layer_ns=[1 * MS + MS // 2, 0])
    scene = Scene(work, Plan(requests=asked((0, 0, 1)), discipline="preemptive", chunks=10), 6)
    assert scene.of("transfer") == [
        (0, 2, 1, "prefetch", False),
        (2, 12, 0, "demand", True),
        (12, 22, 5, "demand", True),
    ]
    assert scene.counters.cancelled == [0, 1]
    assert scene.counters.wasted == scene.counters.prefetch_bytes == [0, 200_000]
    assert scene.run.cache.state[1] == ABSENT
    assert scene.run.cache.free == [4_000_000]
    times = [event[2] if event[0] in ("transfer", "stall") else event[1] for event in scene.events]
    assert times == sorted(times), "what is told never goes back in time"


def test_prefetches_for_calls_gone_by_leave_the_queue_without_moving() -> None:
    # Four are asked for layer 0; only the first has begun when layer 0 passes needing none of them.
    work = handmade([[[0], [0]]], 8, layer_ns=[1 * MS, 50 * MS])
    plan = Plan(requests=asked(*((0, 0, e) for e in (1, 2, 3, 4))), discipline="demand-first")
    scene = Scene(work, plan, 16)
    assert scene.counters.issued == [0, 4]
    assert scene.counters.cancelled == [0, 3]
    assert scene.counters.unused == [0, 1]
    assert [t[2] for t in scene.of("transfer")] == [1, 0, 8]


def test_a_queued_prefetch_gone_by_is_a_miss_when_it_is_needed_and_issued_anew_when_it_is_asked_for() -> None:
    # 1 is copied for 10 ms, 2 and 3 wait behind it for layer 0 of step 0, which passes at 1 ms needing nothing. Step 1
    # needs 2 at 2 ms, whose prefetch is no longer due; before that it asks for 3 again.
    work = handmade([[[]], [[2]], [[3]]], 4, layer_ns=MS)
    plan = Plan(requests=asked((0, 0, 1), (0, 0, 2), (0, 0, 3), (2, 2, 3)), discipline="fifo")
    scene = Scene(work, plan, 4)
    assert scene.of("requested") == [(0, 1, "issued"), (0, 2, "issued"), (0, 3, "issued"), (1, 3, "issued")]
    assert scene.counters.cancelled == [0, 2]
    assert scene.log.found.tolist() == [MISS, PREFETCH_HIT]
    assert [t[2] for t in scene.of("transfer")] == [1, 3, 2]


def test_what_is_under_way_at_the_end_has_moved_part_of_its_bytes() -> None:
    work = handmade([[[]], [[]]], 2, layer_ns=2 * MS)
    scene = Scene(work, Plan(requests=asked((0, 1, 0), (0, 1, 1))), 2)
    assert scene.log.finish[-1] == 4 * MS
    assert scene.of("transfer") == [(0, 4, 0, "prefetch", False)]
    assert scene.counters.in_flight == scene.counters.cancelled == [0, 1]
    assert scene.counters.prefetch_bytes == scene.counters.wasted == [0, 400_000]


def test_a_late_landing_for_a_layer_gone_by_is_no_hit_before_it_is_complete() -> None:
    # Asked for layer 0, where it is not needed, and under way: layer 0 of the next step needs it at 4 ms.
    work = handmade([[[0]], [[1]]], 2, layer_ns=[2 * MS])
    plan = Plan(requests=asked((0, 0, 1)), discipline="fifo")
    scene = Scene(work, plan, 2)
    assert scene.log.found.tolist() == [MISS, PREFETCH_HIT]
    scene = Scene(handmade([[[]], [[1]]], 2, layer_ns=[2 * MS]), plan, 2)
    assert scene.log.found.tolist() == [LATE_IN_FLIGHT]
    assert scene.of("stall") == [(4, 10, 1, "late")]
    assert not scene.run.link.transfers


def test_a_thousand_wrong_prefetches_leave_nothing_behind() -> None:
    # Each step needs expert 0; a wrong one of 1..4 is asked for, four at a time, a thousand in all.
    steps = 250
    work = handmade([[[0]] for _ in range(steps)], 9, layer_ns=100 * MS, copy_ns=10 * MS)
    wrong = [(2 * s, s, 1 + (4 * s + i) % 8) for s in range(steps) for i in range(4)]
    scene = Scene(work, Plan(requests=asked(*wrong)), 5)
    c = scene.counters
    assert c.issued == [0, 1000]
    assert c.in_flight == c.useful == c.late == c.cancelled == [0, 0]
    assert c.unused == [0, 1000]
    assert max(t[0] for t in scene.of("transfer")) > 100 * (steps - 1), "prefetching goes on to the end"
    assert c.wasted == c.prefetch_bytes == [0, 1000 * 1_000_000]


def test_prefetches_that_displace_hot_experts_show_as_misses_and_waste() -> None:
    # Two slots, 0 and 1 hot; 7 and 8 are asked for every step and never used.
    steps = 20
    work = handmade([[[0], [1]] for _ in range(steps)], 9, layer_ns=50 * MS)
    wrong = [(3 * s + 2, 2 * s + 2 + i, 9 * i + 7 + i) for s in range(steps - 1) for i in range(2)]
    plain = Scene(work, Plan(), 2)
    greedy = Scene(work, Plan(requests=asked(*wrong)), 2)
    assert int((plain.log.found == MISS).sum()) == 2
    assert int((greedy.log.found == MISS).sum()) == 2 * steps
    assert plain.counters.wasted == [0, 0]
    assert greedy.counters.wasted == greedy.counters.prefetch_bytes == [0, 2 * (steps - 1) * 1_000_000]


def test_requests_of_experts_that_are_there_or_coming_issue_nothing() -> None:
    work = handmade([[[0]], [[0]]], 2, layer_ns=20 * MS)
    scene = Scene(work, Plan(requests=asked((0, 0, 0), (0, 1, 0), (1, 1, 0), (2, 1, 0))), 2)
    assert [r[2] for r in scene.of("requested")] == ["issued", "queued", "resident", "resident"]
    assert scene.counters.issued == [0, 1]
    assert scene.counters.useful == [0, 1]


def test_requests_predicted_beside_the_step_come_when_the_prediction_is_done() -> None:
    work = handmade([[[0]], [[1]]], 2, layer_ns=20 * MS)
    beside = Prediction(np.array([0]), np.array([5 * MS]), critical=False)
    scene = Scene(work, Plan(requests=asked((0, 1, 1)), prediction=beside), 2)
    assert scene.of("requested") == [(5, 1, "issued")]
    assert scene.log.predict.tolist() == [0, 0]
    critical = Scene(work, Plan(requests=asked((0, 1, 1)), prediction=dataclasses.replace(beside, critical=True)), 2)
    assert critical.of("requested") == [(5, 1, "issued")]
    assert critical.log.predict.tolist() == [5 * MS, 0]
    assert critical.log.finish[0] == scene.log.finish[0] + 5 * MS
    too_long = Prediction(np.array([0]), np.array([25 * MS]), critical=False)
    late = Scene(work, Plan(requests=asked((0, 0, 1)), prediction=too_long), 2)
    assert late.of("requested") == [], "what has passed is not asked for any more"


def test_what_is_decided_before_the_demands_holds_them_up() -> None:
    # Layer 0's route is known at 20 ms. A prediction of 5 ms stands before the look-up, or beside the demand's copy.
    work = handmade([[[0], [1]]], 2, layer_ns=20 * MS)
    first = Prediction(np.array([1]), np.array([5 * MS]), before_demands=True)
    plan = Plan(requests=asked((1, 1, 3)), prediction=first)
    before = Scene(work, plan, 2)
    after = Scene(work, dataclasses.replace(plan, prediction=dataclasses.replace(first, before_demands=False)), 2)
    for scene, waits in ((before, 10), (after, 5)):
        assert scene.of("requested") == [(25, 3, "issued")]
        assert scene.log.stall_demand[0] == waits * MS
        assert scene.log.predict.tolist() == [5 * MS]
    assert before.of("transfer") == [(25, 35, 0, "demand", True), (35, 45, 3, "prefetch", True)], "at one instant"


def test_a_prefetch_lands_while_the_search_before_the_demands_runs() -> None:
    # Asked for as the step begins, behind another, expert 0 lands at 20 ms; its route is known at 15.
    work = handmade([[[0]]], 2, layer_ns=15 * MS)
    first = Prediction(np.array([1]), np.array([5 * MS]), before_demands=True)
    scene = Scene(work, Plan(requests=asked((0, 0, 1), (0, 0, 0), priority=[0, 1]), prediction=first), 2)
    assert scene.log.found.tolist() == [PREFETCH_HIT]
    assert scene.log.stall_late.tolist() == [0]


def test_of_a_moments_requests_those_for_a_call_that_has_passed_are_left_out() -> None:
    link, landed = bare_link("preemptive")
    link.passed = 3
    link.request_all([(0, 4, 1), (1, 3, 0), (2, 5, 0), (0, 6, 2)])
    assert sorted(link.transfers) == [0, 2]
    assert link.counters.issued == [2, 0]
    link.kick()
    link.env.run()
    assert [expert for _, expert in landed] == [2, 0]
