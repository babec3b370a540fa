"""Tiny random models of every router family, built from their configuration; the same weights every time."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.support.tiny_moe import WORDS, tokenizer

_VOCABULARY = 3 + len(WORDS)
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.3, "eos_token_id": 1, "pad_token_id": 2,
    "bos_token_id": 1, "max_position_embeddings": 512,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_DEEPSEEK = _LATENT | {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip



class Tiny(NamedTuple):
    """A tiny model: its classes' common name, the configuration's fields, and the model layers that are routed.

    ``around`` are fields of the configuration that ``fields`` are the text part of, ``ending`` is that of the model's
    class.
    """

    kind: str
    fields: dict[str, Any]
    layers: list[int]
    around: dict[str, Any] | None = None
    ending: str = "ForCausalLM"


FAMILIES: dict[str, Tiny] = {
    "mixtral": Tiny("Mixtral", {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": None}, [0, 1, 2]),
    "phimoe": Tiny("Phimoe", {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": None}, [0, 1, 2]),
    "qwen2_moe": Tiny(
        "Qwen2Moe",
        {"intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8},
        [0, 1, 2],
    ),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8,
         "mlp_only_layers": [0], "num_hidden_layers": 4},
        [1, 2, 3],
    ),
    "deepseek_v2": Tiny(
        "DeepseekV2",
        _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                     "routed_scaling_factor": 16.0},
        [1, 2],
    ),
    # DeepSeek-MoE-16B: greedy, unnormalised and unscaled; transformers has no class of its own for it.
    "deepseek_moe_16b": Tiny(
        "DeepseekV2",
        _DEEPSEEK | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                     "num_experts_per_tok": 3},
        [1, 2],
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        _DEEPSEEK | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 16},
        [1, 2],
    ),
    "olmoe": Tiny("Olmoe", {"intermediate_size": 16, "num_experts": 8}, [0, 1, 2]),
    "gpt_oss": Tiny(
        "GptOss",
        {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 8, "sliding_window": 16,
         "num_experts_per_tok": 3},
        [0, 1, 2],
    ),
    "granitemoe": Tiny("GraniteMoe", {"intermediate_size": 16, "num_local_experts": 8}, [0, 1, 2]),
}  # fmt: skip

# Families whose routers have the code of one above; not all are in every version of transformers.
_GLM = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
_QWEN = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8,
    "head_dim": 8, "rope_parameters": None,
}  # fmt: skip
_LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_INDEXED = {"q_lora_rank": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_THREE_PLACES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
_SEES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "image_size": 16,
}  # fmt: skip
_HEARS = {
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16, "output_dim": 32,
    "num_mel_bins": 16, "downsample_hidden_size": 8,
}  # fmt: skip
RELATED: dict[str, Tiny] = {
    "glm4_moe": Tiny("Glm4Moe", _GLM, [1, 2]),
    "dots1": Tiny("Dots1", _GLM, [1, 2]),
    "solar_open": Tiny("SolarOpen", _GLM | {"first_k_dense_replace": 0}, [0, 1, 2]),
    "exaone_moe": Tiny(
        "ExaoneMoe",
        {key.replace("n_routed", "num").replace("n_shared", "num_shared"): value for key, value in _GLM.items()},
        [1, 2],
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLite", _DEEPSEEK | {"n_group": 1, "topk_group": 1, "q_lora_rank": 16}, [1, 2]),
    "flex_olmo": Tiny("FlexOlmo", {"intermediate_size": 16, "num_experts": 8}, [0, 1, 2]),
    "granitemoeshared": Tiny(
        "GraniteMoeShared",
        {"intermediate_size": 16, "num_local_experts": 8, "shared_intermediate_size": 16},
        [0, 1, 2],
    ),
    "deepseek_v32": Tiny("DeepseekV32", _DEEPSEEK | _INDEXED | {"n_group": 4, "topk_group": 2}, [1, 2]),
    "glm_moe_dsa": Tiny("GlmMoeDsa", _DEEPSEEK | _INDEXED | {"n_group": 1, "topk_group": 1}, [1, 2]),
    # Layers of linear attention, with caches of their own.
    "minimax": Tiny(
        "MiniMax", {"intermediate_size": 32, "num_local_experts": 8, "block_size": 4, "head_dim": 8}, [0, 1, 2]
    ),
    "qwen3_next": Tiny("Qwen3Next", _QWEN | _LINEAR, [0, 1, 2]),
    "qwen3_5_moe": Tiny("Qwen3_5Moe", _QWEN | _LINEAR, [0, 1, 2], {"vision_config": _SEES}, "ForConditionalGeneration"),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybrid",
        {"intermediate_size": 16, "num_local_experts": 8, "shared_intermediate_size": 16, "mamba_n_heads": 4,
         "mamba_d_state": 8, "mamba_chunk_size": 4, "layer_types": _MIXED},
        [0, 1, 2],
    ),
    # Attention of two sizes, and a dense FFN beside the experts.
    "gemma4": Tiny(
        "Gemma4",
        {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "top_k_experts": 2, "head_dim": 8,
         "enable_moe_block": True, "num_experts_per_tok": None, "global_head_dim": 16, "num_global_key_value_heads": 1,
         "attention_k_eq_v": True, "sliding_window": 16, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        [0, 1, 2], {"vision_config": None, "audio_config": None}, "ForConditionalGeneration",
    ),
    # Models that see or hear, here given text.
    "qwen3_vl_moe": Tiny("Qwen3VLMoe", _QWEN, [0, 1, 2], {"vision_config": _SEES}, "ForConditionalGeneration"),
    "glm4v_moe": Tiny(
        "Glm4vMoe", _GLM | {"rope_parameters": _THREE_PLACES}, [1, 2], {"vision_config": _SEES},
        "ForConditionalGeneration",
    ),
    "qwen3_omni_moe": Tiny(
        "Qwen3OmniMoeThinker", _QWEN, [0, 1, 2],
        {"vision_config": _SEES, "audio_config": _HEARS, "vision_start_token_id": 60},
        "ForConditionalGeneration",
    ),
}  # fmt: skip


# Positions that depend on how long a sequence is, from 32 tokens on: (family, fields); those of yarn do not.
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 4.0], "original_max_position_embeddings": 32}
_LONG = _FACTORS | {"rope_type": "longrope", "rope_theta": 1e4}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope with the cache dropped": (
        "phimoe",
        {"original_max_position_embeddings": 32, "max_position_embeddings": 128,
         "rope_scaling": _FACTORS | {"type": "longrope", "short_mscale": 1.0, "long_mscale": 1.3}},
    ),
    "longrope": ("qwen3_moe", {"max_position_embeddings": 128, "rope_parameters": _LONG}),
    "dynamic": (
        "qwen3_moe",
        {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "yarn": (
        "qwen3_moe",
        {"max_position_embeddings": 128,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
}  # fmt: skip


def decoder(family: str, **more: Any) -> Any:
    """A random decoder-only model of ``family``, hidden size 32, float32, eval mode."""
    import torch
    import transformers

    torch.set_num_threads(1)  # a tiny model runs no faster on more, and much slower on a busy machine
    tiny = (FAMILIES | RELATED)[family]
    fields = {**_COMMON, **tiny.fields, **more}
    make = getattr(transformers, f"{tiny.kind}Config")
    torch.manual_seed(7)
    model = getattr(transformers, f"{tiny.kind}{tiny.ending}")
    config = make(**fields) if tiny.around is None else make(text_config=fields, **tiny.around)
    return randomised(model(config))


def switch(**more: Any) -> Any:
    """A random Switch: encoder and decoder of 4 layers each, of which 1 and 3 are routed."""
    import torch
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    torch.set_num_threads(1)
    fields: dict[str, Any] = {
        "vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_heads": 4, "num_experts": 8,
        "expert_capacity": 64, "decoder_start_token_id": 2, "eos_token_id": 1, "pad_token_id": 2,
        "router_jitter_noise": 0.01, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(7)
    return randomised(SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**{**fields, **more})))


def randomised(model: Any) -> Any:
    """The model with routers that choose (their weights start at zero in some families), in eval mode."""
    import torch

    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            last = name.split(".")
            if last[-1].endswith("scale"):  # Gemma's: a weight is not negative
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif last[-2] in ("gate", "router", "classifier") and last[-1] != "e_score_correction_bias":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif last[-1] == "e_score_correction_bias":
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.2)
    return model.eval()


ALL = (*FAMILIES, *RELATED, "switch")


def model_of(family: str) -> Any:
    """A random model of any of ALL."""
    return switch() if family == "switch" else decoder(family)


def saved(family: str, folder: Path) -> Path:
    """A checkpoint of a family in ``folder``, with a tokenizer."""
    model_of(family).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
