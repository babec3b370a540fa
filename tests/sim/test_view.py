"""What a policy may know: the view by hand, and no policy acts on what a running system would not know yet."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.eviction import LRU, NEVER
from sim.plan import Plan, Requests
from sim.policies import Policy, policy_class
from sim.run.prepared import prepare
from sim.run.scene import Scene
from sim.view import View
from sim.workload import batched, workload
from tests.support.runs import simpy_run
from tests.support.strategies import make_trace
from tests.support.worlds import CHOICES, POLICIES, Event, Witness, World, toy_machine, toy_model, worlds
from traces.schema import DECODE, PREFILL

# -- by hand -----------------------------------------------------------------------------------------------------------

ROUTES = np.arange(24).reshape(6, 2, 2) % 5  # rows 0-3: sequence 0 (two prefill, two decode); rows 4-5: sequence 1


def small(batch: int = 2, **arrays: Any) -> World:
    trace = make_trace(
        ROUTES, n_experts=5, sequence=[0, 0, 0, 0, 1, 1], phase=[0, 0, 1, 1, 0, 1], domain=["law", "code"], **arrays
    )
    model, machine = toy_model(2, 5, 2, (1000, 1000)), toy_machine()
    return World(trace, model, machine, batch, workload(trace, model, machine, batched(trace, batch)), 4000)


def test_rows_stand_in_the_order_in_which_they_run() -> None:
    world = small()
    view = View(world.trace, world.work)
    # Prefill of 0 (rows 0, 1), prefill of 1 (row 4), then both decode together (rows 2 and 5), then row 3 alone.
    assert world.work.schedule.rows.tolist() == [0, 1, 4, 2, 5, 3]
    assert view.step.tolist() == [0, 0, 1, 2, 2, 3]
    assert view.sequence.tolist() == [0, 0, 1, 0, 1, 0]
    assert view.decoding.tolist() == [False, False, False, True, True, True]
    assert view.prefill_steps().tolist() == [0, 1]
    assert view.moment(view.step, 1).tolist() == [1, 1, 4, 7, 7, 10]
    assert view.domain().tolist() == ["law", "code"]


def test_the_previous_route_is_of_the_same_sequence_and_unknown_within_a_prompt() -> None:
    world = small()
    previous = View(world.trace, world.work).previous_route()
    nothing = np.full((2, 2), -1)
    expected = [nothing, nothing, nothing, ROUTES[1], ROUTES[4], ROUTES[2]]
    assert (previous == np.stack(expected)).all()


def test_a_sequence_without_a_prompt_has_no_previous_route() -> None:
    trace = make_trace([[1], [2], [3]], n_experts=5, sequence=[0, 0, 1])
    model, machine = toy_model(1, 5, 1, (1000,)), toy_machine()
    previous = View(trace, workload(trace, model, machine, batched(trace, 1))).previous_route()
    assert previous.ravel().tolist() == [-1, 1, -1]


def test_routes_below_a_point() -> None:
    world = small()
    view = View(world.trace, world.work)
    assert view.route(0).shape == (6, 0, 2)
    assert (view.route(1) == world.trace.experts[[0, 1, 4, 2, 5, 3], :1]).all()
    assert (view.route(2) == world.trace.experts[[0, 1, 4, 2, 5, 3]]).all()


def test_embeddings_and_look_ahead_of_the_running_rows() -> None:
    embeddings = np.arange(3 * 3 * 2, dtype=np.int8).reshape(3, 3, 2)
    lookahead = ROUTES.astype(np.int16)[::-1].copy()
    lookahead[:, 1] = -1
    world = small(
        embeddings=embeddings,
        prefill_embeddings=np.zeros((3, 2), np.int8),
        embedding_scale=np.ones(3, np.float32),
        lookahead=lookahead,
        meta={"embedding": {"basis_sha256": "0", "dims": 2, "bits": 8, "prefill_layer": 0}},
    )
    view = View(world.trace, world.work)
    assert (view.embedding(1) == embeddings[[0, 2, 1], 1]).all(), (
        "decode rows 2, 5 and 3 are the first, third and second"
    )
    assert (view.lookahead(1) == lookahead[[0, 1, 4, 2, 5, 3], 0]).all()


def test_probabilities_below_a_point_of_all_experts() -> None:
    probs = np.arange(6 * 2 * 5, dtype=np.uint8).reshape(6, 2, 5)
    view = View((world := small(probs=probs)).trace, world.work)
    assert view.probs(0).shape == (6, 0, 5)
    assert (view.probs(2) == probs[[0, 1, 4, 2, 5, 3]]).all()
    # The same where a trace keeps the largest two alone: the others are 0.
    ids = np.tile(np.array([[[4, 1], [0, 2]]], np.int16), (6, 1, 1))
    view = View((world := small(probs=probs[:, :, :2], prob_experts=ids)).trace, world.work)
    assert view.probs(1)[3].tolist() == [[0, int(probs[2, 0, 1]), 0, 0, int(probs[2, 0, 0])]]
    assert view.probs(2)[3, 1].tolist() == [int(probs[2, 1, 0]), 0, int(probs[2, 1, 1]), 0, 0]


def test_gates_are_weights_or_else_probabilities_of_the_experts_taken() -> None:
    probs = np.arange(6 * 2 * 5, dtype=np.uint8).reshape(6, 2, 5)
    assert View((world := small()).trace, world.work).gates(2) is None
    view = View((world := small(probs=probs)).trace, world.work)
    routes = view.route(2)
    told = view.gates(2)
    assert told is not None and told.shape == routes.shape
    for row, layer, k in np.argwhere(routes >= 0):
        expert = routes[row, layer, k]
        assert told[row, layer, k] == view.probs(2)[row, layer, expert] / np.float32(255)
    gates = np.arange(6 * 2 * 2, dtype=np.float16).reshape(6, 2, 2) / 32
    view = View((world := small(gates=gates)).trace, world.work)
    assert (view.gates(1) == gates[[0, 1, 4, 2, 5, 3], :1]).all()


@given(worlds())
@settings(max_examples=60)
def test_sums_over_the_past_are_those_over_earlier_tokens_of_the_sequence(world: World) -> None:
    trace, work = world.trace, world.work
    table = np.random.default_rng(0).integers(-9, 10, (trace.n_layers, trace.n_experts, 3))
    view = View(trace, work)
    sums = view.past_sum(table)
    for row, found in zip(work.schedule.rows[view.decoding].tolist(), sums.tolist(), strict=True):
        expected = np.zeros(3, np.int64)
        for earlier in np.flatnonzero(trace.sequence[:row] == trace.sequence[row]).tolist():
            for layer in range(trace.n_layers):
                for expert in trace.experts[earlier, layer].tolist():
                    if expert >= 0:
                        expected += table[layer, expert]
        assert found == expected.tolist()


def test_what_the_trace_lacks_is_named() -> None:
    world = small()
    with pytest.raises(InputError, match="no array embeddings"):
        View(world.trace, world.work).embedding(0)
    with pytest.raises(InputError, match="no array lookahead"):
        View(world.trace, world.work).lookahead(1)
    with pytest.raises(InputError, match="no array probs"):
        View(world.trace, world.work).probs(1)


def test_the_future_is_for_clairvoyant_policies() -> None:
    world = small()
    with pytest.raises(PermissionError, match="clairvoyant"):
        View(world.trace, world.work).future()
    assert View(world.trace, world.work, clairvoyant=True).future() is world.work


# -- no peeking --------------------------------------------------------------------------------------------------------


def other_future(world: World, step: int, seed: int) -> World:
    """The same world up to the end of ``step``; afterwards other routes, gates, probabilities and embeddings."""
    trace, rng, schedule = world.trace, np.random.default_rng(seed), world.work.schedule
    later = np.zeros(trace.n_rows, bool)
    later[schedule.rows[schedule.offsets[step + 1] :]] = True

    def redrawn(array: np.ndarray | None, rows: np.ndarray, like: str = "") -> np.ndarray | None:
        if array is None:
            return None
        array = array.copy()
        if like == "ids":
            drawn = rng.random((*array.shape[:2], trace.n_experts)).argsort(axis=2)[:, :, : array.shape[2]]
            array[rows] = np.where(array[rows] < 0, -1, drawn[rows])
        elif array.dtype.kind == "f":
            array[rows] = np.where(array[rows] == 0, 0, rng.random(array.shape)[rows])
        else:
            info = np.iinfo(array.dtype)
            array[rows] = rng.integers(info.min, info.max, array.shape)[rows]
        return array

    changed = dataclasses.replace(
        trace,
        experts=redrawn(trace.experts, later, "ids"),
        gates=redrawn(trace.gates, later),
        probs=redrawn(trace.probs, later),
        prob_experts=redrawn(trace.prob_experts, later, "ids"),
        lookahead=redrawn(trace.lookahead, later, "ids"),
        embeddings=redrawn(trace.embeddings, later[trace.phase == DECODE]),
        prefill_embeddings=redrawn(trace.prefill_embeddings, later[trace.phase == PREFILL]),
        token=np.where(later, 7, trace.token).astype(np.int32),
    )
    work = workload(changed, world.model, world.hardware, world.work.schedule)
    same = int(world.work.offsets[(step + 1) * work.n_layers])
    costs = np.concatenate([world.work.expert_ns[:same], np.ones(len(work.expert) - same, np.int64)])
    same_costs = ("layer_ns", "shared_ns", "head_ns", "copy_ns", "latency_ns", "chained", "beside_copy_ns", "move_ns")
    if (waits := world.work.awaited_ns) is not None:
        costs_waited = np.concatenate([waits[:same], costs[same:]])
        work = dataclasses.replace(work, awaited_ns=costs_waited)
    work = dataclasses.replace(work, expert_ns=costs, **{name: getattr(world.work, name) for name in same_costs})
    return dataclasses.replace(world, trace=changed, work=work, profile=world.profile or world.trace)


def acts(world: World, policy: type[Policy], values: dict[str, object], step: int) -> list[tuple[Any, ...]]:
    """Everything that begins before the end of ``step``; of a copy that goes on then, only that it began."""
    made = policy(world.setting, policy.takes.model_validate(values))
    witness = Witness(world, made.plan(made.view(world.trace, world.work)))
    log = witness.log()
    end = int(log.finish[step])
    told = [_told(event, end) for event in witness.events if event.begin < end]
    return [*(t for t in told if t[0] != "under way"), *(t for t in told if t[0] == "under way")]


def _told(event: Event, end: int) -> tuple[Any, ...]:
    if event.kind == "transfer" and event.end >= end:
        return ("under way", event.begin, event.detail[0], event.detail[1] == "demand")
    return (event.kind, event.begin, event.end, *event.detail)


def assert_blind(world: World, policy: type[Policy], values: dict[str, object], step: int, seed: int) -> None:
    other = other_future(world, step, seed)
    assert acts(world, policy, values, step) == acts(other, policy, values, step)


@given(world=worlds(), data=st.data())
@settings(max_examples=30)
def test_no_policy_acts_on_the_future(world: World, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, world.work.schedule.n_steps - 1))
    other = other_future(world, step, data.draw(st.integers(0, 99)))
    for name in (name for name in POLICIES if not policy_class(name).clairvoyant):
        values = data.draw(st.sampled_from(CHOICES.get(name, [{}])))
        plan = world.plan(name, values)
        if plan.ring and world.work.n_calls * world.work.n_experts >= 5_000:
            continue  # a ring copies them all
        roomy = world.with_room(plan)
        changed = dataclasses.replace(other, budget=roomy.budget)
        kind = policy_class(name)
        assert acts(roomy, kind, values, step) == acts(changed, kind, values, step), name


class Peeker(Policy):
    """Prefetches what the next step will take: it reads the workload behind the view."""

    name = "peeker"
    summary = "cheats"

    def plan(self, view: View) -> Plan:
        work = view._work
        call = work.call
        ahead = call >= work.n_layers
        moment = (call // work.n_layers - 1) * (work.n_layers + 1)
        return Plan(requests=Requests.build(moment[ahead], call[ahead], work.expert[ahead]))


class Foreseer(Policy):
    """Evicts by a rule that is told the future."""

    name = "foreseer"
    summary = "cheats"

    def plan(self, view: View) -> Plan:
        return Plan(eviction="next-use")


def walk(tokens: int, batch: int) -> World:
    """Decode steps of two sequences over changing routes."""
    rng = np.random.default_rng(5)
    routes = rng.random((2 * tokens, 2, 6)).argsort(axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=6, sequence=np.repeat([0, 1], tokens))
    model, machine = toy_model(2, 6, 2, (50_000, 50_000)), toy_machine()
    return World(trace, model, machine, batch, workload(trace, model, machine, batched(trace, batch)), 250_000)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cheat", [Peeker, Foreseer, policy_class("clairvoyant")])
def test_the_test_catches_who_peeks(batch: int, cheat: type[Policy]) -> None:
    with pytest.raises(AssertionError):
        for step in range(1, 6):
            assert_blind(walk(8, batch), cheat, {}, step, 3)
    for step in range(1, 6):
        assert_blind(walk(8, batch), policy_class("previous-token"), {}, step, 3)


@pytest.mark.parametrize("clairvoyant", [False, True])
def test_only_rules_that_say_so_are_told_the_future(clairvoyant: bool) -> None:
    told: list[int] = []

    class Curious(LRU):
        def __init__(self, first_call: np.ndarray) -> None:
            super().__init__(first_call)
            told.extend(first_call.tolist())

        def needed(self, expert: int, next_call: int) -> None:
            super().needed(expert, next_call)
            told.append(next_call)

    Curious.clairvoyant = clairvoyant  # type: ignore[attr-defined]
    world = walk(4, 1)
    simpy_run(world.work, Plan(eviction=Curious), world.budget).log()
    assert (set(told) != {NEVER}) == clairvoyant


def test_a_rule_that_is_told_the_future_is_refused_to_who_does_not_say_so() -> None:
    world = walk(4, 1)
    machine, soft = world.hardware, world.software
    here = Scene(world.trace, (), world.model, machine, soft, world.budget, 1, "eval", 0, world.work)
    with pytest.raises(InputError, match="foreseer: its eviction rule next-use is told the future"):
        prepare(here, "tests.sim.test_view:Foreseer")
    assert prepare(here, "clairvoyant").plan.eviction == "next-use"
