"""The released models that are built in, as the fields of their own ``config.json`` that decide sizes.

Facts only, and the one table of them: layers, experts and sizes of a built-in model are read from here by
`traces.models.configs.read_config`, as from anybody's file. The tests recompute every total and compare it with the
parameter count that the makers advertise.
"""

from typing import Any


def _grouped(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _latent(heads: int, q_rank: int | None) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": 512}
    return ranks | {"num_attention_heads": heads, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _switch(experts: int) -> dict[str, Any]:
    # Released in fp32; bf16 here, as every system that offloads them runs them.
    return {
        "_source": f"huggingface.co/google/switch-base-{experts} config.json; d_ff by its parameter count; as bf16",
        "model_type": "switch_transformers",
        "d_model": 768,
        "d_ff": 3072,
        "d_kv": 64,
        "num_heads": 12,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_sparse_encoder_layers": 6,
        "num_sparse_decoder_layers": 6,
        "num_experts": experts,
        "vocab_size": 32128,
        "tie_word_embeddings": True,
    }


def _qwen3(repository: str, layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _grouped(heads, 4, 128) | {
        "_source": f"huggingface.co/{repository} config.json",
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "moe_intermediate_size": ffn,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }


def _gpt_oss(size: str, layers: int, experts: int) -> dict[str, Any]:
    return _grouped(64, 8, 64) | {
        "_source": f"huggingface.co/openai/gpt-oss-{size} config.json; experts as stored, in MXFP4",
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    }


def _llama4(name: str, experts: int, step: int) -> dict[str, Any]:
    text = _grouped(40, 8, 128) | {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": 8192,
        "vocab_size": 202048,
    }
    source = f"huggingface.co/meta-llama/{name} config.json; the text model alone"
    return {"_source": source, "model_type": "llama4", "text_config": text}


def _mixtral(size: str, layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return _grouped(heads, 8, 128) | {
        "_source": f"huggingface.co/mistralai/Mixtral-{size}-v0.1 config.json",
        "model_type": "mixtral",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }


RELEASED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _mixtral("8x7B", 32, 4096, 14336, 32),
    "mixtral-8x22b": _mixtral("8x22B", 56, 6144, 16384, 48),
    "phi-3.5-moe": _grouped(32, 8, 128)
    | {
        "_source": "huggingface.co/microsoft/Phi-3.5-MoE-instruct config.json",
        "model_type": "phimoe",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 32064,
    },
    "qwen1.5-moe-a2.7b": _grouped(16, 16, 128)
    | {
        "_source": "huggingface.co/Qwen/Qwen1.5-MoE-A2.7B config.json",
        "model_type": "qwen2_moe",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": _qwen3("Qwen/Qwen3-30B-A3B", 48, 2048, 768, 32),
    "qwen3-235b-a22b": _qwen3("Qwen/Qwen3-235B-A22B", 94, 4096, 1536, 64),
    "deepseek-moe-16b": _grouped(16, 16, 128)
    | {
        "_source": "huggingface.co/deepseek-ai/deepseek-moe-16b-base config.json",
        "model_type": "deepseek",
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "deepseek-v2-lite": _latent(16, None)
    | {
        "_source": "huggingface.co/deepseek-ai/DeepSeek-V2-Lite config.json",
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "deepseek-v2": _latent(128, 1536)
    | {
        "_source": "huggingface.co/deepseek-ai/DeepSeek-V2 config.json",
        "model_type": "deepseek_v2",
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "olmoe-1b-7b": _grouped(16, 16, 128)
    | {
        "_source": "huggingface.co/allenai/OLMoE-1B-7B-0924 config.json; expert width by its parameter count",
        "model_type": "olmoe",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "gpt-oss-20b": _gpt_oss("20b", 24, 32),
    "gpt-oss-120b": _gpt_oss("120b", 36, 128),
    "deepseek-v3": _latent(128, 1536)
    | {
        "_source": "huggingface.co/deepseek-ai/DeepSeek-V3 config.json; without its multi-token-prediction layer",
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
    "kimi-k2": _latent(64, 1536)
    | {
        "_source": "huggingface.co/moonshotai/Kimi-K2-Instruct config.json",
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
        "quantization_config": {"quant_method": "fp8"},
    },
    "llama-4-scout": _llama4("Llama-4-Scout-17B-16E", 16, 1),
    "llama-4-maverick": _llama4("Llama-4-Maverick-17B-128E", 128, 2),
    "switch-base-32": _switch(32),
    "switch-base-64": _switch(64),
    "switch-base-128": _switch(128),
}
