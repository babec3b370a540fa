"""Tiny random models of every router family, built from their configuration; the same weights every time."""

from typing import Any

from tests.support.tiny_moe import WORDS

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

# Family: (configuration class, its fields, the model layers that are routed).
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": None}, [0, 1, 2]),
    "phimoe": ("Phimoe", {"intermediate_size": 32, "num_local_experts": 8, "sliding_window": None}, [0, 1, 2]),
    "qwen2_moe": (
        "Qwen2Moe",
        {"intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 8},
        [0, 1, 2],
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8,
         "mlp_only_layers": [0], "num_hidden_layers": 4},
        [1, 2, 3],
    ),
    "deepseek_v2": (
        "DeepseekV2",
        _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                     "routed_scaling_factor": 16.0},
        [1, 2],
    ),
    # DeepSeek-MoE-16B: greedy, unnormalised and unscaled; transformers has no class of its own for it.
    "deepseek_moe_16b": (
        "DeepseekV2",
        _DEEPSEEK | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                     "num_experts_per_tok": 3},
        [1, 2],
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _DEEPSEEK | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 16},
        [1, 2],
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 16, "num_experts": 8}, [0, 1, 2]),
    "gpt_oss": (
        "GptOss",
        {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 8, "sliding_window": 16,
         "num_experts_per_tok": 3},
        [0, 1, 2],
    ),
    "granitemoe": ("GraniteMoe", {"intermediate_size": 16, "num_local_experts": 8}, [0, 1, 2]),
}  # fmt: skip

# Families whose routers have the code of one above; not all are in every version of transformers.
_GLM = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
RELATED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "glm4_moe": ("Glm4Moe", _GLM, [1, 2]),
    "dots1": ("Dots1", _GLM, [1, 2]),
    "solar_open": ("SolarOpen", _GLM | {"first_k_dense_replace": 0}, [0, 1, 2]),
    "exaone_moe": (
        "ExaoneMoe",
        {key.replace("n_routed", "num").replace("n_shared", "num_shared"): value for key, value in _GLM.items()},
        [1, 2],
    ),
    "glm4_moe_lite": ("Glm4MoeLite", _DEEPSEEK | {"n_group": 1, "topk_group": 1, "q_lora_rank": 16}, [1, 2]),
    "flex_olmo": ("FlexOlmo", {"intermediate_size": 16, "num_experts": 8}, [0, 1, 2]),
    "granitemoeshared": (
        "GraniteMoeShared",
        {"intermediate_size": 16, "num_local_experts": 8, "shared_intermediate_size": 16},
        [0, 1, 2],
    ),
}  # fmt: skip


def decoder(family: str, **more: Any) -> Any:
    """A random decoder-only model of ``family``, hidden size 32, float32, eval mode."""
    import torch
    import transformers

    torch.set_num_threads(1)  # a tiny model runs no faster on more, and much slower on a busy machine
    kind, fields, _ = (FAMILIES | RELATED)[family]
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **fields, **more})
    torch.manual_seed(7)
    return randomised(getattr(transformers, f"{kind}ForCausalLM")(config))


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
            if last[-2] in ("gate", "router", "classifier") and last[-1] != "e_score_correction_bias":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif last[-1] == "e_score_correction_bias":
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.2)
    return model.eval()
