"""Policies that peek are refused; the project's own and an honest stranger are not."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.eviction import LRU
from sim.plan import Plan, Requests, Values
from sim.policies import Parameters, Policy, Setting, make_policy, policy_class
from sim.run.blindness import blurred, check_blind
from sim.run.prepared import prepare
from sim.run.scene import scene
from sim.view import View
from tests.support.places import REPOSITORY
from tests.support.worlds import CHOICES, POLICIES, World, worlds
from traces.trace import Trace

COUNT = itertools.count()
LAW = REPOSITORY / "traces" / "mixtral_law.npz"


def asking(view: View, routes: np.ndarray, point: int) -> Plan:
    row, layer, slot = np.nonzero(routes >= 0)
    expert = layer * view.n_experts + routes[row, layer, slot]
    step = view.step[row]
    return Plan(requests=Requests.build(view.moment(step, point), step * view.n_layers + layer, expert))


class Impatient(Policy):
    """Asks at a step's beginning for the routes of the step itself, by the public view alone."""

    name = "impatient"

    def plan(self, view: View) -> Plan:
        return asking(view, view.route(view.n_layers), 0)


class Prophet(Policy):
    """Asks for what the next row of the trace takes."""

    name = "prophet"

    def plan(self, view: View) -> Plan:
        return asking(view, np.roll(view.route(view.n_layers), -1, axis=0), 0)


class Valuer(Policy):
    """Values experts by how often the whole run takes them."""

    name = "valuer"

    def plan(self, view: View) -> Plan:
        routes = view.route(view.n_layers)
        flat = (np.arange(view.n_layers)[:, None] * view.n_experts + routes)[routes >= 0]
        counts = np.bincount(flat, minlength=view.n_layers * view.n_experts)
        zero = np.zeros(1, np.int64)
        return Plan(eviction="score", values=Values(zero, zero, counts[None].astype(np.int64)))


class Overreacher(Policy):
    """Is told one layer ahead, and takes two."""

    name = "overreacher"
    foresight = 1

    def plan(self, view: View) -> Plan:
        row, slot = np.nonzero(view.route(3)[:, 2] >= 0)
        step, expert = view.step[row], 2 * view.n_experts + view.route(3)[row, 2, slot]
        return Plan(requests=Requests.build(view.moment(step, 1), step * view.n_layers + 2, expert))


class Told(Policy):
    """Is told one layer ahead, and takes one."""

    name = "told"
    foresight = 1

    def plan(self, view: View) -> Plan:
        row, slot = np.nonzero(view.foreseen(1)[:, 1] >= 0)
        step, expert = view.step[row], view.n_experts + view.foreseen(1)[row, 1, slot]
        return Plan(requests=Requests.build(view.moment(step, 1), step * view.n_layers + 1, expert))


class Honest(Policy):
    """Asks for what the row before took."""

    name = "honest"

    def plan(self, view: View) -> Plan:
        return asking(view, view.previous_route(), 0)


class Talker(Policy):
    """As honest, but what it says of itself, and the object that is its rule, are others in each plan."""

    name = "talker"

    def plan(self, view: View) -> Plan:
        class Rule(LRU):
            pass

        note = f"the trace begins with {view.route(1).sum()}, plan {next(COUNT)}"
        return dataclasses.replace(asking(view, view.previous_route(), 0), note=note, eviction=Rule)


class Seer(Policy):
    """Calls itself clairvoyant only once it is made, where neither a person nor a check looks."""

    name = "seer"

    def __init__(self, setting: Setting, parameters: Parameters) -> None:
        super().__init__(setting, parameters)
        self.clairvoyant = True  # type: ignore[misc]

    def plan(self, view: View) -> Plan:
        work = view.future()
        moment = work.call // work.n_layers * (work.n_layers + 1)
        return Plan(requests=Requests.build(moment, work.call, work.expert))


class Foreteller(Seer):
    """The same with foresight."""

    name = "foreteller"

    def __init__(self, setting: Setting, parameters: Parameters) -> None:
        super().__init__(setting, parameters)
        self.foresight = 2  # type: ignore[misc]

    def plan(self, view: View) -> Plan:
        return asking(view, view.foreseen(view.n_layers - 2), view.n_layers - 2)


@pytest.mark.parametrize("cheat", [Seer, Foreteller])
def test_what_a_policy_may_see_is_what_its_class_says(cheat: type[Policy]) -> None:
    with pytest.raises(InputError, match=f"policy {cheat.name}: plan: PermissionError: only a policy that"):
        prepare(scene(LAW, learns=False), f"{cheat.__module__}:{cheat.__qualname__}")


@pytest.mark.parametrize("cheat", [Impatient, Prophet, Valuer, Overreacher])
def test_a_policy_from_outside_that_peeks_is_refused(cheat: type[Policy]) -> None:
    here = scene(LAW, learns=False)
    with pytest.raises(InputError, match=f"policy {cheat.name}: it peeks: what it decides up to step"):
        prepare(here, f"{cheat.__module__}:{cheat.__qualname__}")


def test_an_honest_policy_from_outside_runs() -> None:
    here = scene(LAW, learns=False)
    for honest in ("Honest", "Told", "Talker"):
        assert prepare(here, f"{__name__}:{honest}").plan.requests is not None


@given(world=worlds(), data=st.data())
@settings(max_examples=25)
def test_the_projects_own_policies_are_blind(world: World, data: st.DataObject) -> None:
    for kind in map(policy_class, POLICIES):
        if not kind.clairvoyant:
            made = make_policy(kind.name, world.setting, data.draw(st.sampled_from(CHOICES.get(kind.name, [{}]))))
            check_blind(made, world.trace, world.work, made.plan(made.view(world.trace, world.work)))


def test_what_is_blurred_is_what_is_not_known_yet() -> None:
    here = scene(LAW, learns=False)
    step, point = 30, 5
    blur: Trace = blurred(here.trace, here.work, step * (here.work.n_layers + 1) + point)
    row = int(here.work.schedule.rows[here.work.schedule.offsets[step]])
    same = (blur.experts == here.trace.experts).all(axis=2)
    assert same[:row].all()
    assert same[row, :point].all()
    assert not same[row, point:].any()
    assert not same[row + 1 :].any()
    assert here.trace.embeddings is not None
    assert blur.embeddings is not None
    assert (blur.token == here.trace.token)[: row + 1].all()
    assert not (blur.token == here.trace.token)[row + 1 :].any()
    index = int(np.flatnonzero(here.trace.decode_rows == row)[0])
    level = (blur.embeddings == here.trace.embeddings).all(axis=2)
    assert level[:index].all()
    assert level[index, : point + 1].all()
    assert not level[index, point + 1 :].any()
