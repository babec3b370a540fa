"""Activation matrices: matching beside brute force, the collection, and what MoE-Infinity makes of them."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.policies import moe_infinity
from sim.predictors.activations import ActivationMatrices, clustered, matrices
from sim.view import View
from sim.workload import batched, workload
from tests.support.strategies import make_trace
from tests.support.worlds import World, toy_machine, toy_model, worlds
from traces.schema import DECODE
from traces.trace import Trace

# -- brute force -------------------------------------------------------------------------------------------------------


def activations(trace: Trace, rows: list[int], until: int) -> Counter[int]:
    """Counts of flat experts that ``rows`` take; of the last row only in layers below ``until``."""
    counts: Counter[int] = Counter()
    for row in rows:
        for layer in range(until if row == rows[-1] else trace.n_layers):
            for expert in trace.experts[row, layer].tolist():
                if expert >= 0:
                    counts[layer * trace.n_experts + expert] += 1
    return counts


def nearest(running: Counter[int], collection: list[Counter[int]]) -> int:
    """Index of the matrix of the largest cosine, the first of equals; -1 if there is none above 0."""
    best, found = 0.0, -1
    for index, entry in enumerate(collection):
        product = sum(count * entry[expert] for expert, count in running.items())
        cosine = product / math.sqrt(sum(c * c for c in entry.values()))
        if cosine > best:
            best, found = cosine, index
    return found


def stored(trace: Trace) -> list[Counter[int]]:
    """The matrices of all sequences, none of nothing."""
    every = [np.flatnonzero(trace.sequence == s).tolist() for s in range(trace.n_sequences)]
    return [counts for rows in every if (counts := activations(trace, rows, trace.n_layers))]


def match_of(trace: Trace, row: int, point: int, request: bool = True) -> int:
    """What the row of a decode step matches at ``point``, in the collection of the whole trace."""
    first = int(np.searchsorted(trace.sequence, trace.sequence[row])) if request else row
    return nearest(activations(trace, [*range(first, row + 1)], point), stored(trace))


# -- the predictor -----------------------------------------------------------------------------------------------------


@given(worlds(), st.booleans())
@settings(max_examples=60)
def test_matches_are_those_of_brute_force(world: World, request: bool) -> None:
    trace, view = world.trace, View(world.trace, world.work)
    predictor = ActivationMatrices([trace], scope="request" if request else "iteration")
    found = predictor.matches(view, view.n_layers)
    rows = world.work.schedule.rows[view.decoding].tolist()
    expected = [[match_of(trace, row, point, request) for point in range(view.n_layers + 1)] for row in rows]
    assert found.tolist() == (expected or np.zeros((0, view.n_layers + 1)).tolist())


@given(worlds())
@settings(max_examples=40)
def test_scores_are_shares_of_the_matched_row(world: World) -> None:
    trace, view = world.trace, View(world.trace, world.work)
    predictor = ActivationMatrices([trace])
    collection, rows = stored(trace), world.work.schedule.rows[view.decoding].tolist()
    for point in range(view.n_layers):
        layers = list(range(point, view.n_layers))
        scores = predictor.scores(view, point, layers)
        assert scores.dtype == np.float32
        for i, row in enumerate(rows):
            match = match_of(trace, row, point)
            for j, layer in enumerate(layers):
                ids = range(layer * trace.n_experts, (layer + 1) * trace.n_experts)
                counts = [collection[match][e] if match >= 0 else 0 for e in ids]
                total = sum(counts) or 1
                assert scores[i, j].tolist() == np.array([c / total for c in counts], np.float32).tolist()


def test_a_matrix_counts_prompt_and_decode() -> None:
    trace = make_trace([[[0, 1]], [[1, -1]], [[2, 0]]], n_experts=3, sequence=[0, 0, 1], phase=[0, 1, 1])
    assert matrices(trace).tolist() == [[1, 2, 0], [1, 0, 1]]


def test_history_tells_requests_apart_before_the_first_layer_does() -> None:
    # Two kinds of request share their first layer; what they took before tells which kind it is.
    routes = [[[0], [1]]] * 4 + [[[0], [2]]] * 4
    profile = make_trace(routes, n_experts=3, sequence=[0] * 4 + [1] * 4)
    running = make_trace([[[0], [2]], [[0], [2]]], n_experts=3, phase=[0, 1])
    model, machine = toy_model(2, 3, 1, (1000, 1000)), toy_machine()
    view = View(running, workload(running, model, machine, batched(running, 1)))
    assert ActivationMatrices([profile]).matches(view, 1).tolist() == [[1, 1]]
    token = ActivationMatrices([profile], scope="iteration")
    assert token.matches(view, 1).tolist() == [[-1, 0]], "a tie goes to the first, and nothing is known before"
    assert token.scores(view, 0, [0, 1]).tolist() == [[[0, 0, 0], [0, 0, 0]]]


# -- the collection ----------------------------------------------------------------------------------------------------


def test_as_many_requests_as_there_is_room_for_are_kept_as_they_are() -> None:
    found = np.array([[1.0, 0, 2], [0, 3, 0], [1, 1, 1]])
    assert clustered(found, 3, 0).tolist() == found.tolist()
    assert clustered(np.vstack([found, np.zeros(3)]), 3, 0).tolist() == found.tolist(), "one of nothing says nothing"


def test_clusters_are_sums_of_like_requests() -> None:
    rng = np.random.default_rng(0)
    kinds = np.array([[9, 1, 0, 0], [0, 0, 9, 1], [0, 9, 0, 1]])
    found = np.concatenate([kinds * scale for scale in rng.integers(1, 50, 20)]).astype(float)
    for seed in range(5):
        centres = clustered(found, 3, seed)
        assert centres.sum(axis=0).tolist() == found.sum(axis=0).tolist(), "every request is in one cluster"
        assert len(centres) <= 3
        assert centres.tolist() == clustered(found, 3, seed).tolist()
    # No cluster is mixed where the seeds hit all kinds.
    best = max((clustered(found, 3, seed) for seed in range(20)), key=len)
    assert sorted((best > 0).tolist()) == sorted((kinds > 0).tolist())


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 99))
def test_clusters_divide_all_requests_among_them(rows: int, capacity: int, seed: int) -> None:
    found = np.random.default_rng(seed).integers(0, 4, (rows, 5)).astype(float)
    centres = clustered(found, capacity, seed)
    assert 1 <= len(centres) <= max(capacity, 1)
    assert np.isfinite(centres).all()
    total = found[found.any(axis=1)].sum(axis=0)
    assert centres.sum(axis=0).tolist() == total.tolist()


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_equal_requests_make_one_cluster(capacity: int) -> None:
    found = np.tile([[2.0, 0, 1]], (9, 1))
    assert clustered(found, capacity, 0).tolist() == [[18, 0, 9]]


def test_a_profile_of_nothing_predicts_nothing() -> None:
    profile = make_trace([[[-1]], [[-1]]], n_experts=3)
    running = make_trace([[[0]], [[1]]], n_experts=3)
    model, machine = toy_model(1, 3, 1, (1000,)), toy_machine()
    view = View(running, workload(running, model, machine, batched(running, 1)))
    predictor = ActivationMatrices([profile])
    assert predictor.matches(view, 1).tolist() == [[-1, -1]] * 2
    assert not predictor.scores(view, 0, [0]).any()


# -- the policy --------------------------------------------------------------------------------------------------------


def ratios(
    world: World, rows: list[int], point: int, request: bool = True
) -> tuple[tuple[int, ...], list[list[float]] | None]:
    """What the rows of a step match together, and each expert's share of its layer's row, or None for no match."""
    trace = world.trace
    matched = tuple(sorted(match_of(trace, row, point, request) for row in rows))
    if max(matched) < 0:
        return matched, None
    collection = stored(trace)
    counts = sum((collection[m] for m in matched if m >= 0), Counter())
    table = []
    for layer in range(trace.n_layers):
        row = [counts[layer * trace.n_experts + e] for e in range(trace.n_experts)]
        table.append([c / (sum(row) or 1) for c in row])
    return matched, table


@given(worlds(), st.sampled_from([0, 1, 3]), st.sampled_from(["request", "iteration"]))
@settings(max_examples=40)
def test_prefetches_by_ratio_times_proximity(world: World, most: int, scope: str) -> None:
    schedule, n_layers, n_experts = world.work.schedule, world.work.n_layers, world.work.n_experts
    expected = []
    for step in np.flatnonzero(schedule.phase == DECODE).tolist():
        rows = schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist()
        before = None
        for point in range(1, n_layers):
            matched, table = ratios(world, rows, point, scope == "request")
            wishes = []
            for layer in range(point, n_layers) if table else ():
                for expert in range(n_experts):
                    weight = table[layer][expert] * (1 - (layer - (point - 1)) / n_layers)  # type: ignore[index]
                    flat = layer * n_experts + expert
                    wishes.append((-int(weight * moe_infinity.SCALE), flat, step * n_layers + layer))
            queue = sorted(wish for wish in wishes if wish[0] < 0)
            for priority, flat, call in queue[: most or None] if matched == before else queue:
                expected.append((step * (n_layers + 1) + point, call, flat, priority))
            before = matched
    requests = world.plan("moe-infinity", {"most": most, "scope": scope}).requests
    assert requests is not None
    moment = np.repeat(requests.moment, np.diff(requests.offsets))
    made = zip(
        moment.tolist(), requests.call.tolist(), requests.expert.tolist(), requests.priority.tolist(), strict=True
    )
    assert list(made) == expected


@given(worlds())
@settings(max_examples=40)
def test_values_are_ratio_times_nearness_to_the_beginning(world: World) -> None:
    schedule, n_layers, n_experts = world.work.schedule, world.work.n_layers, world.work.n_experts
    values = world.plan("moe-infinity").values
    assert values is not None
    inforce = dict(zip(values.moment.tolist(), values.index.tolist(), strict=True))
    now = None
    for step in np.flatnonzero(schedule.phase == DECODE).tolist():
        rows = schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist()
        for point in range(1, n_layers):
            now = inforce.get(step * (n_layers + 1) + point, now)
            table = ratios(world, rows, point)[1]
            if table is None:
                continue
            assert now is not None
            for layer in range(n_layers):
                kept = [(p + moe_infinity.EPS) / (1 + n_experts * moe_infinity.EPS) for p in table[layer]]
                wanted = [int(k * (1 - layer / n_layers) * moe_infinity.SCALE) for k in kept]
                assert values.table[now].reshape(n_layers, n_experts)[layer].tolist() == wanted


@given(worlds())
@settings(max_examples=30)
def test_each_match_is_charged_at_the_collections_size(world: World) -> None:
    work, setting = world.work, world.setting
    plan = world.plan("moe-infinity")
    entries = max(len(stored(world.trace)), 1)
    width = work.n_layers * work.n_experts
    decode = np.flatnonzero(work.schedule.phase == DECODE)
    rows = np.diff(work.schedule.offsets)[decode]
    assert plan.prediction.critical
    assert len(plan.prediction.moment) == len(decode) * (work.n_layers - 1)
    expected = [setting.software.search_ns(setting.hardware, entries, width, n) for n in rows.tolist()]
    assert plan.prediction.ns.tolist() == np.repeat(expected, work.n_layers - 1).tolist()
    assert plan.gpu_bytes == setting.software.table_bytes(entries * width)
    few = world.plan("moe-infinity", {"capacity": 1})
    assert few.gpu_bytes == setting.software.table_bytes(width), "a collection of one takes the memory of one"
