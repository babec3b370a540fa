"""LRU by visits of the own layer: worths are in the order of a plain count of visits, then of calls to come."""

import numpy as np
from hypothesis import given

from sim.policies import make_policy
from sim.scorer import Scoring
from tests.support.worlds import World, worlds


@given(worlds())
def test_whoever_was_used_fewer_visits_ago_is_worth_more_and_of_equals_whose_layer_comes_sooner(world: World) -> None:
    work = world.work
    policy = make_policy("layer-lru", world.setting)
    plan = policy.plan(policy.view(world.trace, work))
    assert plan.scorer is not None
    scoring = Scoring(plan.scorer, work.n_layers * work.n_experts)
    used: dict[int, int] = {}
    for call in range(work.n_calls):
        used |= dict.fromkeys(work.expert[work.offsets[call] : work.offsets[call + 1]].tolist(), call)
        scoring.announce(call, 0)
        scoring.refresh(0)
        seen = [expert for expert in range(len(scoring.values)) if expert in used]
        keys = []
        for expert in seen:
            layer = expert // work.n_experts
            visits = sum(one % work.n_layers == layer for one in range(used[expert] + 1, call + 1))
            to_come = next(ahead for ahead in range(1, work.n_layers + 1) if (call + ahead) % work.n_layers == layer)
            keys.append((-visits, -to_come))
        worths = scoring.values[seen].tolist()
        assert sorted(range(len(seen)), key=keys.__getitem__) == sorted(range(len(seen)), key=worths.__getitem__)
        assert np.unique(worths).size == len(set(keys))
