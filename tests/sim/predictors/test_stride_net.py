"""Learned predictors: exact after rounding, right gradients, able to learn; and what ProMoE makes of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.predictors import stride_net
from sim.predictors.base import top
from sim.predictors.stride_net import StrideNets, _gradients, _targets, inputs, rounded
from sim.view import View
from sim.workload import Schedule, batched, workload
from tests.support.strategies import make_trace
from tests.support.worlds import World, toy_machine, toy_model, worlds
from traces.schema import DECODE
from traces.trace import Trace

ABOUT = {"embedding": {"basis_sha256": "0", "dims": 6, "bits": 8, "prefill_layer": 0}}


def learnable(rows: int, seed: int) -> Trace:
    """Three layers whose experts follow from the embedding two levels before: 2 of 8, by a fixed random matrix."""
    rng = np.random.default_rng(seed)
    matrix = np.random.default_rng(99).standard_normal((3, 6, 8))
    x = rng.standard_normal((rows, 6))
    embeddings = np.clip(np.rint(x[:, None, :] * 20), -127, 127).astype(np.int8).repeat(4, axis=1)
    routes = np.stack([(x @ matrix[layer]).argsort(axis=1)[:, -2:] for layer in range(3)], axis=1)
    return make_trace(
        routes, n_experts=8, embeddings=embeddings, prefill_embeddings=np.zeros((0, 6), np.int8),
        embedding_scale=np.ones(4, np.float32), meta=ABOUT,
    )  # fmt: skip


def world_of(trace: Trace, profile: Trace, batch: int = 1) -> World:
    model = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (1000,) * trace.n_layers)
    machine = toy_machine()
    work = workload(trace, model, machine, batched(trace, batch))
    return World(trace, model, machine, batch, work, 12_000, profile=profile)


# -- the nets ----------------------------------------------------------------------------------------------------------


def test_nets_learn_what_can_be_learned() -> None:
    world = world_of(learnable(200, 1), learnable(2000, 0))
    view = View(world.trace, world.work)
    nets = StrideNets([learnable(2000, 0)], horizons=3)
    untrained = StrideNets([learnable(2000, 0)], horizons=3, epochs=0)

    def recall(which: StrideNets, point: int, layer: int) -> float:
        best = top(which.scores(view, point, [layer])[:, 0], 2)
        return float((best[:, :, None] == world.trace.experts[:, layer, None, :]).any(axis=2).mean())

    for point, layer in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]:
        assert recall(nets, point, layer) > 0.85
        assert recall(untrained, point, layer) < 0.5


@given(worlds(), st.integers(1, 3))
@settings(max_examples=30)
def test_one_row_and_many_get_the_same_bits(world: World, horizons: int) -> None:
    nets = StrideNets([world.trace], horizons, epochs=2, seed=3)
    again = StrideNets([world.trace], horizons, epochs=2, seed=3)
    schedule = world.work.schedule
    view = View(world.trace, world.work)
    for point in range(view.n_layers):
        layers = range(point, view.n_layers)
        scores = nets.scores(view, point, layers)
        assert scores.tobytes() == again.scores(view, point, layers).tobytes()
        assert (scores[:, horizons:] == 0).all()
        assert ((scores[:, :horizons] >= 0) & (scores <= 1)[:, :horizons]).all()
        for index, row in enumerate(schedule.rows[view.decoding].tolist()):
            single = Schedule(np.array([DECODE]), np.array([0, 1]), np.array([row]))
            alone = View(world.trace, dataclasses.replace(world.work, schedule=single))
            assert nets.scores(alone, point, layers)[0].tobytes() == scores[index].tobytes()


def test_another_seed_is_another_net() -> None:
    world = world_of(learnable(20, 1), learnable(50, 0))
    view = View(world.trace, world.work)
    one, other = (StrideNets([learnable(50, 0)], seed=seed).scores(view, 0, [0]) for seed in (0, 1))
    assert (one != other).any()


def test_gradients_are_those_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    routes = np.array([[[0, 2], [1, -1]], [[3, 1], [2, 0]], [[1, 0], [3, 2]]])
    x = rng.standard_normal((2, 3, 5))
    weights = [rng.standard_normal(s) for s in ((2, 5, 4), (2, 1, 4), (2, 4, 8), (2, 1, 8))]
    target, counts = _targets(routes, 4, 2)
    # Horizon 1 of layer 0 is layer 0 itself, horizon 2 the next; layer 1 has no next.
    assert target[0, 0].tolist() == [1, 0, 1, 0, 0, 1, 0, 0]
    assert counts[:, 0].tolist() == [[1] * 8, [1] * 4 + [0] * 4]

    def loss() -> float:
        first, bias, second, other = weights
        z = np.maximum(x @ first + bias, 0) @ second + other
        return float((((z + np.sqrt(4 + z * z)) / 2 - target * z) * counts).sum() / x.shape[1])

    for weight, gradient in zip(weights, _gradients(x, target, counts, weights), strict=True):
        assert gradient.shape == weight.shape
        for place in [tuple(rng.integers(0, s) for s in weight.shape) for _ in range(6)]:
            kept, slopes = weight[place], []
            for nudge in (1e-6, -1e-6):
                weight[place] = kept + nudge
                slopes.append(loss())
            weight[place] = kept
            assert gradient[place] == pytest.approx((slopes[0] - slopes[1]) / 2e-6, abs=1e-3)


def test_training_does_not_depend_on_the_order_in_which_products_are_summed() -> None:
    # Hidden units, inputs and rows in another order give sums in another order, as other threads or processors do.
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s) for s in ((2, 48, 64), (2, 1, 64), (2, 64, 80), (2, 1, 80))]
    x = rng.integers(-512, 513, (2, 128, 48)) / 512
    target, counts = rng.integers(0, 2, (2, 128, 80)).astype(float), np.ones((2, 1, 80))
    dims, units, rows = (rng.permutation(n) for n in (48, 64, 128))
    first, bias, second, other = weights
    plain = _gradients(x, target, counts, weights)
    mixed = _gradients(
        x[:, rows][:, :, dims], target[:, rows], counts,
        [first[:, dims][:, :, units], bias[:, :, units], second[:, units], other],
    )  # fmt: skip
    assert (plain[0][:, dims][:, :, units] == mixed[0]).all()
    assert (plain[1][:, :, units] == mixed[1]).all()
    assert (plain[2][:, units] == mixed[2]).all()
    assert (plain[3] == mixed[3]).all()


@given(st.integers(0, 99), st.sampled_from([1e-9, 1e-3, 1.0, 1e6]))
def test_rounded_nets_are_whole_and_small_enough_to_be_exact(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal(s) * size for s in ((2, 48, 256), (2, 1, 256), (2, 256, 16), (2, 1, 16))]
    first, bias, second, other, unit = rounded(weights)
    for part in (first, bias, second, other):
        assert (part == np.rint(part)).all()
    x = np.abs(inputs(rng.integers(-127, 128, (10, 48)).astype(np.int8)))
    hidden = x @ np.abs(first) + np.abs(bias)
    assert (hidden @ np.abs(second) + np.abs(other)).max() < 2.0**53
    assert (unit > 0).all()


def test_rounding_hardly_changes_what_a_net_says() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s) for s in ((2, 48, 64), (2, 1, 64), (2, 64, 16), (2, 1, 16))]
    vectors = rng.integers(-20, 21, (2, 100, 48)).astype(np.int8)
    x = inputs(vectors)
    first, bias, second, other, unit = rounded(weights)
    whole = (np.maximum(x @ first + bias, 0) @ second + other) * unit
    lengths = np.sqrt((vectors.astype(float) ** 2).sum(axis=2, keepdims=True))
    real = np.maximum(vectors / lengths @ weights[0] + weights[1], 0) @ weights[2] + weights[3]
    assert np.abs(whole - real).max() < 0.01 * np.abs(real).max()


def test_zeros_stay_zeros_and_lengths_do_not_matter() -> None:
    direction = [round(stride_net.INPUT * 0.6), round(stride_net.INPUT * 0.8)]
    assert inputs(np.array([[0, 0], [3, 4], [30, 40]], np.int8)).tolist() == [[0, 0], direction, direction]


def test_nothing_to_learn_from_says_nothing_and_no_embeddings_is_refused() -> None:
    trace = learnable(10, 0)
    prompts = dataclasses.replace(
        trace, phase=np.zeros(10, np.uint8), embeddings=np.zeros((0, 4, 6), np.int8),
        prefill_embeddings=np.zeros((10, 6), np.int8),
    )  # fmt: skip
    world = world_of(trace, prompts)
    assert not StrideNets([prompts]).scores(View(trace, world.work), 0, [0]).any()
    requests = world.plan("promoe").requests
    assert requests is not None
    assert not len(requests.call)
    with pytest.raises(InputError, match="profile trace: no array embeddings"):
        StrideNets([make_trace([[0]], n_experts=2)])


# -- the policy --------------------------------------------------------------------------------------------------------


@given(worlds(), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0, 1, 3]))
@settings(max_examples=40)
def test_each_net_asks_for_the_best_experts_of_its_window(world: World, stride: int, window: int, first: int) -> None:
    work, setting = world.work, world.setting
    n_layers, n_experts = work.n_layers, work.n_experts
    given_ = {"stride": stride, "window": window, "first": first, "epochs": 1}
    plan = world.plan("promoe", given_)
    view = View(world.trace, work)
    nets = StrideNets(setting.profile, min(stride + window - 1, n_layers), epochs=1, seed=setting.seed)
    expected: dict[tuple[int, int, int], int] = {}
    points = []
    for point in range(n_layers):
        # The layer at hand is point - 1; at the beginning, everything that no stride reaches from the first layer.
        from_, to = (point - 1 + stride, point - 1 + stride + window) if point else (0, stride + window - 1)
        layers = [layer for layer in range(from_, to) if layer < n_layers]
        points += [point] if layers else []
        for layer in layers:
            best = top(nets.scores(view, point, [layer])[:, 0], first or setting.model.top_k)
            for step, experts in zip(view.step[view.decoding].tolist(), best.tolist(), strict=True):
                call = step * n_layers + layer
                for rank, expert in enumerate(e for e in experts if e >= 0):
                    key = (step * (n_layers + 1) + point, call, layer * n_experts + expert)
                    expected[key] = min(expected.get(key, 2**60), call * n_experts + rank)
    requests = plan.requests
    assert requests is not None
    moment = np.repeat(requests.moment, np.diff(requests.offsets))
    made = zip(moment.tolist(), requests.call.tolist(), requests.expert.tolist(), strict=True)
    assert dict(zip(made, requests.priority.tolist(), strict=True)) == expected
    decode = np.flatnonzero(work.schedule.phase == DECODE)
    rows = np.diff(work.schedule.offsets)[decode].tolist()
    weights = 512 * (setting.model.hidden + window * n_experts)
    ns = [setting.software.network_ns(setting.hardware, weights, n) for n in rows]
    assert plan.prediction.ns.tolist() == np.repeat(ns, len(points)).tolist()
    assert plan.gpu_bytes == setting.software.table_bytes(len(points) * weights)
    assert (plan.per_layer, plan.discipline, plan.chunks, plan.prediction.critical) == (True, "preemptive", 0, False)
