"""Plans: whole-trace ones equal those made step by step, and those that take long are made once and kept on disk."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.eviction import LRU
from sim.plan import Plan, Requests
from sim.policies import Policy, Setting, base, make_policy, policy_class
from sim.run.kept_plans import declared, kept_or_made
from sim.run.prepared import prepare
from sim.run.scene import scene
from sim.view import View
from sim.workload import Schedule, batched, workload
from tests.sim.run.test_cache import BUNDLED
from tests.support.strategies import traces
from tests.support.worlds import CHOICES, POLICIES, World, arbitrary_plan, worlds
from traces.trace import Trace

SYSTEMS = [name for name in POLICIES if not policy_class(name).clairvoyant]


# -- step by step ----------------------------------------------------------------------------------------------------


def decided(plan: Plan, n_layers: int, n_slots: int, last: int) -> dict[str, Any]:
    """What ``plan`` decides up to the end of step ``last``, to compare two."""
    until = (last + 1) * (n_layers + 1)
    seen: dict[str, Any] = {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if field.name not in ("requests", "values", "shares", "prediction", "host", "note", "scorer")
    }
    if plan.scorer is not None:
        calls = (last + 1) * n_layers
        seen["scorer"] = plan.scorer.after(calls, n_slots).tolist(), plan.scorer.ns[:calls].tolist(), plan.scorer.beside
    if plan.host is not None:
        seen["host"] = [np.asarray(part).tolist() for part in vars(plan.host).values()]
    if (r := plan.requests) is not None:
        moment = np.repeat(r.moment, np.diff(r.offsets))
        mine = moment < until
        # Beyond the last step, the call that a request is for says only when it will be withdrawn.
        call = np.minimum(r.call, last * n_layers + r.call % n_layers)
        seen["requests"] = np.stack([moment, call, r.expert, r.priority])[:, mine].tolist()
    if plan.shares is not None:
        mine = plan.shares.moment < until
        seen["shares"] = plan.shares.moment[mine].tolist(), plan.shares.table[mine].tolist()
    if (v := plan.values) is not None:
        mine = v.moment < until
        seen["values"] = v.moment[mine].tolist(), v.table[v.index[mine]].tolist()
        seen["layers"] = v.layer[mine].tolist() if v.by_layer else []
    mine = plan.prediction.moment < until
    seen["prediction"] = plan.prediction.moment[mine].tolist(), plan.prediction.ns[mine].tolist()
    return seen


@given(world=worlds(), data=st.data())
@settings(max_examples=60)
def test_the_plan_of_a_whole_trace_is_the_one_made_step_by_step(world: World, data: st.DataObject) -> None:
    work, schedule = world.work, world.work.schedule
    last = data.draw(st.integers(0, schedule.n_steps - 1))
    rows = schedule.offsets[last + 1]
    cut = Schedule(schedule.phase[: last + 1], schedule.offsets[: last + 2], schedule.rows[:rows])
    for name in SYSTEMS:
        policy = make_policy(name, world.setting, data.draw(st.sampled_from(CHOICES.get(name, [{}]))))
        whole = policy.plan(policy.view(world.trace, work))
        part = policy.plan(policy.view(world.trace, dataclasses.replace(work, schedule=cut)))
        shape = work.n_layers, work.n_layers * work.n_experts
        assert decided(whole, *shape, last) == decided(part, *shape, last), name


# -- kept on disk ----------------------------------------------------------------------------------------------------


class DearParameters(base.Parameters):
    weight: int = 1


class Dear(Policy):
    """Returns whatever plan a test puts into ``next``, and counts."""

    name = "dear"
    summary = "for tests"
    takes = DearParameters
    keeps_plan = True
    ignores = frozenset({"budget"})
    made: ClassVar[int] = 0
    next: ClassVar[Plan]

    def plan(self, view: View) -> Plan:
        type(self).made += 1
        return type(self).next


RUN = {"trace": "ab" * 32, "split": "eval", "batch": 1, "code": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_REPLAY_CACHE", str(tmp_path))
    Dear.made = 0
    Dear.next = Plan(requests=Requests.build(*np.array([[0, 1], [0, 1], [0, 1]])))
    return tmp_path / "plans"


def setting(**changed: Any) -> Setting:
    from traces.models.known import model_spec

    return dataclasses.replace(Setting(model_spec("mixtral-8x7b"), 1000, (), 0), **changed)


def ask(given: Setting | None = None, run: dict[str, Any] = RUN, **values: Any) -> Plan:
    given = given or setting()
    view: Any = None
    return kept_or_made(Dear(declared(Dear, given), DearParameters(**values)), given, view, run)


def same(a: Plan, b: Plan) -> None:
    for field in dataclasses.fields(Plan):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            assert type(x) is type(y)
            for inner in dataclasses.fields(x):
                left, right = getattr(x, inner.name), getattr(y, inner.name)
                np.testing.assert_array_equal(left, right)
                assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
        else:
            assert x == y


@given(world=worlds(), seed=st.integers(0, 2**32 - 1), wanted=st.integers(0, 20))
def test_any_plan_comes_back_as_it_was(
    world: World, seed: int, wanted: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_REPLAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        Dear.made, Dear.next = 0, arbitrary_plan(np.random.default_rng(seed), world, wanted)
        assume(Dear.next.scorer is None)
        same(ask(), Dear.next)
        same(ask(), Dear.next)
        assert Dear.made == 1


def test_a_plan_is_made_once_for_all_that_it_depends_on(folder: Path) -> None:
    ask()
    ask()
    ask(setting(budget=2000))  # ignored, and so shared
    assert Dear.made == 1
    ask(setting(seed=1))
    ask(weight=2)
    for name in RUN:
        ask(run=RUN | {name: "another"})
    assert Dear.made == 3 + len(RUN)
    assert len(list(folder.iterdir())) == Dear.made


@given(trace=traces(optional=True), data=st.data())
@settings(max_examples=25)
def test_a_part_of_a_profile_has_a_plan_of_its_own(
    trace: Trace, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A part of a file carries the hash of the whole file, so what was learned from one part was used for another."""
    whole = dataclasses.replace(trace, sha256="ab" * 32)
    again = dataclasses.replace(whole, experts=whole.experts.copy(), source="elsewhere")
    order = data.draw(st.permutations(range(whole.n_sequences)))
    other = dataclasses.replace(whole, token=whole.token + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_REPLAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        Dear.made, Dear.next = 0, Plan()
        profiles = [whole, again, other, *([whole.take(np.array(order[:-1]))] if len(order) > 1 else [])]
        for profile in profiles:
            ask(setting(profile=(profile,)))
        assert Dear.made == len(profiles) - 1


def test_what_a_policy_ignores_is_hidden_from_it() -> None:
    seen = declared(Dear, setting())
    assert seen.seed == 0
    with pytest.raises(AttributeError, match="budget"):
        _ = seen.budget


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 7):
        content[place] ^= 0xFF
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lose_an_array(path: Path) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "array1"}
    np.savez(path, **arrays)


def another_key(path: Path) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | {"key": np.array("{}")}))


def floats(path: Path) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | {"array1": np.array([0.5, 1.5])}))


@pytest.mark.parametrize("damage", [cut_short, flip_bytes, empty, lose_an_array, another_key, floats])
def test_a_damaged_plan_is_made_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    ask()
    (path,) = folder.iterdir()
    damage(path)
    same(ask(), Dear.next)
    assert Dear.made == 2
    same(ask(), Dear.next)
    assert Dear.made == 2


def test_nothing_is_kept_where_it_cannot_or_need_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(run=RUN | {"trace": ""})  # a trace that is in no file
    Dear.next = Plan(eviction=LRU)  # a rule that is only Python
    ask()
    assert not list(folder.glob("*"))
    monkeypatch.setattr(Dear, "keeps_plan", False)
    ask()
    assert not list(folder.glob("*"))
    monkeypatch.setattr(Dear, "keeps_plan", True)
    monkeypatch.setenv("MOE_REPLAY_CACHE", "off")
    Dear.next = Plan()
    ask()
    assert not list(folder.glob("*"))
    blocked = folder.parent / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("MOE_REPLAY_CACHE", str(blocked))
    ask()
    assert Dear.made == 5


def test_a_part_of_a_trace_has_a_plan_of_its_own(folder: Path) -> None:
    here = scene(BUNDLED[0], profile=BUNDLED[:1])
    plans = []
    for sequences in ([0, 1], [2, 3]):
        trace = here.trace.keep(np.isin(np.arange(here.trace.n_sequences), sequences))
        work = workload(trace, here.model, here.hardware, batched(trace, 1))
        plans.append(prepare(dataclasses.replace(here, trace=trace, work=work), "fmoe", {"entries": 50}).plan)
    assert len(list(folder.iterdir())) == 2, "though both carry the hash of the file that they are parts of"
    shape = here.trace.n_layers, here.trace.n_layers * here.trace.n_experts
    assert decided(plans[0], *shape, 1) != decided(plans[1], *shape, 1)
