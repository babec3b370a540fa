"""The learning policies beside DoMoE, all alike: what is profiled reaches the plan, engines agree, lacks are named."""

import dataclasses

import numpy as np
import pytest

from ground.errors import InputError
from sim.plan import Plan
from sim.policies import policy_class
from sim.run.prepared import prepare
from sim.run.scene import Scene, scene
from sim.workload import batched, workload
from tests.support.places import REPOSITORY
from tests.support.runs import compiled_log, simpy_run
from tests.support.worlds import digest
from traces.trace import Trace

LAW = REPOSITORY / "traces" / "mixtral_law.npz"
RIVALS = ["finemoe", "fmoe", "moe-infinity", "promoe"]
QUICK: dict[str, dict[str, object]] = {"promoe": {"epochs": 1}}


@pytest.fixture(scope="module")
def law() -> Scene:
    """Four sequences of the law trace, and twenty of its profile split."""
    here = scene(LAW, learns=False)
    first = here.trace.keep(np.arange(here.trace.n_sequences) < 4)
    profile = Trace.load(LAW).select("profile")
    few = profile.keep(np.arange(profile.n_sequences) < 20)
    work = workload(first, here.model, here.hardware, batched(first, 2))
    # Without a digest of its content a profile is learned from anew each time.
    return dataclasses.replace(here, trace=first, work=work, profile=(dataclasses.replace(few, sha256=""),))


def planned(law: Scene, name: str) -> Plan:
    return prepare(law, name, QUICK.get(name)).plan


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_profiled_reaches_the_plan(law: Scene, name: str) -> None:
    one = planned(law, name)
    (profile,) = law.profile
    other_routes = ((profile.experts.astype(int) + 1) % profile.n_experts).astype(np.int16)
    assert profile.probs is not None
    other = dataclasses.replace(profile, experts=other_routes, probs=np.roll(profile.probs, 1, axis=2), sha256="")
    again = planned(dataclasses.replace(law, profile=(other,)), name)
    assert one.requests is not None and again.requests is not None
    assert len(one.requests.call) > len(law.work.schedule.rows)
    assert one.requests.expert.tolist() != again.requests.expert.tolist()


@pytest.mark.parametrize("name", RIVALS)
def test_both_engines_give_the_same_integers_on_real_routes(law: Scene, name: str) -> None:
    pytest.importorskip("numba", reason="the compiled engine needs numba")
    plan = planned(law, name)
    reference = simpy_run(law.work, plan, law.budget).log()
    assert digest(compiled_log(law.work, plan, law.budget)) == digest(reference)
    assert reference.counters.issued[1] > 0


@pytest.mark.parametrize("name", RIVALS)
def test_a_profile_that_lacks_what_is_learned_from_is_refused_in_one_line(law: Scene, name: str) -> None:
    nothing = dict.fromkeys(("embeddings", "prefill_embeddings", "embedding_scale", "probs"))
    lean = dataclasses.replace(law.profile[0], sha256="", **nothing)
    if not policy_class(name).needs:
        assert planned(dataclasses.replace(law, profile=(lean,)), name).requests is not None
        return
    with pytest.raises(InputError) as refused:
        planned(dataclasses.replace(law, profile=(lean,)), name)
    assert "\n" not in str(refused.value)
    assert "profile" in str(refused.value)
