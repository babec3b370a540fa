"""Compute times: closed forms on a plain machine, and how far the H200 profile is from what was measured there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from sim.workload import batched, workload
from tests.support.places import REPOSITORY
from tests.support.strategies import make_trace
from traces.models.configs import read_config
from traces.models.known import builtin_models, model_spec
from traces.models.released import RELEASED
from traces.models.spec import ModelSpec

# 100 GB/s and 1 TFLOP/s: 0.01 ns a byte, 0.001 ns a FLOP.
PLAIN = {
    "name": "plain",
    "gpu": {"memory_gb": 1, "bandwidth_gbps": 100, "bandwidth_fraction": 1, "tflops": 1, "tflops_fraction": 1},
    "link": {"name": "any", "latency_us": 0, "gbps": 1},
    "software": {
        "kind": "none",
        "waits_for_route": False,
        "operation_us": 0,
        "expert_floor_us": 0,
        "layer_floor_us": 0,
        "route_wait_us": 7,
    },
}
SMALL = {
    **RELEASED["qwen3-30b-a3b"],
    "num_hidden_layers": 4,
    "hidden_size": 100,
    "moe_intermediate_size": 10,
    "intermediate_size": 50,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "vocab_size": 1000,
}
ATTENTION = 2 * 100 * 10 * 3  # weights of one layer's attention
ROUTER = 100 * 4


def machine(**software: object) -> Hardware:
    return Hardware.from_dict({**PLAIN, "software": {**PLAIN["software"], **software}})


def small(**change: object) -> ModelSpec:
    return read_config({**SMALL, **change}, "small")


EAGER = REPOSITORY / "tests/support/h200_eager.toml"
# us of one expert's eager FFN on an H200 at 1, 64, 256, 1024 rows; the last three models took about 100 at any.
EXPERT_US = {
    "mixtral-8x7b": (124, 131, 176, 536),
    "phi-3.5-moe": (107, 109, 108, 278),
    "qwen1.5-moe-a2.7b": (100, 100, 100, 100),
    "qwen3-30b-a3b": (100, 100, 100, 100),
    "deepseek-moe-16b": (100, 100, 100, 100),
}


@pytest.mark.parametrize("name", EXPERT_US)
def test_eager_experts_on_an_h200(name: str) -> None:
    costs = Costs(model_spec(name), Hardware.load(EAGER))
    predicted = costs.expert_ns(np.array([1, 64, 256, 1024])) / 1e3
    errors = predicted / np.array(EXPERT_US[name]) - 1
    print(name, "us:", predicted.round(1), "error %:", (100 * errors).round(1))
    assert np.abs(errors).max() < 0.08


@pytest.mark.parametrize(("waits", "measured_ms"), [(False, 12.2), (True, 12.6)])
def test_mixtral_eager_decode_step_on_an_h200(waits: bool, measured_ms: float) -> None:
    """The layer floor was derived from this loop, so that it agrees checks the sum, not the formula's reach."""
    hardware = Hardware.load(EAGER)
    software = hardware.software.model_copy(update={"waits_for_route": waits})
    costs = Costs(model_spec("mixtral-8x7b"), hardware.model_copy(update={"software": software}))
    layers = costs.layer_ns([1], [256]).sum() + 32 * 2 * int(costs.expert_ns(1))
    step_ms = (layers + costs.head_ns([1], [256])[0]) / 1e6
    print(f"predicted {step_ms:.2f} ms, measured {measured_ms}")
    assert step_ms == pytest.approx(measured_ms, rel=0.02)


def test_expert_closed_form() -> None:
    costs = Costs(small(), machine())
    # 3000 weights: 6000 bytes at 0.01 ns = 60 ns; 6000 FLOPs a row at 0.001 ns = 6 ns a row.
    assert costs.expert_ns([0, 1, 10, 11, 100]).tolist() == [0, 60, 60, 66, 600]
    assert costs.shared_ns([1, 2]).tolist() == [[0] * 4] * 2
    floored = Costs(small(), machine(expert_floor_us=0.5, operation_us=0.1))
    assert floored.expert_ns([0, 1, 100]).tolist() == [0, 500, 700]


def test_experts_of_unequal_size() -> None:
    costs = Costs(replace(small(), expert_bytes=(6000, 12000, 6000, 12000)), machine())
    assert costs.expert_ns([1, 1], [0, 1]).tolist() == [60, 120]


def test_decode_layer_closed_form() -> None:
    costs = Costs(small(), machine())
    # Two sequences, 30 cached tokens together: weights, 30 read and 2 written KV rows of 20 numbers, 2 bytes each.
    weights = 2 * (ATTENTION + ROUTER)
    nanoseconds = (weights + (30 + 2) * 20 * 2) * 0.01
    embedding = 2 * 100 * 2 * 0.01
    assert costs.layer_ns([2], [30]).tolist() == [[np.ceil(nanoseconds + embedding)] + [np.ceil(nanoseconds)] * 3]


def test_prefill_is_quadratic() -> None:
    costs = Costs(small(), machine())
    n = 1000
    pairs = n * (n + 1) / 2
    flops = 2 * n * (ATTENTION + ROUTER) + 2 * pairs * 2 * 2 * 10
    assert costs.layer_ns([n], [n])[0, 1] == np.ceil(flops * 0.001)


def test_windows_bound_what_is_read() -> None:
    open_, windowed = (
        Costs(read_config({**RELEASED["mixtral-8x7b"], "sliding_window": w}, "a"), machine())
        for w in (None, 128)
    )
    assert windowed.layer_ns([1], [128]).tolist() == open_.layer_ns([1], [128]).tolist()
    assert windowed.layer_ns([1], [9000]).tolist() == open_.layer_ns([1], [128]).tolist()
    assert windowed.layer_ns([1000], [1000])[0, 1] < open_.layer_ns([1000], [1000])[0, 1]


def test_dense_layers_are_charged_where_they_lie() -> None:
    routed = Costs(small(), machine()).layer_ns([1], [10])[0]
    attention = (2 * ATTENTION + 11 * 40) * 0.01
    dense = attention + 2 * 3 * 100 * 50 * 0.01
    costs = Costs(small(mlp_only_layers=[0, 1, 3]), machine())
    embedding = 100 * 2 * 0.01
    assert costs.layer_ns([1], [10]).tolist() == [[np.ceil(2 * dense + routed[1] + embedding)]]
    head = 1000 * 100 * 2 * 0.01
    assert costs.head_ns([1], [10]).tolist() == [np.ceil(dense + head)]


def test_the_head_of_a_prefill_runs_once() -> None:
    costs = Costs(small(), machine())
    assert costs.head_ns([100_000], [100_000]).tolist() == costs.head_ns([1], [10]).tolist()
    assert costs.head_ns([1000])[0] == 2 * 1000 * 1000 * 100 * 0.001


def test_waiting_for_the_route_is_charged_once_a_routed_layer() -> None:
    without, waiting = (Costs(small(), machine(waits_for_route=w)).layer_ns([1], [5]) for w in (False, True))
    assert (waiting - without).tolist() == [[7000] * 4]


def test_what_copies_cost_a_layer_is_its_own_models_figure_if_there_is_one() -> None:
    curve = {"source": "seen", "points": [[1, 1000], [2, 2000]]}
    layer = {"hidden": 100, "attention": small().attention.shape, "experts": 4, "decode": curve, "prefill": curve}

    def beside_copy_ns(software_us: float | None, layer_us: float | None, **model: object) -> int:
        software, own = ({} if us is None else {"copying_us": us} for us in (software_us, layer_us))
        hardware = {**PLAIN, "software": PLAIN["software"] | software, "layer": [layer | own]}
        return Costs(small(**model), Hardware.from_dict(hardware)).beside_copy_ns

    assert beside_copy_ns(None, None) == 0
    assert beside_copy_ns(11.4, None) == 11400
    assert beside_copy_ns(11.4, 30) == beside_copy_ns(None, 30) == 30_000
    assert beside_copy_ns(11.4, 0) == 0
    assert beside_copy_ns(11.4, 30, num_experts=5) == 11400, "another model's layers"


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_experts_apart_share_less_of_what_a_tokens_experts_share(top_k: int, alone_ns: int) -> None:
    hardware = Hardware.from_dict({**PLAIN, "software": PLAIN["software"] | {"alone_us": alone_ns / 1e3}})
    found = Costs(small(num_experts_per_tok=top_k, num_experts=9), hardware)
    apart = found.split_wave_ns()
    if not found.awaited_extra_ns:
        assert apart is None
        return
    assert apart is not None and len(apart) == 10
    assert apart[0] == 0 and not apart[top_k:].any()
    assert apart[1] == found.awaited_extra_ns, "by itself as much as one that is waited for"
    assert (np.diff(apart[1:]) <= 0).all() and np.ptp(np.diff(apart[1 : top_k + 1])) <= 1
    assert Costs(small(num_experts_per_tok=1), hardware).split_wave_ns() is None


def test_what_handing_a_copy_over_takes_is_part_of_every_copy() -> None:
    trace = make_trace([[[0, 1]], [[2, 3]]], n_experts=4)
    model = small(num_hidden_layers=1)
    plain, longer = (
        workload(trace, model, Hardware.from_dict({**PLAIN, "software": PLAIN["software"] | more}), batched(trace, 1))
        for more in ({}, {"handover_us": 2.5})
    )
    assert [ns - 2500 for ns in longer.copy_ns] == list(plain.copy_ns)
    assert longer.latency_ns == plain.latency_ns


@given(
    st.sampled_from(builtin_models()),
    st.sampled_from(["h200", "l40", "rtx-4090"]),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=6),
)
def test_shapes_and_monotony(name: str, hardware: str, calls: list[tuple[int, int]]) -> None:
    spec = model_spec(name)
    costs = Costs(spec, Hardware.load(hardware))
    tokens = np.array([t for t, _ in calls])
    context = tokens + np.array([c for _, c in calls])
    layer, shared, head = costs.layer_ns(tokens, context), costs.shared_ns(tokens), costs.head_ns(tokens, context)
    assert layer.shape == shared.shape == (len(calls), spec.routed_layers)
    assert head.shape == (len(calls),)
    assert layer.dtype == shared.dtype == head.dtype == costs.expert_ns(tokens).dtype == np.int64
    assert (layer > 0).all() and (head > 0).all()
    assert ((shared > 0) == (spec.shared_ffn > 0)).all()
    assert (costs.expert_ns(tokens + 1) >= costs.expert_ns(tokens)).all()
    # One call at a time or all together: the same integers.
    assert (np.concatenate([costs.layer_ns([t], [c]) for t, c in zip(tokens, context, strict=True)]) == layer).all()


def test_a_faster_machine_is_never_slower() -> None:
    slow = Hardware.load("l40")
    peak = slow.gpu.bandwidth_gbps.model_copy(update={"value": 2000.0})
    fast = slow.model_copy(update={"gpu": slow.gpu.model_copy(update={"bandwidth_gbps": peak})})
    for name in builtin_models():
        tokens, context = np.arange(1, 200), np.arange(1, 200) * 7
        one, other = Costs(model_spec(name), slow), Costs(model_spec(name), fast)
        assert (other.layer_ns(tokens, context) <= one.layer_ns(tokens, context)).all()
        assert (other.expert_ns(tokens) <= one.expert_ns(tokens)).all()
