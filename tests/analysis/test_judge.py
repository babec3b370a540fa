"""Predictors are judged by what they say and what was taken, nothing else."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.judge import STEP_BEGIN, judge, plain_view
from sim.predictors import top
from sim.view import View
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.trace import Trace


def random_trace(seed: int, layers: int = 4, experts: int = 8, top_k: int = 2) -> Trace:
    rng = np.random.default_rng(seed)
    routes = rng.random((12, layers, experts)).argsort(axis=2)[:, :, :top_k]
    trace = make_trace(routes, n_experts=experts, sequence=[0] * 6 + [1] * 6, phase=[0, 0, 1, 1, 1, 1] * 2)
    trace.meta["model"] |= toy_meta(layers)
    return trace


class Told:
    """Says what it was given, for decode rows in their order, whatever the point."""

    name = "told"

    def __init__(self, scores: np.ndarray) -> None:
        self.table = scores

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        assert all(layer >= point for layer in layers)
        return self.table[:, list(layers)]


def decoded(trace: Trace) -> np.ndarray:
    return trace.experts[trace.decode_rows]


def one_hot(trace: Trace) -> np.ndarray:
    routes = decoded(trace)
    scores = np.zeros((*routes.shape[:2], trace.n_experts), np.float32)
    np.put_along_axis(scores, routes.astype(np.int64), 1, axis=2)
    return scores


@given(seed=st.integers(0, 1000))
def test_one_who_knows_is_right_everywhere_and_one_who_says_the_opposite_nowhere(seed: int) -> None:
    trace = random_trace(seed)
    view, truth = plain_view(trace), one_hot(trace)
    knows, lies = judge(Told(truth), view, decoded(trace)), judge(Told(1 - truth), view, decoded(trace))
    for horizon in (1, 2, 4, STEP_BEGIN):
        assert (knows.rate("recall", horizon), knows.rate("precision", horizon)) == (1, 1)
        assert (lies.rate("recall", horizon), lies.rate("precision", horizon)) == (0, 0)
    # No layer is eight after another in a model of four.
    assert knows.rate("recall", 8) is None


@given(seed=st.integers(0, 1000))
def test_counts_equal_those_of_a_loop(seed: int) -> None:
    trace = random_trace(seed)
    rng = np.random.default_rng(seed + 1)
    table = np.round(rng.random((8, 4, 8)) - 0.6, 1).astype(np.float32)
    result = judge(Told(table), plain_view(trace), decoded(trace), horizons=(1, 3))
    for row, horizon in enumerate(result.horizons):
        for layer in range(4):
            possible = horizon == STEP_BEGIN or layer - horizon + 1 >= 0
            right = named = used = 0
            for token, route in enumerate(decoded(trace)[:, layer]) if possible else ():
                said = [e for e in top(table[token, layer], 2).tolist() if e >= 0]
                right += len(set(said) & set(route.tolist()))
                named += len(said)
                used += len(route)
            assert (result.right[row, layer], result.named[row, layer], result.used[row, layer]) == (right, named, used)


def test_one_who_says_nothing_has_no_precision() -> None:
    trace = random_trace(0)
    silent = judge(Told(np.zeros((8, 4, 8), np.float32)), plain_view(trace), decoded(trace))
    assert silent.rate("precision", 1) is None
    assert silent.rate("recall", 1) == 0
    assert silent.by_layer("recall", 4) == [None, None, None, 0.0]
    assert silent.by_layer("precision", 4) == [None] * 4
