"""Expert maps: both searches, the threshold and the replacement beside brute force, and what FineMoE makes of them."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.plan import Requests
from sim.policies import finemoe
from sim.policies.finemoe import chosen
from sim.predictors.expert_maps import ExpertMaps, iterations, kept
from sim.predictors.products import cosines, exact_product, squares
from sim.view import View
from sim.workload import batched, workload
from tests.support.strategies import make_trace
from tests.support.worlds import World, toy_machine, toy_model, worlds
from traces.schema import DECODE
from traces.trace import Trace

ABOUT = {"embedding": {"basis_sha256": "0", "dims": 2, "bits": 8, "prefill_layer": 0}}


def cosine(a: list[int], b: list[int]) -> float:
    """Cosine of two vectors of whole numbers, 0 with one of zeros."""
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def nearest(query: list[int], entries: list[list[int]]) -> tuple[int, float]:
    """The entry of the largest cosine, the first of equals, and that cosine; -1 and 0 for a query of zeros."""
    if not any(query) or not entries:
        return -1, 0.0
    found = [cosine(query, entry) for entry in entries]
    return found.index(max(found)), max(found)


def dense(trace: Trace) -> np.ndarray:
    """Probabilities of all experts (T, L, E)."""
    assert trace.probs is not None
    full = np.zeros((trace.n_rows, trace.n_layers, trace.n_experts), np.int64)
    for place in np.ndindex(trace.probs.shape):
        expert = place[2] if trace.prob_experts is None else trace.prob_experts[place]
        full[place[0], place[1], expert] = trace.probs[place]
    return full


# -- products ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([3, 300, 20_000]), st.integers(0, 99))
def test_products_are_exact_whoever_stands_beside(rows: int, columns: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-size, size + 1, (rows, 50)), rng.integers(-size, size + 1, (columns, 50))
    assert (exact_product(a, b) == a @ b.T).all()
    alone = np.concatenate(
        [cosines(exact_product(a[i : i + 1], b), squares(a[i : i + 1]), squares(b)) for i in range(rows)]
    )
    assert (alone == cosines(exact_product(a, b), squares(a), squares(b))).all()


def test_a_vector_of_zeros_has_a_cosine_of_zero() -> None:
    a, b = np.array([[0, 0], [3, 4]]), np.array([[0, 0], [6, 8]])
    assert cosines(exact_product(a, b), squares(a), squares(b)).tolist() == [[0, 0], [0, 1]]


# -- searches ----------------------------------------------------------------------------------------------------------


@given(worlds(), st.sampled_from([1, 2, 3, 1000]), st.integers(1, 4))
@settings(max_examples=60)
def test_searches_find_what_brute_force_finds(world: World, capacity: int, distance: int) -> None:
    trace, view = world.trace, View(world.trace, world.work)
    store = ExpertMaps([trace], capacity, distance)
    assert len(store.maps) == min(capacity, int((trace.phase == DECODE).sum()))
    points = list(range(1, trace.n_layers + 1))
    near, likeness = store.semantic(view)
    later, trust = store.trajectory(view, points)
    full = dense(trace)
    for i, row in enumerate(world.work.schedule.rows[view.decoding].tolist()):
        assert trace.embeddings is not None
        index = int(np.searchsorted(trace.decode_rows, row))
        found, score = nearest(trace.embeddings[index, 0].tolist(), store.embeddings.tolist())
        assert (near[i], likeness[i]) == (found, pytest.approx(score, abs=1e-15))
        for column, point in enumerate(points):
            entries = store.maps[:, :point].reshape(len(store.maps), -1).tolist()
            found, score = nearest(full[row, :point].ravel().tolist(), entries)
            assert (later[i, column], trust[i, column]) == (found, pytest.approx(score, abs=1e-15))


@given(worlds())
@settings(max_examples=40)
def test_scores_are_the_probabilities_of_the_map_found(world: World) -> None:
    view = View(world.trace, world.work)
    store = ExpertMaps([world.trace])
    for point in range(view.n_layers):
        layers = range(point, view.n_layers)
        scores = store.scores(view, point, layers)
        found = store.trajectory(view, [point])[0][:, 0] if point else store.semantic(view)[0]
        assert scores.shape == (len(found), len(layers), view.n_experts)
        for i, entry in enumerate(found.tolist()):
            expected = store.maps[entry][point:] / 255 if entry >= 0 else np.zeros(scores.shape[1:])
            assert scores[i] == pytest.approx(expected, abs=1e-7)


def test_a_store_of_nothing_predicts_nothing() -> None:
    trace = make_trace(
        [[[0]], [[1]]], n_experts=2, phase=[0, 1], probs=np.array([[[200, 55]], [[55, 200]]], np.uint8),
        embeddings=np.ones((1, 2, 2), np.int8), prefill_embeddings=np.ones((1, 2), np.int8),
        embedding_scale=np.ones(2, np.float32), meta=ABOUT,
    )  # fmt: skip
    prompt = make_trace(
        [[[0]]], n_experts=2, phase=[0], probs=np.array([[[200, 55]]], np.uint8), meta=ABOUT,
        embeddings=np.ones((0, 2, 2), np.int8), prefill_embeddings=np.ones((1, 2), np.int8),
        embedding_scale=np.ones(2, np.float32),
    )  # fmt: skip
    model, machine = toy_model(1, 2, 1, (1000,)), toy_machine()
    work = workload(trace, model, machine, batched(trace, 1))
    assert not ExpertMaps([prompt]).scores(View(trace, work), 0, [0]).any()
    world = World(trace, model, machine, 1, work, 4000, profile=prompt)
    plan = world.plan("finemoe")
    assert plan.requests is not None
    assert not len(plan.requests.call)


def test_a_profile_without_probabilities_is_named() -> None:
    trace = make_trace([[0]], n_experts=2)
    with pytest.raises(InputError, match="profile trace: no array probs"):
        iterations([trace])


# -- replacement -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 6), st.integers(0, 99))
def test_the_newest_takes_the_place_of_the_most_redundant(rows: int, capacity: int, distance: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    embeddings = rng.integers(-9, 10, (rows, 5)).astype(np.int8)
    maps = rng.integers(0, 200, (rows, 4, 3)).astype(np.uint8)
    held: list[int] = []
    for new in range(rows):
        if len(held) < capacity:
            held.append(new)
            continue
        weight = min(distance, 4) / 4
        redundancy = [
            weight * cosine(embeddings[new].tolist(), embeddings[old].tolist())
            + (1 - weight) * cosine(maps[new].ravel().tolist(), maps[old].ravel().tolist())
            for old in held
        ]
        held[redundancy.index(max(redundancy))] = new
    kept_embeddings, kept_maps = kept(embeddings, maps, capacity, distance)
    assert kept_embeddings.tolist() == embeddings[held].tolist()
    assert kept_maps.tolist() == maps[held].tolist()


def test_blocks_of_newcomers_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    embeddings, maps = rng.integers(-9, 10, (300, 5)).astype(np.int8), rng.integers(0, 9, (300, 4, 3)).astype(np.uint8)
    whole = kept(embeddings, maps, 20, 2)
    monkeypatch.setattr("sim.predictors.expert_maps.ROWS", 7)
    again = kept(embeddings, maps, 20, 2)
    assert all((a == b).all() for a, b in zip(whole, again, strict=True))


# -- the threshold -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=8),
    st.floats(-1, 1.0000001),
    st.integers(1, 9),
)
def test_the_smallest_set_that_reaches_the_threshold_is_taken(probs: list[int], score: float, least: int) -> None:
    delta = min(max(1 - score, 0), 1)
    order = sorted(range(len(probs)), key=lambda e: (-probs[e], e))
    size = next(n for n in range(1, len(probs) + 1) if sum(probs[e] for e in order[:n]) >= delta * sum(probs))
    wanted = {e for e in order[: max(size, least)] if probs[e] > 0}
    taken = chosen(np.array([probs], np.uint8), np.array([score]), least)
    assert set(np.flatnonzero(taken[0]).tolist()) == wanted


def test_the_less_similar_the_more_is_fetched() -> None:
    probs = np.array([[120, 60, 40, 35, 0]], np.uint8)
    sizes = [int(chosen(probs, np.array([score]), 2).sum()) for score in (1, 0.5, 0.29, 0.1, 0, -1)]
    assert sizes == [2, 2, 3, 4, 4, 4]


# -- the policy --------------------------------------------------------------------------------------------------------


def searched(world: World, distance: int) -> dict[tuple[int, int, int], list[tuple[list[int], float]]]:
    """For each (step, point, layer) that is predicted the probabilities found and the similarity, a row of the step."""
    trace, schedule = world.trace, world.work.schedule
    embeddings, maps = kept(*iterations([trace]), 1000, distance)
    full, found = dense(trace), defaultdict(list)
    for step in np.flatnonzero(schedule.phase == DECODE).tolist():
        for row in schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist():
            for layer in range(trace.n_layers):
                point = max(layer - distance + 1, 0)
                if point:
                    entries = maps[:, :point].reshape(len(maps), -1).tolist()
                    entry, score = nearest(full[row, :point].ravel().tolist(), entries)
                else:
                    index = int(np.searchsorted(trace.decode_rows, row))
                    assert trace.embeddings is not None
                    entry, score = nearest(trace.embeddings[index, 0].tolist(), embeddings.tolist())
                if entry >= 0:
                    found[step, point, layer].append((maps[entry, layer].tolist(), score))
    return found


@given(worlds(), st.integers(1, 3))
@settings(max_examples=40)
def test_prefetches_and_values_are_those_of_brute_force(world: World, distance: int) -> None:
    n_layers, n_experts, least = world.work.n_layers, world.work.n_experts, world.model.top_k
    wishes: dict[tuple[int, int, int], int] = {}
    valued = {}
    for (step, point, layer), rows in searched(world, distance).items():
        valued[step * (n_layers + 1) + point, layer] = np.max([probs for probs, _ in rows], axis=0).tolist()
        for probs, score in rows:
            taken = chosen(np.array([probs], np.uint8), np.array([score]), least)[0]
            for expert in np.flatnonzero(taken).tolist():
                key = (step * (n_layers + 1) + point, step * n_layers + layer, layer * n_experts + expert)
                priority = -(probs[expert] * finemoe.SCALE // (layer + 1 - point))
                wishes[key] = min(wishes.get(key, 0), priority)
    plan = world.plan("finemoe", {"distance": distance})
    requests, values = plan.requests, plan.values
    assert requests is not None and values is not None
    assert plan.eviction == "score-lfu", "the largest 1 / (p x frequency) goes"
    moment = np.repeat(requests.moment, np.diff(requests.offsets))
    made = zip(moment.tolist(), requests.call.tolist(), requests.expert.tolist(), strict=True)
    assert dict(zip(made, requests.priority.tolist(), strict=True)) == wishes
    said = zip(values.moment.tolist(), values.layer.tolist(), strict=True)
    assert dict(zip(said, values.table[values.index].tolist(), strict=True)) == valued


@given(worlds(), st.integers(1, 3))
@settings(max_examples=30)
def test_each_search_is_charged_beside_the_step(world: World, distance: int) -> None:
    work, setting = world.work, world.setting
    plan = world.plan("finemoe", {"distance": distance})
    entries = int((world.trace.phase == DECODE).sum())
    cost = {}
    for step in np.flatnonzero(work.schedule.phase == DECODE).tolist():
        rows = int(work.schedule.offsets[step + 1] - work.schedule.offsets[step])
        for point in {max(layer - distance + 1, 0) for layer in range(work.n_layers)}:
            width = point * work.n_experts if point else setting.model.hidden
            cost[step * (work.n_layers + 1) + point] = setting.software.search_ns(
                setting.hardware, entries, width, rows
            )
    assert not plan.prediction.critical
    assert dict(zip(plan.prediction.moment.tolist(), plan.prediction.ns.tolist(), strict=True)) == cost
    numbers = entries * (setting.model.hidden + work.n_layers * work.n_experts)
    assert plan.gpu_bytes == setting.software.table_bytes(numbers)


@pytest.mark.parametrize(
    ("name", "distance"), [("mixtral-8x7b", 3), ("phi-3.5-moe", 4), ("qwen1.5-moe-a2.7b", 6), ("any", 3)]
)
def test_each_models_distance_is_the_papers(name: str, distance: int) -> None:
    rng = np.random.default_rng(0)
    trace = make_trace(
        rng.random((4, 8, 4)).argsort(axis=2)[:, :, :2], n_experts=4,
        embeddings=rng.integers(-9, 10, (4, 9, 2)).astype(np.int8), embedding_scale=np.ones(9, np.float32),
        probs=rng.integers(0, 200, (4, 8, 4)).astype(np.uint8), meta=ABOUT,
    )  # fmt: skip
    model, machine = dataclasses.replace(toy_model(8, 4, 2, (1_000,) * 8), name=name), toy_machine()
    world = World(trace, model, machine, 1, workload(trace, model, machine, batched(trace, 1)), 99_000)
    made, said = (world.plan("finemoe", values).prediction.moment.tolist() for values in ({}, {"distance": distance}))
    assert made == said != world.plan("finemoe", {"distance": distance + 1}).prediction.moment.tolist()


# -- wishes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-3, 3)), max_size=30))
def test_wishes_of_rows_become_one_request_each_at_the_best_priority(wishes: list[tuple[int, int, int]]) -> None:
    best: dict[tuple[int, int], int] = {}
    for moment, expert, priority in wishes:
        best[moment, expert] = min(best.get((moment, expert), 9), priority)
    columns = np.array(wishes, np.int64).reshape(-1, 3).T
    requests = Requests.merged(columns[0], columns[1] + 10, columns[1], columns[2])
    moment = np.repeat(requests.moment, np.diff(requests.offsets)).tolist()
    made = list(zip(moment, requests.expert.tolist(), requests.priority.tolist(), strict=True))
    assert sorted(made) == sorted((m, e, p) for (m, e), p in best.items())
    assert [(m, p, e) for m, e, p in made] == sorted((m, p, e) for m, e, p in made)
    assert requests.call.tolist() == (requests.expert + 10).tolist()
