"""Scorers: when worths come into force, what plans are refused, who leaves, and that both ways of calling agree."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.plan import Plan
from sim.plan_checks import PlanError
from sim.scorer import Scorer, Scoring
from tests.support.runs import compiled_log, simpy_run
from tests.support.scorers import decayed
from tests.support.worlds import handmade

CALLS = [[[0, 1], [0]], [[2, 3], [0]], [[0, 1], [1]], [[2], [1]], [[0, 3], [0]]]
routes = st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=2, max_size=2),
                  min_size=1, max_size=6)  # fmt: skip


def scorer(calls: list[Any], ns: int = 0, beside: bool = False) -> Scorer:
    return decayed(handmade(calls, 4), ns, beside)


@given(routes)
def test_machine_code_and_python_give_the_same_worths(calls: list[Any]) -> None:
    pytest.importorskip("numba")
    compiled, plain = (Scoring(scorer(calls), 8) for _ in range(2))
    assert compiled.code is not None
    plain.code = None
    for call in range(2 * len(calls)):
        for one in (compiled, plain):
            one.announce(call, 0)
            assert one.refresh(0)
        np.testing.assert_array_equal(compiled.values, plain.values)


@given(routes, st.data())
def test_worths_rest_on_no_later_route(calls: list[Any], data: st.DataObject) -> None:
    known = data.draw(st.integers(0, len(calls)))
    changed = calls[:known] + data.draw(st.lists(st.just([[3], [3]]), min_size=len(calls) - known,
                                                 max_size=len(calls) - known))  # fmt: skip
    both = [Scoring(scorer(one), 8) for one in (calls, changed)]
    for one in both:
        for call in range(2 * known):
            one.announce(call, 0)
        one.refresh(0)
    np.testing.assert_array_equal(both[0].values, both[1].values)


def test_beside_the_step_a_calls_worths_hold_once_its_time_has_passed() -> None:
    one = Scoring(scorer(CALLS, ns=10, beside=True), 8)
    one.announce(0, 100)
    one.announce(1, 105)  # it waits for the first
    assert [one.refresh(now) for now in (109, 110, 119, 120, 121)] == [False, True, False, True, False]


def test_a_step_waits_for_a_scorer_that_is_not_beside_it() -> None:
    work = handmade(CALLS, 4, expert_bytes=10)
    waits, beside = (Plan(eviction="scored", scorer=decayed(work, 7, aside)) for aside in (False, True))
    for log_of in (lambda plan: simpy_run(work, plan, 40).log(), lambda plan: compiled_log(work, plan, 40)):
        assert log_of(waits).predict.tolist() == [14] * len(CALLS)
        assert log_of(beside).predict.tolist() == [0] * len(CALLS)


def test_whoever_is_worth_least_leaves_by_the_worths_of_the_call_that_needs_the_slot() -> None:
    """Layer 0 takes 0, 1, then 2: of the two in slots 1 was used last, and 0 is worth less since it was used before."""
    work = handmade([[[0]], [[0]], [[1]], [[2]], [[0]], [[1]]], 3, expert_bytes=10)
    log = simpy_run(work, Plan(eviction="scored", scorer=decayed(work)), 20).log()
    by_recency = simpy_run(work, Plan(eviction="lru"), 20).log()
    assert by_recency.found.tolist() != log.found.tolist()
    assert log.found[4] == 0  # 0 has been used twice, 1 once: 1 has left


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ns": np.zeros(3, np.int64)}, "scorer.ns"),
        ({"ns": np.full(10, -1)}, "scorer.ns"),
        ({"state": (np.zeros(2),)}, "scorer.state"),
        ({"beside": 2}, "scorer.beside"),
        ({"observe": None}, "expected functions"),
    ],
)
def test_scorers_that_cannot_run_are_refused(change: dict[str, Any], said: str) -> None:
    wrong = dataclasses.replace(scorer(CALLS), **change)
    with pytest.raises(PlanError, match=said):
        Plan(eviction="scored", scorer=wrong).check(2, 4, len(CALLS))


@pytest.mark.parametrize("plan", [Plan(eviction="scored"), Plan(eviction="lru", scorer=scorer(CALLS))])
def test_a_scorer_and_its_rule_go_together(plan: Plan) -> None:
    with pytest.raises(PlanError, match="scored"):
        plan.check(2, 4, len(CALLS))
