"""Families whose layers mix tokens in more than one way: sizes of released models, and files that contradict."""

import re

import pytest

from ground.errors import InputError
from traces.models.configs import read_config


def every(interval: int, layers: int, first: int = 0) -> list[str]:
    """Layer types in which layer ``first`` and every ``interval``-th after it is one of full attention."""
    return ["full_attention" if n % interval == first else "linear_attention" for n in range(layers)]


DELTA = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_NEXT = DELTA | {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax", "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "num_local_experts": 32, "num_experts_per_tok": 2, "layer_types": every(8, 80, 7),
}  # fmt: skip
GRANITE = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 768,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72,
    "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "mamba_n_heads": 128, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_head": 64, "mamba_expand": 2, "mamba_d_conv": 4, "tie_word_embeddings": True,
    "layer_types": every(10, 40, 5),
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v32", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 3,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
GLM = DEEPSEEK | {
    "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "index_n_heads": 32,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
    "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
# B of weights that transformers' class of each has on the meta device, norms and biases among them; layers of the
# other kind; bytes of keys and values a token and of states a sequence, from the dimensions.
RELEASED = {
    "MiniMax-Text-01": (MINIMAX, 456.090, 70, 10 * 2 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 2),
    "Qwen3-Next-80B-A3B": (
        QWEN3_NEXT, 79.674, 36, 12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2),
    ),
    "Qwen3.5-397B-A17B": (
        QWEN3_NEXT | {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 60,
            "num_attention_heads": 32, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        396.346, 45, 15 * 2 * 2 * 256 * 2, 45 * (64 * 128 * 128 * 4 + 12288 * 4 * 2),
    ),
    "Granite-4.0-H-Small": (
        GRANITE, 32.207, 36, 4 * 2 * 8 * 128 * 2, 36 * (8192 * 128 * 4 + (8192 + 2 * 128) * 4 * 2),
    ),
    "DeepSeek-V3.2": (DEEPSEEK, 671.878, 0, 61 * (576 + 128) * 2, 0),
    "GLM-5": (GLM, 743.911, 0, 78 * (576 + 128) * 2, 0),
    "GLM-5, an index every 4 layers": (
        GLM | {"index_topk_freq": 4}, 743.377, 57, 78 * 576 * 2 + 21 * 128 * 2, 0,
    ),
    "Gemma-4-26B-A4B": (GEMMA, 25.233, 25, (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_sizes_of_released_models(name):
    config, billions, others, cached, state = RELEASED[name]
    spec = read_config(config, name)
    assert spec.total_parameters / 1e9 == pytest.approx(billions, rel=1e-4)
    assert (len(spec.other_layers), spec.kv_bytes_per_token, spec.state_bytes_per_sequence) == (others, cached, state)


@pytest.mark.parametrize(
    ("config", "others"),
    [
        # Which layers are linear where the file does not list them is the rule of the family's class.
        (MINIMAX | {"num_hidden_layers": 4, "layer_types": None}, (1, 3)),
        (QWEN3_NEXT | {"num_hidden_layers": 6, "full_attention_interval": None}, (0, 1, 2, 4, 5)),
        (GRANITE | {"num_hidden_layers": 2, "layer_types": None}, (0, 1)),
        # Names of older files.
        (GRANITE | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}, (0, 2)),
        # An index of one's own (F, full) or that of a layer before (S, shared), in all three ways of writing it.
        (GLM | {"num_hidden_layers": 6, "index_topk_pattern": "FFSSFS"}, (2, 3, 5)),
        (GLM | {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"]}, (2,)),
        (GLM | {"num_hidden_layers": 8, "index_topk_freq": 3, "index_skip_topk_offset": 2}, (2, 3, 5, 6)),
        # The last layer never has a window.
        (GEMMA | {"num_hidden_layers": 8}, (0, 1, 2, 3, 4, 6)),
        (GEMMA | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}, (0,)),
    ],
)
def test_layers_of_the_other_kind_are_listed_or_follow_the_family_s_rule(config, others):
    assert read_config(config, "c.json").other_layers == others


def test_qwen3_5_routes_every_layer_whatever_fields_of_other_families_say():
    config = RELEASED["Qwen3.5-397B-A17B"][0] | {"mlp_only_layers": [0], "decoder_sparse_step": 2}
    assert read_config(config, "c.json").routed_layers == 60


def test_a_gemma_is_read_alike_as_released_and_as_transformers_saves_it():
    saved = {key: value for key, value in GEMMA.items() if "global" not in key}
    layers = {f"{n:02}": {"head_dim": 512, "num_key_value_heads": 2} for n in range(5, 30, 6)}
    assert read_config(saved | {"per_layer_config": layers}, "c.json") == read_config(GEMMA, "c.json")
    with pytest.raises(InputError, match=r"^c\.json: per_layer_config .*expected the same fields for each layer"):
        read_config(saved | {"per_layer_config": layers | {"04": layers["05"]}}, "c.json")


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MINIMAX, {"layer_types": ["full_attention"] * 79 + ["mambo"]}, "expected linear_attention or full_attention"),
        (MINIMAX, {"layer_types": ["full_attention"]}, "expected a list of 80 strings"),
        (QWEN3_NEXT, {"linear_num_value_heads": None}, "linear_num_value_heads is None"),
        (QWEN3_NEXT, {"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor"),
        (GRANITE, {"mamba_d_head": 63}, "mamba_d_head is 63"),
        (GRANITE, {"mamba_n_heads": 127}, "mamba_n_heads 127"),
        (DEEPSEEK, {"index_topk": None}, "index_topk is None"),
        (DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank is None"),
        (GLM, {"index_topk_pattern": "FX" * 39}, "expected shared or full for each layer"),
        (GLM, {"index_topk_pattern": 7}, "indexer_types is 7"),
        (GEMMA, {"hidden_size_per_layer_input": 256}, "expected 0: per-layer embeddings"),
        (GEMMA, {"num_kv_shared_layers": 20}, "expected 0: per-layer embeddings and shared keys are not charged"),
        (GEMMA, {"enable_moe_block": False}, "no layer of the 30 is routed"),
        (GEMMA, {"global_head_dim": None}, "global_head_dim is None"),
        (GEMMA, {"per_layer_config": []}, "per_layer_config is []"),
        (GEMMA, {"per_layer_config": {"x": {}}}, "per_layer_config is"),
    ],
)
def test_contradictions_are_refused_in_one_line(config, change, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        read_config(config | change, "c.json")
    assert "\n" not in str(error.value)
