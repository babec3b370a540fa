"""The parameter ``eviction`` of policies whose papers leave it open: the rule changes, and nothing else does."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.eviction import goes_by_values
from sim.plan import Plan
from sim.policies import policy_class, policy_classes
from sim.predictors.latest_values import SCALE, latest_scores
from sim.view import View
from tests.support.strategies import make_trace
from tests.support.worlds import PLANS_TAKE_LONG, World, digest, handmade, made, run_of, worlds

RULES = {
    "cache-moe": {"lru", "lfu", "perfect-lfu"},
    "promoe": {"lru", "lfu", "perfect-lfu", "score"},
    "domoe": {"lru", "lfu", "perfect-lfu", "score"},
    "fmoe": {"lru", "lfu", "perfect-lfu", "score"},
    "oracle": {"lru", "fifo", "lfu", "perfect-lfu", "score", "next-use"},
}


def test_these_policies_take_a_rule() -> None:
    taking = {name: kind for name, kind in policy_classes().items() if "eviction" in kind.takes.model_fields}
    rules = {name: set(get_args(kind.takes.model_fields["eviction"].annotation)) for name, kind in taking.items()}
    assert all(rules[name] >= RULES[name] for name in RULES)
    assert policy_class("perfect-lfu").learns is False
    assert policy_class("perfect-lfu").needs == frozenset()


@pytest.mark.parametrize("name", RULES)
@given(worlds(), st.data())
@settings(max_examples=8, suppress_health_check=PLANS_TAKE_LONG)
def test_the_rule_changes_who_leaves_and_not_what_is_asked_for(name: str, here: World, data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(sorted(RULES[name])))
    more = {"epochs": 1} if name == "promoe" else {}
    plan, usual = here.plan(name, more | {"eviction": rule}), here.plan(name, dict(more))
    assert plan.eviction == rule
    assert (plan.values is not None) == goes_by_values(rule)
    assert made(plan.requests) == made(usual.requests)
    assert _apart_from_eviction(plan) == _apart_from_eviction(usual)


def _apart_from_eviction(plan: Plan) -> tuple[object, ...]:
    cost = plan.prediction
    return (plan.per_layer, plan.discipline, plan.chunks, plan.gpu_bytes, plan.stream_prefill, cost.ns.tolist())


def test_values_are_the_latest_scores_of_a_layer_the_largest_of_its_rows() -> None:
    trace = make_trace([[[0], [1]]] * 4, n_experts=3)
    view = View(trace, handmade([[[0], [1]]] * 4, 3))
    scores = np.arange(4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)
    values = latest_scores(view, [(0, 0, scores[:, :1]), (1, 1, scores[:, 1:])])
    values.check(2, 3, 4)
    assert list(zip(values.moment.tolist(), values.layer.tolist(), strict=True)) == [
        (step * 3 + layer, layer) for step in range(4) for layer in range(2)
    ]
    np.testing.assert_array_equal(values.table[values.index], scores.reshape(8, 3) * SCALE)


@given(worlds(prefill=False))
@settings(max_examples=20)
def test_an_oracle_without_prefetch_is_its_rule_alone(here: World) -> None:
    for rule in ("lru", "lfu", "perfect-lfu", "fifo"):
        alone, plain = here.plan("oracle", {"prefetch": False, "eviction": rule}), here.plan(rule)
        assert alone.requests is None
        assert digest(run_of(here, alone).log()) == digest(run_of(here, plain).log())
