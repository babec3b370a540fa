"""Predictors of chosen accuracy and the simplest ones: what they say, and that results follow from what they say."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.policies.oracle
from sim.log import REUSE_HIT
from sim.policies import make_policy
from sim.predictors.base import Predictor, top
from sim.predictors.next_gate import NextGate
from sim.predictors.oracle import Oracle, RandomGuess, _uniform
from sim.predictors.popularity import Popularity
from sim.predictors.previous_token import PreviousToken, ranked
from sim.run.prepared import replay
from sim.run.scene import scene
from sim.view import View
from sim.workload import Schedule
from tests.sim.run.test_cache import BUNDLED
from tests.support.strategies import make_trace
from tests.support.worlds import World, handmade, run_of, toy_machine, toy_model, worlds
from traces.schema import DECODE


def told(world: World) -> View:
    return View(world.trace, world.work, clairvoyant=True)


def guesses(predictor: Predictor, view: View, point: int, layers: list[int]) -> np.ndarray:
    return top(predictor.scores(view, point, layers), view.foreseen(view.n_layers).shape[2])


# -- what each says ----------------------------------------------------------------------------------------------------


def test_ranked_scores_fall_from_the_first_choice() -> None:
    scores = ranked(np.array([[2, 0, -1], [-1, -1, -1]]), 4)
    np.testing.assert_allclose(scores, [[2 / 3, 0, 1, 0], [0, 0, 0, 0]], rtol=1e-6)
    assert scores.dtype == np.float32


@given(worlds())
def test_previous_token_and_next_gate_say_what_the_view_holds(world: World) -> None:
    view, trace = told(world), world.trace
    every = list(range(view.n_layers))
    before = view.previous_route()[view.decoding]
    np.testing.assert_array_equal(np.sort(guesses(PreviousToken(), view, 0, every)), np.sort(before))
    for point in range(1, view.n_layers):
        scores = NextGate().scores(view, point, every[point:])
        said = top(scores, trace.top_k)
        np.testing.assert_array_equal(said[:, 0], view.lookahead(point)[view.decoding])
        assert (said[:, 1:] == -1).all(), "of layers beyond the next it says nothing"
    assert not NextGate().scores(view, 0, every).any()


@given(worlds())
def test_popularity_scores_are_shares_of_the_profile(world: World) -> None:
    view, trace = told(world), world.trace
    rows = np.flatnonzero(trace.phase == DECODE)
    for by in ("all", "domain"):
        scores = Popularity((trace,), by).scores(view, 0, range(view.n_layers))  # type: ignore[arg-type]
        for i, row in enumerate(world.work.schedule.rows[view.decoding].tolist()):
            like = trace.domain[trace.sequence[rows]] == trace.domain[trace.sequence[row]]
            routes = trace.experts[rows[like] if by == "domain" else rows]
            for layer in range(view.n_layers):
                counts = np.bincount(routes[:, layer][routes[:, layer] >= 0], minlength=view.n_experts)
                np.testing.assert_allclose(scores[i, layer], counts / max(counts.sum(), 1), rtol=1e-6)


@given(worlds(), st.integers(0, 2**40))
def test_perfect_is_the_route_and_inverted_never_names_it(world: World, seed: int) -> None:
    view = told(world)
    every = list(range(view.n_layers))
    route = view.foreseen(view.n_layers)[view.decoding]
    scores = Oracle(1.0, seed).scores(view, 0, every)
    np.testing.assert_array_equal(scores, ranked(route, view.n_experts))
    wrong = guesses(Oracle(0.0, seed), view, 0, every)
    taken = (wrong[..., None] == np.where(route < 0, -2, route)[..., None, :]).any(-1)
    assert not taken.any()
    chosen, named = (route >= 0).sum(-1), (wrong >= 0).sum(-1)
    if (chosen == route.shape[2]).all():
        np.testing.assert_array_equal(named, np.minimum(chosen, view.n_experts - chosen))


@given(worlds(), st.integers(0, 2**40), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_what_is_wrong_at_one_accuracy_is_wrong_at_every_lower_one(
    world: World, seed: int, accuracies: list[float]
) -> None:
    view = told(world)
    every = list(range(view.n_layers))
    true = ranked(view.foreseen(view.n_layers)[view.decoding], view.n_experts)
    right = [(Oracle(a, seed).scores(view, 0, every) > 0) & (true > 0) for a in sorted(accuracies)]
    for lower, higher in pairwise(right):
        assert not (lower & ~higher).any()


def test_accuracy_is_what_it_says() -> None:
    routes = np.random.default_rng(0).random((2000, 2, 8)).argsort(axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=8)
    steps = [[row[0].tolist(), row[1].tolist()] for row in routes]
    view = told(World(trace, toy_model(2, 8, 2, (1, 1)), toy_machine(), 1, handmade(steps, 8), 1))
    true = ranked(routes, 8) > 0
    for accuracy in (0.1, 0.5, 0.9):
        right = (Oracle(accuracy, 3).scores(view, 0, [0, 1]) > 0) & true
        assert right.sum() / true.sum() == pytest.approx(accuracy, abs=0.02)
    guess = top(RandomGuess(3).scores(view, 0, [0, 1]), 2)
    shares = np.bincount(guess.ravel(), minlength=8) / guess.size
    np.testing.assert_allclose(shares, 1 / 8, atol=0.02)


@given(worlds(), st.data())
def test_one_row_alone_gets_the_scores_that_it_gets_among_others(world: World, data: st.DataObject) -> None:
    schedule = world.work.schedule
    step = data.draw(st.integers(0, schedule.n_steps - 1))
    first, last = schedule.offsets[step], schedule.offsets[step + 1]
    alone = Schedule(schedule.phase[step : step + 1], np.array([0, last - first]), schedule.rows[first:last])
    view, part = told(world), View(world.trace, dataclasses.replace(world.work, schedule=alone), clairvoyant=True)
    mine = (view.step == step)[view.decoding]
    layers = data.draw(st.lists(st.integers(0, view.n_layers - 1), unique=True, min_size=1).map(sorted))
    point = min(layers)
    for predictor in (
        PreviousToken(), NextGate(), Popularity((world.trace,)), Popularity((world.trace,), "domain"),
        Oracle(0.6, 5), RandomGuess(5),
    ):  # fmt: skip
        whole, one = predictor.scores(view, point, layers), predictor.scores(part, point, layers)
        assert whole.dtype == np.float32 and whole.shape == (len(mine), len(layers), view.n_experts)
        np.testing.assert_array_equal(whole[mine], one)


# -- what follows from it ----------------------------------------------------------------------------------------------


def test_nothing_beats_slots_over_experts_on_uniform_routes() -> None:
    """64 experts, 32 slots, 20,000 uniform tokens of one expert: every cache on demand hits half."""
    ids = np.random.default_rng(8).integers(0, 64, 20_000)
    trace = make_trace(ids, n_experts=64)
    work = handmade([[[int(e)]] for e in ids], 64, copy_ns=10, expert_bytes=1)
    world = World(trace, toy_model(1, 64, 1, (1,)), toy_machine(), 1, work, 32, profile=trace)
    for name, values in (
        ("lru", {}),
        ("fifo", {}),
        ("lfu", {}),
        ("lfu", {"counts": "always"}),
        ("lru", {"scope": "layer"}),
    ):
        log = run_of(world, world.plan(name, values)).log()
        assert (log.found == REUSE_HIT).mean() == pytest.approx(0.5, abs=0.02), name


def test_results_follow_from_what_the_predictor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor that is shipped is called, and a perfect one gives other results than a random one.

    Seen in EfficientMoE/MoE-Infinity#57: a predictor was shipped and never called.
    """
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    called: list[str] = []

    class Counted(Oracle):
        def scores(self, view, point, layers):  # type: ignore[no-untyped-def]
            called.append(self.name)
            return super().scores(view, point, layers)

    monkeypatch.setattr(sim.policies.oracle, "Oracle", Counted)
    here = scene(BUNDLED[0], learns=False)
    perfect, random = replay(here, "oracle"), replay(here, "oracle", {"random": True})
    assert len(called) == here.work.n_layers
    assert perfect.decode.misses == 0 < random.decode.misses
    assert perfect.tokens_per_s > random.tokens_per_s


def test_better_predictions_give_better_results() -> None:
    """Inverted, random, half right and perfect predictors give ordered results, and waste falls.

    That is observed of this trace; nothing says that it holds of every one.
    """
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    here = scene(BUNDLED[0], learns=False)
    asked = [{"accuracy": 0.0}, {"random": True}, *({"accuracy": a} for a in (0.5, 0.75, 0.9, 1.0))]
    reports = [replay(here, "oracle", dict(values)) for values in asked]
    speeds = [report.tokens_per_s for report in reports]
    assert speeds == sorted(speeds)
    wasted = [report.decode.link_bytes["wasted"] for report in reports]
    assert wasted == sorted(wasted, reverse=True)
    assert wasted[-1] == 0
    plain = replay(here, "lru").tokens_per_s
    assert speeds[0] < plain < speeds[-1], "prefetching can lose, and can win"


def test_fetching_whole_layers_shows_as_a_loss() -> None:
    """Moving everything moves more bytes, takes longer to the first token, and is shown to lose.

    By how much is observed of this trace.

    Seen in ggml-org/llama.cpp#21067: prefetching whole tensors moved 2.06 times the bytes.
    """
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    here = scene(BUNDLED[0], learns=False)
    everything, demand = replay(here, "se-moe"), replay(here, "on-demand")
    moved = [sum(r.decode.link_bytes[kind] for kind in ("demand", "prefetch")) for r in (everything, demand)]
    assert moved[0] > 2.06 * moved[1]
    assert everything.decode.link_bytes["wasted"] > moved[1]
    assert everything.ttft_ms.mean > replay(here, "lru").ttft_ms.mean
    assert everything.tokens_per_s < demand.tokens_per_s


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [0, 1, 7, 2**63 - 1, 2**64])
def test_draws_are_those_of_splitmix64_and_warn_of_nothing(seed: int) -> None:
    def draw(place: int) -> float:
        mixed = ((place + 1) * 0x9E3779B97F4A7C15 + seed % 2**63 * 0xD1342543DE82EF95) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> shift) * factor % 2**64
        return ((mixed ^ mixed >> 31) >> 11) * 2.0**-53

    places = np.array([[0, 1, 2], [10**6, 2**40, 2**63]], np.uint64)
    assert _uniform(places, seed).tolist() == [[draw(int(place)) for place in row] for row in places]


def test_draws_follow_the_seed() -> None:
    routes = np.random.default_rng(0).random((50, 2, 8)).argsort(axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=8)
    work = handmade([[row[0].tolist(), row[1].tolist()] for row in routes], 8)
    world = World(trace, toy_model(2, 8, 2, (1_000, 1_000)), toy_machine(), 1, work, 4_000_000)

    def requests(seed: int) -> np.ndarray:
        policy = make_policy("oracle", dataclasses.replace(world.setting, seed=seed), {"accuracy": 0.5})
        plan = policy.plan(policy.view(trace, work))
        assert plan.requests is not None
        return plan.requests.expert

    np.testing.assert_array_equal(requests(7), requests(7))
    assert requests(7).tolist() != requests(8).tolist()


@pytest.mark.parametrize(("ahead", "points"), [(1, [0, 1, 2]), (2, [0, 0, 1]), (0, [0, 0, 0])])
def test_guesses_are_asked_for_so_many_layers_ahead(ahead: int, points: list[int]) -> None:
    trace = make_trace([[[0], [1], [2]]], n_experts=3)
    model, machine = toy_model(3, 3, 1, (1_000,) * 3), toy_machine()
    world = World(trace, model, machine, 1, handmade([[[0], [1], [2]]], 3), 4_000)
    requests = world.plan("oracle", {"ahead": ahead}).requests
    assert requests is not None
    made = np.repeat(requests.moment, np.diff(requests.offsets)).tolist()
    assert sorted(zip(requests.call.tolist(), made, strict=True)) == list(enumerate(points))
