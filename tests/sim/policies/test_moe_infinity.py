"""MoE-Infinity as its published code does it: what it queues, evicts and waits for, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings

from ground.errors import InputError
from sim.policies import make_policy
from sim.policies.moe_infinity import SCALE_OF_COUNTS, UNSEEN
from sim.predictors.activations import ActivationMatrices
from sim.view import View
from tests.support.worlds import World, worlds
from traces.schema import DECODE


@given(worlds())
@settings(max_examples=30)
def test_every_expert_of_every_later_layer_is_queued_by_count_times_proximity(world: World) -> None:
    schedule, n_layers, n_experts = world.work.schedule, world.work.n_layers, world.work.n_experts
    predictor = ActivationMatrices(world.setting.profile, 120, "request", world.setting.seed)
    matches = predictor.matches(View(world.trace, world.work), n_layers - 1)
    asked = world.plan("moe-infinity", {"code": True, "most": 0}).requests
    assert asked is not None
    moment = np.repeat(asked.moment, np.diff(asked.offsets)).tolist()
    made = list(zip(moment, asked.expert.tolist(), asked.priority.tolist(), strict=True))
    expected, row = [], 0
    for step in np.flatnonzero(schedule.phase == DECODE).tolist():
        count = int(np.diff(schedule.offsets)[step])
        for point in range(1, n_layers):
            found = [m for m in matches[row : row + count, point].tolist() if m >= 0]
            if not found:
                continue
            taken = sum(predictor.collection[m] for m in found).reshape(n_layers, n_experts)
            queue = []
            for layer in range(point, n_layers):
                proximity = 1 - (layer - (point - 1)) / (n_layers + 1)
                for expert in range(n_experts):
                    weight = int((taken[layer, expert] + UNSEEN) * proximity * SCALE_OF_COUNTS)
                    queue.append((-weight, layer * n_experts + expert))
            expected += [(step * (n_layers + 1) + point, expert, weight) for weight, expert in sorted(queue)]
        row += count
    assert made == expected


@given(worlds())
@settings(max_examples=10)
def test_the_code_is_a_link_that_never_stops_a_copy_another_eviction_and_an_early_search(world: World) -> None:
    paper, code = (world.plan("moe-infinity", {"code": code}) for code in (False, True))
    assert (paper.discipline, paper.eviction, paper.prediction.before_demands) == ("preemptive", "score", False)
    assert (code.discipline, code.eviction, code.prediction.before_demands) == ("demand-first", "lfu-mfu", True)
    assert code.values is None
    assert code.prediction.ns.tolist() == paper.prediction.ns.tolist()
    later = world.plan("moe-infinity", {"code": True, "search": "after"})
    assert not later.prediction.before_demands


@pytest.mark.parametrize("policy", ["domoe", "fmoe", "finemoe", "moe-infinity", "promoe"])
def test_whoever_searches_in_a_step_can_search_before_the_demands(policy: str) -> None:
    with pytest.raises(InputError, match="parameter search = 'first'; expected"):
        make_policy(policy, None, {"search": "first"})  # type: ignore[arg-type]


def test_code_is_true_or_false() -> None:
    with pytest.raises(InputError, match="parameter code = 1; expected"):
        make_policy("moe-infinity", None, {"code": 1})  # type: ignore[arg-type]
