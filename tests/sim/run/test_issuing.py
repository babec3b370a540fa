"""What a plan lets the requests of a moment issue: the first absent experts, or nothing while the link moves."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.plan import Plan, Prediction
from tests.support.runs import simpy_run
from tests.support.scenes import Scene, asked
from tests.support.worlds import MS, World, arbitrary_plan, handmade, undemanding, worlds


def test_of_a_moments_requests_the_first_absent_ones_are_issued_as_many_as_the_plan_lets() -> None:
    # Expert 0 is there from step 0 on; of the others that step 1 is told to fetch only one or two are.
    work = handmade([[[0], [0]], [[0], [1]], [[0], [2]]], 4, layer_ns=20 * MS)
    wishes = asked((3, 2, 0), (3, 3, 5), (3, 3, 5), (3, 3, 6), (3, 3, 7), priority=[0, 1, 2, 3, 4])
    for most, issued in ((1, [5]), (2, [5, 6]), (0, [5, 6, 7])):
        scene = Scene(work, Plan(requests=wishes, most_issued=most), 8)
        assert [expert for _, expert, outcome in scene.of("requested") if outcome == "issued"] == issued
        assert [e for _, e, outcome in scene.of("requested") if outcome != "issued"] == [0, 5], "those cost nothing"
        assert scene.counters.issued == [0, len(issued)]


def test_where_a_plan_prefetches_on_an_idle_link_only_nothing_is_issued_while_it_moves() -> None:
    # Layer 0's demand is under way from 20 to 30 ms when the request is made, or, 15 ms later, is not.
    work = handmade([[[0], [1], [2]]], 3, layer_ns=20 * MS)
    for wait, issued in ((0, []), (15, [(35, 7, "issued")])):
        beside = Prediction(np.array([1]), np.array([wait * MS]), critical=False)
        plan = Plan(requests=asked((1, 2, 7)), prediction=beside, only_idle=True)
        scene = Scene(work, plan, 8)
        assert scene.of("requested") == issued
        assert scene.counters.issued == [0, len(issued)]


@given(worlds(), st.integers(0, 2**32 - 1), st.integers(0, 2), st.booleans())
@settings(max_examples=40)
def test_no_moment_issues_more_than_the_plan_lets(world: World, seed: int, most: int, only_idle: bool) -> None:
    plan = undemanding(arbitrary_plan(np.random.default_rng(seed), world, 30))
    run = simpy_run(world.work, dataclasses.replace(plan, most_issued=most, only_idle=only_idle), world.budget)
    make, counted = run.link.request_moment, run.counters

    def watched(requests: Any) -> None:
        moving, before = run.link.moving, sum(counted.issued)
        make(requests)
        issued = sum(counted.issued) - before
        assert issued <= (0 if only_idle and moving else most or len(requests))

    run.link.request_moment = watched  # type: ignore[method-assign]
    run.log()
