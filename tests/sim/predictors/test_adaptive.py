"""Where to predict: the objective by hand, the shortest path against all sets, what is estimated on samples."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predictors.adaptive import Estimate, estimate, held_out, missed, objective, sampled, shortest
from sim.predictors.base import top
from sim.predictors.matching import Matching
from sim.predictors.neighbours import Neighbours
from sim.predictors.prototypes import Prototypes
from sim.predictors.table import tables
from tests.support.strategies import make_trace, traces
from traces.trace import Trace

costs = st.floats(0, 1e9, allow_nan=False)
misses = st.lists(st.floats(0, 1), min_size=1, max_size=8).map(np.array)
by_layer = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).random((seed % 7 + 1, seed % 7 + 1)))


def expected_ns(layers: tuple[int, ...], miss: np.ndarray, predict_ns: float, load_ns: float) -> float:
    """The paper's sum, term by term."""
    total, last = 0.0, 0
    for layer in range(len(miss)):
        last = layer if layer in layers else last
        chance = miss[last, layer] if miss.ndim == 2 else miss[layer - last]
        total += (layer in layers) * predict_ns + chance * load_ns
    return total


def every_set(n_layers: int) -> list[tuple[int, ...]]:
    others = range(1, n_layers)
    return [(0, *chosen) for n in range(n_layers) for chosen in itertools.combinations(others, n)]


def test_the_objective_by_hand() -> None:
    miss = np.array([0.1, 0.2, 0.4])
    assert objective((0,), miss, 10, 100) == pytest.approx(10 + 10 + 20 + 40)
    assert objective((0, 2), miss, 10, 100) == pytest.approx(20 + 10 + 20 + 10)
    # Once costs 80; twice 20 + 10 + 10 + 20; three times 30 + 30, the same: of equals the fewest.
    assert shortest(miss, 10, 100) == (0, 1)
    assert objective((0, 1), miss, 10, 100) == pytest.approx(60) == objective((0, 1, 2), miss, 10, 100)


@given(misses | by_layer, costs, costs)
@settings(max_examples=300)
def test_the_shortest_path_is_the_best_of_all_sets(miss: np.ndarray, predict_ns: float, load_ns: float) -> None:
    best = shortest(miss, predict_ns, load_ns)
    assert best[0] == 0
    assert list(best) == sorted(set(best))
    reached = objective(best, miss, predict_ns, load_ns)
    values = {layers: expected_ns(layers, miss, predict_ns, load_ns) for layers in every_set(len(miss))}
    assert reached == pytest.approx(values[best], rel=1e-9, abs=1e-6)
    assert reached == pytest.approx(min(values.values()), rel=1e-9, abs=1e-6)


counts = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).integers(0, 5, (seed % 4, seed // 4 % 7 + 1, seed // 4 % 7 + 1))
)
"""Of a few tokens, experts that were not predicted."""


@given(counts, costs, costs)
@settings(max_examples=50)
def test_sampled_layers_are_those_that_most_tokens_would_have(
    wrong: np.ndarray, predict_ns: float, load_ns: float
) -> None:
    found = Estimate(wrong, np.full(wrong.shape, 4))
    chosen = sampled(found, predict_ns, load_ns)
    assert chosen[0] == 0
    assert list(chosen) == sorted(set(chosen))
    assert objective(shortest(found.by_layer(), predict_ns, load_ns), found.by_layer(), predict_ns, load_ns) <= (
        objective(chosen, found.by_layer(), predict_ns, load_ns) * (1 + 1e-9) + 1e-6
    ), "the exact optimum over all tokens together"
    sets = [shortest(token / 4, predict_ns, load_ns) for token in wrong]
    if sets:
        assert len(chosen) == round(sum(map(len, sets)) / len(sets))
        having = [sum(layer in one for one in sets) for layer in range(wrong.shape[1])]
        left = [having[layer] for layer in range(wrong.shape[1]) if layer not in chosen]
        assert min(having[layer] for layer in chosen) >= max(left, default=0)


def test_free_predictions_are_made_everywhere_and_dear_ones_once() -> None:
    miss = np.linspace(0.1, 0.9, 32)
    away = np.maximum(np.arange(32) - np.arange(32)[:, None], 0)
    found = Estimate(np.stack([away, 2 * away]), np.full((2, 32, 32), 99))
    assert shortest(miss, 0, 1000) == sampled(found, 0, 1000) == tuple(range(32))
    assert shortest(miss, 1e9, 1000) == sampled(found, 1e9, 1000) == (0,)
    # A rise of a a layer and even spacing H: H is near sqrt(2 predict / (a load)).
    layers = shortest(0.1 + 0.01 * np.arange(32), 1250, 10_000)
    assert set(np.diff(layers)) <= {4, 5, 6}
    assert shortest(np.ones(32), 1, 1000) == (0,), "what is never right needs no repeating"


# -- what is estimated -------------------------------------------------------------------------------------------------


@given(traces(optional=True), st.integers(0, 9))
def test_sequences_are_for_tables_or_for_estimating(trace: Trace, seed: int) -> None:
    rest, out = held_out([trace], seed)
    ids = [[str(i) for part in parts for i in part.sequence_id] for parts in (rest, out)]
    assert sorted(ids[0] + ids[1]) == sorted(trace.sequence_id.tolist())
    assert set(trace.domain.tolist()) == {str(d) for part in rest for d in part.domain}, "no domain is without a table"
    for domain in np.unique(trace.domain).tolist():
        count = int((trace.domain == domain).sum())
        away = sum(int((part.domain == domain).sum()) for part in out)
        assert away == (0 if count == 1 else -(-count // 5))


def of(routes: np.ndarray, keys: np.ndarray, phase: list[int], n_experts: int = 8) -> Trace:
    decode = np.array(phase) == 1
    return make_trace(
        routes, n_experts=n_experts, phase=phase, embeddings=keys[decode], prefill_embeddings=keys[~decode, 0],
        embedding_scale=np.ones(keys.shape[1], np.float32), split="profile",
        meta={"embedding": {"basis_sha256": "0", "dims": keys.shape[2], "bits": 8, "prefill_layer": 0}},
    )  # fmt: skip


def neighbours(trace: Trace, votes: int = 1) -> Neighbours:
    found = tables([trace], 100)
    matching = Matching([Prototypes.build(t.keys[:, 0], 4, 0) for t in found], 2)
    return Neighbours(found, matching, votes=votes, keys="layer", level=0, n_experts=trace.n_experts)


def test_the_chance_of_a_misprediction_by_hand() -> None:
    # One prompt token, two decoded ones, three layers; embeddings tell the two apart at every layer.
    keys = np.array([[[1, 1]] * 4, [[9, 0]] * 4, [[0, 9]] * 4], np.int8)
    routes = np.array([[[0, 1]] * 3, [[0, 1], [2, 3], [4, 5]], [[1, 2], [3, 4], [5, 6]]])
    predictor = neighbours(of(routes, keys, [0, 1, 1]))
    assert estimate(predictor, [of(routes, keys, [0, 1, 1])], 2, 0).by_offset().tolist() == [0, 0, 0]
    # Another run whose first token goes elsewhere in the last layer: one expert of 4 (or 2) is missed there. Offset 0
    # is seen at layers 0, 1, 2; 1 at 1 and 2; 2 at 2 alone.
    other = routes.copy()
    other[1, 2] = [4, 7]
    found = estimate(predictor, [of(other, keys, [0, 1, 1])], 2, 0)
    assert found.by_offset().tolist() == pytest.approx([1 / 12, 1 / 8, 1 / 4])
    assert np.triu(found.by_layer()).tolist() == [[0, 0, 1 / 4]] * 3
    assert estimate(predictor, [], 2, 0).by_offset().tolist() == [1, 1, 1], "nothing to estimate on"


@given(traces(optional=True, prefill=True), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=30)
def test_it_is_the_share_of_experts_that_were_not_predicted(trace: Trace, fetch: int, seed: int) -> None:
    predictor = neighbours(trace, votes=2)
    found = estimate(predictor, [trace], fetch, seed).by_offset()
    rows, n_layers = trace.decode_rows, trace.n_layers
    assert trace.embeddings is not None
    assert trace.prefill_embeddings is not None
    prompts = {s: trace.prefill_embeddings[trace.sequence[trace.prefill_rows] == s] for s in range(trace.n_sequences)}
    wrong, needed = [0] * n_layers, [0] * n_layers
    for number, row in enumerate(rows.tolist()):
        chosen = np.zeros((1, len(predictor.tables)), bool)
        chosen[0, predictor.matching.consulted(prompts[int(trace.sequence[row])])] = True
        for point in range(n_layers):
            votes = predictor.vote(trace.embeddings[number : number + 1, point], chosen, point, range(point, n_layers))
            best = top(votes, fetch)[0]
            for layer in range(point, n_layers):
                for expert in trace.experts[row, layer].tolist():
                    if expert >= 0:
                        needed[layer - point] += 1
                        wrong[layer - point] += expert not in best[layer - point].tolist()
    assert found.tolist() == pytest.approx([w / n if n else 1 for w, n in zip(wrong, needed, strict=True)])


def test_missed_leaves_out_dropped_experts() -> None:
    predicted, taken = np.array([[[1, 2], [-1, -1]]]), np.array([[[2, 3], [-1, 0]]])
    assert missed(predicted, taken).tolist() == [[[False, True], [False, True]]]
