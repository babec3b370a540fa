"""Eviction that knows the path: both engines, machine code and Python agree, nobody peeks, and a planted path pays."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.policies import make_policy
from sim.predictors.pathwise.run import run_of
from sim.run.blindness import check_blind
from sim.run.prepared import prepare
from sim.run.scene import scene
from sim.scorer import Scoring
from tests.support.places import REPOSITORY
from tests.support.runs import compiled_log, simpy_run
from tests.support.worlds import World, worlds
from traces.paths.model import PathModel
from traces.paths.state import untrained

WAYS = [{"start": "nothing"}, {}, {"scope": "layer"}, {"online": False}, {"start": "nothing", "beside": True}]


@settings(max_examples=12, deadline=None)
@given(world=worlds(), way=st.sampled_from(WAYS))
def test_it_does_not_peek_and_both_engines_agree(world: World, way: dict[str, object]) -> None:
    assume(world.work.n_experts <= 9)
    made = make_policy("pathwise", world.setting, way)
    plan = made.plan(made.view(world.trace, world.work))
    check_blind(made, world.trace, world.work, plan)
    if world.fits(plan):
        reference = simpy_run(world.work, plan, world.budget).log()
        compiled = compiled_log(world.work, plan, world.budget)
        np.testing.assert_array_equal(reference.finish, compiled.finish)
        np.testing.assert_array_equal(reference.found, compiled.found)


@settings(max_examples=8, deadline=None)
@given(world=worlds())
def test_machine_code_and_python_give_the_same_worths(world: World) -> None:
    pytest.importorskip("numba")
    assume(world.work.n_experts <= 9)
    plan = world.plan("pathwise")
    assert plan.scorer is not None
    compiled, plain = (Scoring(plan.scorer, world.work.n_layers * world.work.n_experts) for _ in range(2))
    plain.code = None
    for call in range(world.work.n_calls):
        for one in (compiled, plain):
            one.announce(call, 0)
            one.refresh(int(plan.scorer.ns.sum()))
        np.testing.assert_array_equal(compiled.values, plain.values)


@settings(max_examples=30, deadline=None)
@given(world=worlds())
def test_sequences_that_run_at_once_have_places_of_their_own(world: World) -> None:
    view = make_policy("pathwise", world.setting).view(world.trace, world.work)
    run = run_of(view)
    for step in range(view.n_steps):
        rows = slice(run.starts[step], run.starts[step + 1])
        pairs = set(zip(run.slot[rows].tolist(), view.sequence[rows].tolist(), strict=True))
        assert len(pairs) == len({slot for slot, _ in pairs}) == len({sequence for _, sequence in pairs})
        assert run.active[step][run.slot[rows]].all()
    for sequence in np.unique(view.sequence).tolist():
        rows = np.flatnonzero(view.sequence == sequence)
        assert run.place[rows].tolist() == list(range(len(rows)))
        assert len(set(run.slot[rows].tolist())) == 1


def test_a_file_that_was_learned_elsewhere_is_refused_in_a_line(tmp_path: Path) -> None:
    here = scene(REPOSITORY / "traces" / "mixtral_law.npz", learns=False)
    path = tmp_path / "m.safetensors"
    PathModel.of(untrained(2, 3, 1), {}).save(path)
    with pytest.raises(InputError, match=r"m.safetensors: was learned from 2 x 3 experts; the trace has 32 x 8"):
        prepare(here, "pathwise", {"model": str(path)})
