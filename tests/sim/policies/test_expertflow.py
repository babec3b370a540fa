"""ExpertFlow's cache engine: how it shares slots out, what it asks for and when, and what becomes of wrong guesses."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.log import MISS
from sim.plan import Plan, Requests
from sim.policies.expertflow import WEIGHTS, apportioned, proportional
from sim.predictors.paths import SequenceLevel, TokenLevel
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from sim.shares import Shares
from sim.view import View
from sim.workload import batched, workload
from tests.support.places import REPOSITORY
from tests.support.predictions import with_predictions
from tests.support.scenes import Scene
from tests.support.strategies import make_trace
from tests.support.worlds import MS, World, digest, handmade, made, run_of, toy_machine, toy_model, worlds
from traces.schema import DECODE
from traces.trace import Trace

LAW = REPOSITORY / "traces" / "mixtral_law.npz"


def told(predicted: list[list[list[int]]], taken: list[list[list[int]]], n_experts: int) -> Trace:
    """One decode row a step: experts predicted and taken in each layer, equally many everywhere of either kind."""
    ids = np.array(predicted, np.int16)
    return make_trace(
        np.array(taken, np.int16),
        n_experts=n_experts,
        predicted_experts=ids,
        predicted_probs=np.where(ids >= 0, 255, 0).astype(np.uint8),
        meta={"predictor": {"sha256": "1" * 64, "parameters": 0}},
    )


def world_of(trace: Trace, slots: int, batch: int = 1, size: int = 1000) -> World:
    model = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (size,) * trace.n_layers)
    machine = toy_machine()
    work = workload(trace, model, machine, batched(trace, batch))
    return World(trace, model, machine, batch, work, slots * size)


# -- shares ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=5), st.integers(0, 200))
def test_shares_are_proportional_to_within_one_slot_and_use_all_slots(rows: list[list[int]], slots: int) -> None:
    wanted = np.array(rows)
    shares = apportioned(wanted, slots)
    assert (shares <= wanted).all() and (shares >= 0).all()
    assert (shares.sum(axis=1) == np.minimum(wanted.sum(axis=1), slots)).all()
    fair = wanted * np.minimum(1, slots / np.maximum(1, wanted.sum(axis=1, keepdims=True)))
    assert (np.abs(shares - fair) < 1).all()


def test_three_to_two_experts_get_three_to_two_slots() -> None:
    assert apportioned(np.array([[6, 4], [3, 2], [0, 0]]), 5).tolist() == [[3, 2], [3, 2], [0, 0]]


def test_who_leaves_is_of_the_layer_that_holds_most_beyond_its_share() -> None:
    # Both layers hold two; the first should have three, the second one: it gives a slot up though used last.
    steps = [[[0, 1], [0, 1]], [[2], [0]]]
    for shares, gone in (([3, 1], 3), ([1, 3], 0)):
        plan = Plan(eviction="lfu", shares=Shares(np.zeros(1, np.int64), np.array([shares])))
        assert Scene(handmade(steps, 3), plan, slots=4).of("evicted")[0][1] == [gone]


def test_all_slots_are_shared_out_those_beyond_the_need_too() -> None:
    assert proportional(np.array([[2, 1], [0, 0]]), 6).tolist() == [[4, 2], [0, 0]]
    layer = [0, 1, 2, 3]
    shares = world_of(told([[layer] * 3], [[layer] * 3], 4), slots=3).plan("expertflow").shares
    assert shares is not None and shares.moment.tolist() == [0, 1, 2]
    # What the first layer had goes to the second, and what both had to the third.
    assert shares.table.tolist() == [[1, 1, 1], [0, 2, 1], [0, 0, 3]]


# -- requests ----------------------------------------------------------------------------------------------------------


def asked_by_hand(world: World, first: float, sure: float, slots: int) -> list[tuple[int, int, int]]:
    """What the paper's split asks for, step by step and expert by expert: (moment, call, expert)."""
    trace, work, schedule = world.trace, world.work, world.work.schedule
    assert trace.predicted_experts is not None and trace.predicted_probs is not None
    most = min(trace.n_experts, int(np.ceil(first * trace.top_k)))
    found = []
    for step in np.flatnonzero(schedule.phase == DECODE).tolist():
        need: list[dict[int, int]] = [defaultdict(int) for _ in range(work.n_layers)]
        for row in schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist():
            for layer in range(work.n_layers):
                for rank in range(min(most, trace.predicted_experts.shape[2])):
                    expert, prob = (
                        trace.predicted_experts[row, layer, rank],
                        int(trace.predicted_probs[row, layer, rank]),
                    )
                    likely = max(1, prob * 2**16 // 255)
                    if expert >= 0 and likely >= sure * 2**16:
                        need[layer][int(expert)] += likely
        queues = [sorted(one, key=lambda e, one=one: (-one[e], e)) for one in need]  # type: ignore[misc]
        shares = apportioned(np.array([[len(queue) for queue in queues]]), slots)[0].tolist()
        held = []
        for layer, share in enumerate(shares):
            found += [(0, layer, queues[layer].pop(0), step) for _ in range(share)]
            held.append(share)
        for done in range(work.n_layers):
            free = held[done]
            for layer in range(done + 1, work.n_layers):
                while free and queues[layer]:
                    found.append((done + 1, layer, queues[layer].pop(0), step))
                    held[layer] += 1
                    free -= 1
    points = work.n_layers + 1
    return sorted((s * points + p, s * work.n_layers + la, la * work.n_experts + e) for p, la, e, s in found)


@given(worlds(), st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 0.4]))
@settings(max_examples=60)
def test_requests_are_those_made_by_hand(world: World, first: float, sure: float) -> None:
    plan = world.plan("expertflow", {"first": first, "sure": sure})
    slots = max(0, world.budget - plan.gpu_bytes) // max(world.work.expert_bytes)
    assert made(plan.requests) == asked_by_hand(world, first, sure, slots)


@given(worlds(), st.sampled_from(["need", "order"]))
@settings(max_examples=60)
def test_what_is_wanted_at_one_time_fits_the_slots(world: World, split: str) -> None:
    plan = world.plan("expertflow", {"split": split, "first": 2.0})
    slots = max(0, world.budget - plan.gpu_bytes) // max(world.work.expert_bytes)
    asked: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for moment, call, expert in made(plan.requests):
        asked[moment].append((call, expert))
    wanted: set[tuple[int, int]] = set()
    points = world.work.n_layers + 1
    for moment in range(world.work.schedule.n_steps * points):
        step, point = divmod(moment, points)
        passed = step * world.work.n_layers + point - 1  # its look-up is at this moment
        wanted = {(call, expert) for call, expert in wanted if call > passed} | set(asked[moment])
        assert len(wanted) <= slots


def test_slots_of_layers_that_are_done_go_to_later_ones_nearest_first() -> None:
    layer = [0, 1, 2, 3]
    trace = told([[layer] * 3], [[layer] * 3], 4)
    requests = world_of(trace, slots=3).plan("expertflow", {"first": 1.0}).requests
    # A slot a layer at first; as each is done its slots go to the next layers' rest.
    assert made(requests) == [
        (0, 0, 0), (0, 1, 4), (0, 2, 8), (1, 1, 5), (2, 2, 9), (2, 2, 10),
    ]  # fmt: skip
    assert requests is not None
    assert requests.call.tolist() == sorted(requests.call[:3].tolist()) + requests.call[3:].tolist()
    in_order = world_of(trace, slots=3).plan("expertflow", {"split": "order"}).requests
    assert made(in_order)[:4] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 4)]


@given(worlds(prefill=False), st.integers(1, 20))
@settings(max_examples=30)
def test_predictions_that_are_right_and_an_oracle_that_is_ask_alike(world: World, slots: int) -> None:
    trace = with_predictions(dataclasses.replace(world.trace, split=np.full(world.trace.n_sequences, "eval")), 1.0)
    full = np.where(trace.experts >= 0, trace.experts, trace.experts.max(axis=2, keepdims=True))
    if (trace.experts < 0).any() or full.min() < 0:
        return
    world = dataclasses.replace(world, trace=trace, budget=slots * max(world.work.expert_bytes) + 2000)
    own = world.plan("expertflow")
    oracle = world.plan("expertflow-oracle", {"weights": 1000})
    of_call = [sorted({(call, expert) for _, call, expert in made(plan.requests)}) for plan in (own, oracle)]
    room = slots >= world.work.n_layers * world.work.n_experts
    assert of_call[0] == of_call[1] or not room
    assert len(of_call[0]) == len(of_call[1])


# -- correction --------------------------------------------------------------------------------------------------------


def seen(correction: bool) -> Scene:
    """Layer 0 is thought to take experts 0 and 1, and takes 2; layer 1 is foreseen. 3 slots, copies of 10 ms."""
    trace = told([[[0, 1], [0, 1]]], [[[2, -1], [0, 1]]], 4)
    world = world_of(trace, slots=4, size=1_000_000)
    plan = world.plan("expertflow", {"correction": correction, "charge": "free"})
    work = handmade([[[2], [0, 1]]], 4, layer_ns=5 * MS, expert_ns=MS)
    return Scene(work, dataclasses.replace(plan, gpu_bytes=0), slots=4)


def test_missed_experts_overtake_what_waits_and_unwanted_ones_are_not_copied() -> None:
    corrected, plain = seen(True), seen(False)
    # 0 is under way when 2 turns out to be missing: 2 comes next. In the line it comes after all that was foreseen.
    assert [event[2] for event in corrected.of("transfer")][:2] in ([0, 2], [2, 4])
    assert [event[2] for event in plain.of("transfer")][-1] == 2
    assert corrected.log.finish[-1] < plain.log.finish[-1]
    assert 1 not in [event[2] for event in corrected.of("transfer")], "foreseen in vain, and still waiting: dropped"


def test_experts_foreseen_in_vain_are_the_first_to_leave() -> None:
    # Expert 0 of layer 0 is foreseen and not taken. Of what else is there, 1 was used longest ago.
    trace = told([[[1], [0]], [[0], [0]]], [[[1], [0]], [[2], [0]]], 3)
    world = world_of(trace, slots=4, size=1_000_000)
    for correction, gone in ((True, 0), (False, 1)):
        plan = world.plan("expertflow", {"correction": correction, "charge": "free"})
        work = handmade([[[1], [0]], [[2], [0]]], 3, layer_ns=100 * MS)
        evicted = Scene(work, dataclasses.replace(plan, gpu_bytes=0), slots=3).of("evicted")
        assert [victims for _, victims, by in evicted if by == 2] == [[gone]]


def test_correction_gains_more_often_than_it_loses() -> None:
    ratios = []

    @given(worlds(prefill=False))
    @settings(max_examples=100)
    def ran(world: World) -> None:
        ends = []
        for correction in (True, False):
            plan = world.plan("expertflow", {"correction": correction, "charge": "free"})
            here = dataclasses.replace(world, discipline=None)
            ends.append(int(run_of(here, dataclasses.replace(plan, gpu_bytes=0)).log().finish[-1]))
        ratios.append(ends[1] / max(1, ends[0]))

    ran()
    faster, slower = (np.array(ratios) > 1).mean(), (np.array(ratios) < 1).mean()
    assert faster > 3 * slower
    assert max(ratios) > 1.2
    # Who was foreseen in vain is often needed a little later, and then was sent away first.
    assert slower < 0.1


# -- batches -----------------------------------------------------------------------------------------------------------


@given(worlds(), st.integers(2, 5))
@settings(max_examples=30)
def test_batches_conserve_activations_and_one_sequence_is_a_batch_of_one(world: World, batch: int) -> None:
    def run(trace: Trace, together: int) -> tuple[World, tuple[object, ...]]:
        work = workload(trace, world.model, world.hardware, batched(trace, together))
        here = dataclasses.replace(world, trace=trace, batch=together, work=work)
        plan = here.plan("expertflow")
        here = here.with_room(plan)
        return here, digest(run_of(here, here.plan("expertflow")).log())

    alone, _ = run(world.trace, 1)
    many, _ = run(world.trace, batch)
    for one in (alone, many):
        assert one.work.activations.sum() == (world.trace.experts >= 0).sum() == one.work.tokens.sum()
    single = world.trace.keep(np.arange(world.trace.n_sequences) == 0)
    assert run(single, 1)[1] == run(single, batch)[1]


# -- whose predictions -------------------------------------------------------------------------------------------------


def test_a_trace_without_predictions_is_refused_with_the_command_that_makes_them() -> None:
    here = scene(LAW, learns=False)
    trace = dataclasses.replace(here.trace, predicted_experts=None, predicted_probs=None)
    bare = dataclasses.replace(here, trace=trace)
    with pytest.raises(InputError, match=r"no array predicted_experts.*`python -m traces predictor predict`"):
        prepare(bare, "expertflow")
    with pytest.raises(InputError, match=r"no array predicted_experts.*`python -m traces predictor predict`"):
        View(bare.trace, bare.work).predicted()


@given(worlds())
@settings(max_examples=30)
def test_the_view_gives_each_rows_own_predictions(world: World) -> None:
    view = View(world.trace, world.work)
    experts, probs = view.predicted()
    assert world.trace.predicted_experts is not None and world.trace.predicted_probs is not None
    np.testing.assert_array_equal(experts, world.trace.predicted_experts[world.work.schedule.rows])
    np.testing.assert_array_equal(probs, world.trace.predicted_probs[world.work.schedule.rows])


@given(worlds())
@settings(max_examples=30)
def test_token_and_sequence_levels_are_shares_of_what_was_taken(world: World) -> None:
    trace, view = world.trace, View(world.trace, world.work)
    every = range(trace.n_layers)
    rows = world.work.schedule.rows[view.decoding].tolist()
    guesses = [("slp", SequenceLevel())]
    if (trace.token >= 0).any():
        guesses.append(("tlp", TokenLevel((trace,))))  # type: ignore[list-item]
    for kind, guess in guesses:
        scores = guess.scores(view, 0, every)
        for place, row in enumerate(rows):
            if kind == "slp":
                like = (trace.sequence == trace.sequence[row]) & (np.arange(trace.n_rows) < row)
            else:
                like = (trace.token == trace.token[row]) & (trace.token >= 0)
            for layer in every:
                ids = trace.experts[like, layer]
                counts = np.bincount(ids[ids >= 0], minlength=trace.n_experts)
                np.testing.assert_allclose(scores[place, layer], counts / max(1, counts.sum()), rtol=1e-6)


def test_a_profile_without_token_ids_tells_no_token_level() -> None:
    with pytest.raises(InputError, match="TLP goes by token ids, and the profile has none"):
        TokenLevel((make_trace([[0]], n_experts=2),))


# -- forms -------------------------------------------------------------------------------------------------------------


def test_the_published_code_splits_evenly_waits_for_its_copies_and_corrects_nothing() -> None:
    trace = with_predictions(make_trace([[[0], [1]]] * 4, n_experts=4), 1.0)
    plan = world_of(trace, slots=4).plan("expertflow", {"code": True})
    assert (plan.per_layer, plan.insist, plan.discipline) == (True, True, "demand-first")
    assert not plan.prediction.ns.any() and not plan.prediction.before_demands
    assert plan.values is not None and set((plan.values.moment % 3).tolist()) == {0}, "values as steps begin alone"


def test_taking_the_parts_away_changes_what_it_says() -> None:
    trace = with_predictions(make_trace([[[0], [1]]] * 4, n_experts=4), 0.5)
    world = world_of(trace, slots=4, size=10_000)
    plans = {name: world.plan("expertflow", dict(values)) for name, values in {
        "whole": {}, "even": {"plec": False}, "uncorrected": {"correction": False}, "quiet": {"prefetch": False},
    }.items()}  # fmt: skip
    assert plans["even"].per_layer and not plans["whole"].per_layer
    assert (plans["whole"].discipline, plans["uncorrected"].discipline) == ("preemptive", "fifo")
    assert plans["quiet"].requests is None and plans["whole"].requests is not None
    assert plans["whole"].gpu_bytes == 2 * 1000, "what the trace says of its predictor"
    oracle = world.plan("expertflow-oracle", {"weights": WEIGHTS})
    assert oracle.gpu_bytes == 2 * WEIGHTS and oracle.prediction.ahead


def test_a_bundled_trace_with_predictions_replays() -> None:
    here = scene(LAW, cache="4/layer", batch=4, learns=False)
    here = dataclasses.replace(here, trace=with_predictions(here.trace, 0.9))
    report = replay(here, "expertflow")
    assert report.decode.misses < replay(here, "lru").decode.misses
    assert report.parameters["split"] == "need"
    assert (np.array([report.decode.hits, report.decode.late, report.decode.misses]) > 0).all()


def test_requests_are_empty_where_nothing_is_predicted() -> None:
    trace = told([[[-1], [-1]]], [[[0], [1]]], 3)
    plan = world_of(trace, slots=3).plan("expertflow")
    assert isinstance(plan, Plan) and isinstance(plan.requests, Requests) and not len(plan.requests.call)
    log = run_of(world_of(trace, slots=3), dataclasses.replace(plan, gpu_bytes=0)).log()
    assert log.found.tolist() == [MISS, MISS]
