"""Compute times of layers of linear attention and with an index, by closed forms on a plain machine."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.__main__ import main
from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from tests.sim.machine.test_cost import machine
from tests.support.places import REPOSITORY
from tests.traces.models.test_mixed_models import DEEPSEEK, GEMMA, GRANITE, MINIMAX, QWEN3_NEXT
from traces.models.configs import read_config

SMALL = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
LINEAR = {
    "lightning": MINIMAX | SMALL | EXPERTS | {"layer_types": ["linear_attention"] * 4},
    "delta net": QWEN3_NEXT | SMALL | EXPERTS | {"layer_types": ["linear_attention"] * 4},
    "mamba-2": GRANITE | SMALL | EXPERTS | {"layer_types": None, "mamba_n_heads": 8, "mamba_d_head": 16},
}
INDEXED = DEEPSEEK | {
    "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 100,
    "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 0, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", LINEAR)
@given(rows=st.integers(1, 50), context=st.integers(2, 10**6))
def test_a_decode_step_of_linear_attention_moves_weights_and_states_however_long_the_sequences_are(
    kind, rows, context
):
    spec = read_config(LINEAR[kind], kind)
    assert spec.kv_bytes_per_token == 0
    found = Costs(spec, machine()).layer_ns([rows], [rows + context])[0, 1]
    weights = 2 * (spec.other_attention.parameters + 64 * 4)
    moved = (weights + 2 * rows * spec.state_bytes_per_sequence // 4) * 0.01
    flops = 2 * rows * (spec.other_attention.parameters + 64 * 4 + spec.other_attention.state_width) * 0.001
    assert found == np.ceil(round(max(moved, flops), 3))


@pytest.mark.parametrize(("kind", "state", "multiply_adds"), [
    ("lightning", 4 * 16 * 16, 2), ("delta net", 32 * 128 * 128, 3), ("mamba-2", 8 * 16 * 128, 2),
])  # fmt: skip
def test_a_prompt_of_linear_attention_grows_with_its_length_and_not_with_its_square(kind, state, multiply_adds):
    spec = read_config(LINEAR[kind], kind)
    costs = Costs(spec, machine())
    flops = 2 * (spec.other_attention.parameters + 64 * 4 + multiply_adds * state)
    for n in (10_000, 100_000):
        assert costs.layer_ns([n], [n])[0, 1] == pytest.approx(n * flops * 0.001, abs=1)


def test_attention_beside_linear_attention_reads_its_cache_as_usual():
    mixed = read_config(LINEAR["lightning"] | {"layer_types": ["linear_attention", "full_attention"] * 2}, "mixed")
    plain = read_config(LINEAR["lightning"] | {"model_type": "mixtral"}, "plain")
    linear = read_config(LINEAR["lightning"], "linear")
    calls = np.array([1, 3, 50]), np.array([9000, 4000, 50])
    found, full, none = (Costs(spec, machine()).layer_ns(*calls) for spec in (mixed, plain, linear))
    assert (found[:, 1::2] == full[:, 1::2]).all() and (found[:, ::2] == none[:, ::2]).all()


@given(rows=st.integers(1, 20), each=st.integers(1, 5000))
def test_an_index_scores_all_tokens_and_attention_reads_those_that_it_chose(rows, each):
    spec = read_config(INDEXED, "indexed")
    context = rows * (each + 1)
    found = Costs(spec, machine()).layer_ns([rows], [context])[0, 1]
    parameters = spec.attention.parameters + 64 * 4
    index, latent = (context + rows) * 16, (min(context, rows * 100) + rows) * (32 + 8)
    scores, pairs = context * 2 * 16, min(context, rows * 100) * 4 * (2 * 32 + 8)
    moved = 2 * (parameters + index + latent) * 0.01
    flops = 2 * (rows * parameters + scores + pairs) * 0.001
    assert found == np.ceil(round(max(moved, flops), 3))


@given(n=st.integers(2, 20_000))
def test_a_prompt_with_an_index_takes_the_cheaper_of_all_pairs_and_those_chosen(n):
    spec = read_config(INDEXED, "indexed")
    found = Costs(spec, machine()).layer_ns([n], [n])[0, 1]
    parameters, every = spec.attention.parameters + 64 * 4, n * (n + 1) // 2
    chosen = sum(min(1 + row, 100) for row in range(n))
    pairs = min(every * 4 * (8 + 8 + 8), chosen * 4 * (2 * 32 + 8))
    flops = 2 * (n * parameters + every * 2 * 16 + pairs) * 0.001
    moved = 2 * (parameters + 2 * n * (16 + 32 + 8)) * 0.01
    assert found == pytest.approx(max(moved, flops), abs=1.001)


def test_layers_with_a_window_and_without_one_have_heads_of_their_own():
    spec = read_config(GEMMA, "gemma")
    short, long = (Costs(spec, machine()).layer_ns([1], [context])[0] for context in (1024, 5000))
    windowed = np.array([bool(window) for window in spec.windows])
    assert (short[windowed] == long[windowed]).all()
    assert long[5] - short[5] == pytest.approx((5000 - 1024) * 2 * 2 * 512 * 2 * 0.01, abs=1)


def test_measured_layers_are_not_taken_for_models_whose_layers_differ():
    config = LINEAR["lightning"] | {"layer_types": ["linear_attention", "full_attention"] * 2}
    spec = read_config(config, "mixed")
    curve = {"points": [[1, 10**6], [2, 2 * 10**6]], "source": "none", "measured": False}
    layer = {"hidden": 64, "attention": spec.attention.shape, "experts": 4, "decode": curve, "prefill": curve}
    profile = machine().model_dump(mode="json", exclude_none=True, by_alias=True) | {"layer": [layer]}
    assert Costs(spec, Hardware.from_dict(profile)).layer_ns([1], [1]).max() < 1e5


def test_the_report_counts_states_beside_keys_and_values(tmp_path):
    """On a trace of Mixtral's topology, whose steps hold as many tokens whatever the model."""
    shape = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = MINIMAX | shape | {"layer_types": ["linear_attention", "full_attention"] * 16}
    kv = {}
    for kind in ("minimax", "mixtral"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        spec = read_config(config | {"model_type": kind}, kind)
        options = ["--model", str(tmp_path / "config.json"), "--json", str(tmp_path / "out.json"), "--batch", "2"]
        trace = str(REPOSITORY / "traces/mixtral_law.npz")
        assert main(["replay", trace, "--policy", "all-in-gpu", *options]) == 0
        kv[kind] = json.loads((tmp_path / "out.json").read_text())["gpu_bytes"]["kv"]
    state = 2 * read_config(config, "minimax").state_bytes_per_sequence
    assert spec.state_bytes_per_sequence == 0
    assert kv["minimax"] == kv["mixtral"] // 2 + state
