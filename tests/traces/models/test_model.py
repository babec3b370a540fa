"""Model sizes against what the makers advertise, and every way a config or a trace can contradict itself."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from traces.models.configs import read_config
from traces.models.known import builtin_models, model_spec, resolve_model
from traces.models.released import RELEASED

# name: routed layers, MB of one expert, GB of one token's experts, total B and active B. Recomputed from the published
# configurations apart from this code (and compared with transformers' own modules on the meta device: within 0.04 %).
EXPECTED = {
    "mixtral-8x7b": (32, 352.32, 22.549, 46.70, 12.88),
    "mixtral-8x22b": (56, 603.98, 67.646, 140.62, 39.15),
    "phi-3.5-moe": (32, 157.29, 10.066, 41.87, 6.64),
    "qwen1.5-moe-a2.7b": (24, 17.30, 1.661, 14.32, 2.69),
    "qwen3-30b-a3b": (48, 9.44, 3.624, 30.53, 3.35),
    "qwen3-235b-a22b": (94, 37.75, 28.387, 235.09, 22.19),
    "qwen3-next-80b-a3b": (48, 6.29, 3.020, 79.67, 3.87),
    "qwen3.5-35b-a3b": (40, 6.29, 2.013, 34.66, 3.45),
    "glm-4.5-air": (45, 34.60, 12.457, 106.85, 13.42),
    "gemma-4-26b-a4b": (30, 11.89, 2.855, 25.23, 3.82),
    "deepseek-moe-16b": (27, 17.30, 2.803, 16.38, 2.83),
    "deepseek-v2-lite": (26, 17.30, 2.699, 15.71, 2.66),
    "deepseek-v2": (59, 47.19, 16.704, 235.74, 21.38),
    "olmoe-1b-7b": (16, 12.58, 1.611, 6.92, 1.28),
    "gpt-oss-20b": (24, 13.22, 1.269, 20.91, 4.19),
    "gpt-oss-120b": (36, 13.22, 1.904, 116.83, 5.71),
    "deepseek-v3": (58, 44.04, 20.43, 671.03, 37.55),
    "kimi-k2": (60, 44.04, 21.14, 1026.4, 32.86),
    "llama-4-scout": (48, 251.66, 12.080, 107.8, 17.2),
    "llama-4-maverick": (24, 251.66, 6.040, 400.7, 17.2),
    "switch-base-32": (12, 9.44, 0.1132, 1.98, 0.22),
    "switch-base-64": (12, 9.44, 0.1132, 3.79, 0.22),
    "switch-base-128": (12, 9.44, 0.1132, 7.42, 0.22),
}
# What the makers say, in B; Kimi's "1 T" and Scout's 109 (with the vision tower, which is not counted here) are round.
ADVERTISED = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "phi-3.5-moe": 41.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-35b-a3b": 35,
    "glm-4.5-air": 106,
    "gemma-4-26b-a4b": 25.2,
    "deepseek-moe-16b": 16.4,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "olmoe-1b-7b": 6.9,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v3": 671,
    "kimi-k2": 1000,
    "llama-4-scout": 109,
    "llama-4-maverick": 400,
    "switch-base-128": 7.4,
}

MIXTRAL = RELEASED["mixtral-8x7b"]
QWEN3 = RELEASED["qwen3-30b-a3b"]


@pytest.mark.parametrize("name", EXPECTED)
def test_sizes_of_released_models(name: str) -> None:
    layers, megabytes, gigabytes, total, active = EXPECTED[name]
    spec = model_spec(name)
    assert spec.routed_layers == len(spec.expert_bytes) == layers
    assert spec.expert_bytes[0] / 1e6 == pytest.approx(megabytes, abs=0.006)
    assert spec.routed_bytes_per_token / 1e9 == pytest.approx(gigabytes, rel=5e-4)
    assert spec.total_parameters / 1e9 == pytest.approx(total, rel=4e-4, abs=0.006)
    assert spec.active_parameters / 1e9 == pytest.approx(active, rel=2e-3, abs=0.006)


@pytest.mark.parametrize("name", ADVERTISED)
def test_advertised_totals(name: str) -> None:
    assert model_spec(name).total_parameters / 1e9 == pytest.approx(ADVERTISED[name], rel=0.027)


def test_every_builtin_is_checked() -> None:
    assert set(builtin_models()) == set(EXPECTED)


def test_published_facts_of_single_models() -> None:
    assert model_spec("mixtral-8x7b").kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert model_spec("deepseek-v3").kv_bytes_per_token == 61 * 576 * 2  # 70 KB, arXiv 2505.09343 table 1
    assert model_spec("deepseek-v3").moe_layers == tuple(range(3, 61))
    assert model_spec("llama-4-maverick").moe_layers == tuple(range(1, 48, 2))
    assert model_spec("gpt-oss-20b").windows == (128, 0) * 12
    assert model_spec("llama-4-scout").windows == (8192, 8192, 8192, 0) * 12
    assert model_spec("gpt-oss-20b").expert_bytes[0] == 3 * 2880 * 2880 * 17 // 32


def test_bytes_add_up() -> None:
    for name in ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "switch-base-32"):
        spec = model_spec(name)  # bf16 throughout: 2 bytes each
        assert spec.resident_bytes + spec.all_expert_bytes == 2 * spec.total_parameters


def test_switch_stacks() -> None:
    whole = model_spec("switch-base-32")
    encoder, decoder = whole.stack("encoder"), whole.stack("decoder")
    assert whole.moe_layers == (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23)
    assert encoder.moe_layers == decoder.moe_layers == (1, 3, 5, 7, 9, 11)
    assert decoder.routed_bytes_per_token / 1e9 == pytest.approx(0.0566, abs=1e-4)
    # Both stacks' other weights stay in GPU memory, whichever runs.
    assert encoder.resident_bytes == decoder.resident_bytes == whole.resident_bytes
    assert decoder.kv_bytes_per_token == whole.kv_bytes_per_token
    with pytest.raises(InputError, match="part"):
        model_spec("mixtral-8x7b").stack("decoder")


# --- from_config ---


def test_nested_text_config() -> None:
    """Expert counts that stand only under text_config.

    Seen in EfficientMoE/MoE-Infinity#125: settings nested under text_config chose the wrong parser.
    """
    flat = read_config(QWEN3, "a")
    inner = {k: v for k, v in QWEN3.items() if k != "_source"}
    nested = read_config({"model_type": "some_vision_thing", "text_config": inner}, "a")
    assert (nested.experts, nested.top_k, nested.moe_layers) == (flat.experts, flat.top_k, flat.moe_layers)
    assert nested.total_parameters == flat.total_parameters


@pytest.mark.parametrize("model_type", ["deepseek_v33", "deepseek_v", "mixtral2", "Mixtral", "", None, 3, ["mixtral"]])
def test_unknown_type_is_never_a_prefix_match(model_type: object) -> None:
    with pytest.raises(InputError, match=r"^c\.json: model_type .*; expected one of mixtral"):
        read_config({**RELEASED["deepseek-v3"], "model_type": model_type}, "c.json")


@pytest.mark.parametrize("field", ["hidden_size", "num_local_experts", "num_experts_per_tok", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, float("nan"), float("inf"), "8", True, [8], 10**12])
def test_bad_size_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^c\.json: {field} .*expected") as error:
        read_config({**MIXTRAL, field: value}, "c.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", [k for k in MIXTRAL if k not in ("_source", "head_dim")])
def test_missing_field_is_refused_by_name(field: str) -> None:
    config = {k: v for k, v in MIXTRAL.items() if k != field}
    with pytest.raises(InputError, match=f"{field} is missing"):
        read_config(config, "c.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"head_dim": None, "num_attention_heads": 33}, "num_attention_heads is 33"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5; expected a divisor of num_attention_heads 32"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64; expected a divisor of num_attention_heads 32"),
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'"),
        ({"dtype": "int3", "torch_dtype": "bfloat16"}, "dtype is 'int3'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        ({"text_config": 5}, "text_config is 5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_contradictions_are_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_config({**MIXTRAL, **change}, "c.json")


@pytest.mark.parametrize(
    ("dense", "step", "routed"),
    [([0], 1, (1, 2, 3)), ([3], 1, (0, 1, 2)), ([], 2, (1, 3)), ([1], 2, (3,)), (None, 1, (0, 1, 2, 3))],
)
def test_dense_layers_first_last_and_alternating(dense: list[int] | None, step: int, routed: tuple[int, ...]) -> None:
    change = {"num_hidden_layers": 4, "intermediate_size": 64, "mlp_only_layers": dense, "decoder_sparse_step": step}
    spec = read_config({**QWEN3, **change}, "a")
    assert spec.moe_layers == routed
    assert len(spec.expert_bytes) == len(routed)


GLM_LITE = {
    "model_type": "glm4_moe_lite", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 100,
}  # fmt: skip
SOLAR = GLM_LITE | {"model_type": "solar_open", "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "routed"),
    [
        (GLM_LITE, (1, 2, 3)),  # as newer transformers save it: their classes have no first_k_dense_replace
        (SOLAR, (0, 1, 2, 3)),
        (GLM_LITE | {"first_k_dense_replace": 2}, (2, 3)),
        (GLM_LITE | {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", "sparse"] * 2}, (1, 3)),
        (SOLAR | {"model_type": "exaone_moe", "mlp_layer_types": ["sparse", "dense"] * 2}, (0, 2)),
        # The classes of these do not read the list.
        (QWEN3 | {"num_hidden_layers": 2, "intermediate_size": 9, "mlp_layer_types": ["dense", "sparse"]}, (0, 1)),
        (SOLAR | {"model_type": "glm4_moe", "first_k_dense_replace": 1, "mlp_layer_types": ["sparse"] * 4}, (1, 2, 3)),
        (GLM_LITE | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "mlp_layer_types": "any"}, (3,)),
    ],
)
def test_routed_layers_are_those_that_the_file_lists_else_those_of_the_familys_rule(config, routed) -> None:
    spec = read_config(config, "c.json")
    assert spec.moe_layers == routed
    assert bool(spec.dense_ffn) == (len(routed) < spec.layers)


@pytest.mark.parametrize("kinds", [["dense"] * 3, ["dense", "sparse", "moe", "sparse"], "sparse", [1, 2, 3, 4]])
def test_a_list_of_layers_that_is_none_is_refused(kinds) -> None:
    with pytest.raises(InputError, match=r"^c\.json: mlp_layer_types is .*expected"):
        read_config(GLM_LITE | {"mlp_layer_types": kinds}, "c.json")


def test_routed_layers_of_a_trace_are_compared_one_by_one() -> None:
    config = GLM_LITE | {"mlp_layer_types": ["dense", "sparse"] * 2}
    meta = {"name": "mine", "experts": 8, "top_k": 2, "config": config}
    assert resolve_model(meta, [1, 3]).moe_layers == (1, 3)
    with pytest.raises(InputError, match="the trace's routed layers are 2-3; expected 1, 3"):
        resolve_model(meta, [2, 3])


def test_a_model_without_routed_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no layer of the 4 is routed"):
        config = {**QWEN3, "num_hidden_layers": 4, "intermediate_size": 64, "mlp_only_layers": [0, 1, 2, 3]}
        read_config(config, "a")


@given(
    layers=st.integers(1, 60),
    heads=st.integers(1, 16),
    experts=st.integers(1, 64),
    ffn=st.integers(1, 5000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_closed_form_of_any_mixtral_shape(layers: int, heads: int, experts: int, ffn: int, dtype: str) -> None:
    hidden = 64 * heads
    config = {
        **MIXTRAL,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": None,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "intermediate_size": ffn,
        "torch_dtype": dtype,
    }
    spec = read_config(config, "a")
    layer = 2 * hidden * hidden + 2 * hidden * 64 + hidden * experts + experts * 3 * hidden * ffn
    assert spec.total_parameters == layers * layer + 2 * 32000 * hidden
    assert spec.expert_bytes == (3 * hidden * ffn * {"bfloat16": 2, "float32": 4}[dtype],) * layers


# --- what a trace says ---


def test_resolve_by_name_and_overrides() -> None:
    meta = {"name": "Mixtral-8x7B", "experts": 8, "top_k": 1, "expert_bytes": [7, 14] * 16}
    spec = resolve_model(meta, range(32))
    assert spec.top_k == 1
    assert spec.expert_bytes == (7, 14) * 16  # a size for each layer
    assert spec.routed_bytes_per_token == 16 * 21


def test_resolve_a_config_in_the_trace() -> None:
    meta = {"name": "mini", "experts": 128, "top_k": 8, "config": {**QWEN3, "num_hidden_layers": 5}}
    spec = resolve_model(json.loads(json.dumps(meta)), range(5))
    assert (spec.name, spec.layers) == ("mini", 5)


def test_a_trace_s_own_config_has_its_sizes_even_under_a_built_in_name() -> None:
    """A small checkpoint in a folder named mixtral-8x7b was charged the sizes of the real one without a word."""
    meta = {"name": "Mixtral-8x7B", "experts": 8, "top_k": 2, "config": {**MIXTRAL, "intermediate_size": 32}}
    assert resolve_model(meta, range(32)).expert_bytes == (3 * 4096 * 32 * 2,) * 32
    fp8 = {**MIXTRAL, "quantization_config": {"quant_method": "fp8"}}
    assert resolve_model({**meta, "config": fp8}, range(32)).expert_bytes == (3 * 4096 * 14336,) * 32
    assert resolve_model({**meta, "config": MIXTRAL}, range(32)) == model_spec("mixtral-8x7b")


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        ({"name": "mixtral"}, 32, "'mixtral' is unknown"),
        ({"name": None}, 32, "model.name is None"),
        ({"experts": 9}, 32, "model.experts is 9; mixtral-8x7b has 8"),
        ({"experts": 8.0}, 32, "model.experts is 8.0"),
        ({"top_k": 9}, 32, "model.top_k is 9"),
        ({"top_k": 0}, 32, "model.top_k is 0"),
        ({}, 31, "31 routed layers; expected 32"),
        ({"expert_bytes": [1] * 31}, 32, "31 values"),
        ({"expert_bytes": 5}, 32, "model.expert_bytes is 5"),
        ({"expert_bytes": [1] * 31 + [0]}, 32, r"model.expert_bytes[31] is 0"),
        ({"expert_bytes": [float("nan")] * 32}, 32, r"model.expert_bytes[0] is nan"),  # else SimPy waits NaN
        ({"part": "decoder"}, 32, "part 'decoder'"),
    ],
)
def test_a_trace_that_contradicts_its_model(change: dict, layers: int, message: str) -> None:
    meta = {"name": "mixtral-8x7b", "experts": 8, "top_k": 2, **change}
    with pytest.raises(InputError, match=re.escape(message)):
        resolve_model(meta, range(layers))


def test_a_switch_trace_of_one_stack() -> None:
    meta = {"name": "switch-base-64", "experts": 64, "top_k": 1}
    assert resolve_model(meta, range(1, 24, 2)) == model_spec("switch-base-64")
    assert resolve_model(meta, range(1, 12, 2)) == model_spec("switch-base-64").stack("decoder")
    assert resolve_model({**meta, "part": "encoder"}, range(1, 12, 2)) == model_spec("switch-base-64").stack("encoder")
    with pytest.raises(InputError, match="5 routed layers"):
        resolve_model(meta, range(5))


def test_models_from_files(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    assert model_spec(str(path)).total_parameters == model_spec("mixtral-8x7b").total_parameters
    assert resolve_model(tmp_path).total_parameters == model_spec("mixtral-8x7b").total_parameters
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        model_spec(str(path))
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="expected a JSON object"):
        model_spec(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        model_spec(str(path))
    with pytest.raises(InputError, match=r"unknown; expected a config\.json or one of mixtral-8x7b"):
        model_spec("gpt-5")
