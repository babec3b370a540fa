"""Read a Hugging Face ``config.json`` into a `ModelSpec`: one small function a model type.

Class defaults are not trusted for sizes: a size that the file does not state is an error.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ground.errors import InputError
from traces.models.fields import Fields
from traces.models.mixed_readers import (
    deepseek_v32,
    gemma4,
    glm_dsa,
    granite_hybrid,
    minimax,
    qwen3_5,
    qwen3_next,
)
from traces.models.readers import deepseek, gpt_oss, granite_shared, grouped, llama4, mixtral, qwen, qwen2, switch
from traces.models.spec import ModelSpec

#: Bytes a weight of the floating types that models are released in.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Types whose embedding is also the LM head unless their configuration says otherwise.
_TIED = ("switch_transformers", "gemma4_text")

#: As DeepSeek's, with ordinary attention: the first DeepSeek-MoE, GLM-4-MoE, dots.1, EXAONE-MoE.
_deepseek_moe = partial(deepseek, attention=grouped)

READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    **dict.fromkeys(("mixtral", "phimoe", "olmoe", "flex_olmo", "granitemoe"), mixtral),
    "granitemoeshared": granite_shared,
    "qwen2_moe": qwen2,
    # The last two, as glm4v_moe_text, are the text part of models that see or hear.
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), qwen),
    **dict.fromkeys(("glm4v_moe_text", "deepseek", "glm4_moe", "dots1"), _deepseek_moe),
    # transformers' class has no field for dense first layers: all are routed.
    "solar_open": partial(_deepseek_moe, first=0),
    # transformers' classes of these two list the layers, the second by default all but the first.
    "exaone_moe": partial(_deepseek_moe, listed=True),
    "glm4_moe_lite": partial(deepseek, first=1, listed=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), deepseek),
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "switch_transformers": switch,
    "minimax": minimax,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe_text": qwen3_5,
    "granitemoehybrid": granite_hybrid,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_dsa,
    "gemma4_text": gemma4,
}


def read_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that the contents of a Hugging Face ``config.json`` describe, with a nested ``text_config`` or without.

    Raises InputError for a model type that is not known (exactly, never by prefix), a field that is missing or
    impossible, and a model without routed layers; the message starts with ``name`` and names the field.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: the config is {type(config).__name__}; expected a JSON object")
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise InputError(f"{name}: text_config is {inner!r}; expected a JSON object")
    # What a composite config says of all its parts (type of the numbers, quantisation) stands outside the text part,
    # and what it says of the model's two ends counts.
    whole = {k: config[k] for k in ("tie_word_embeddings",) if inner and config.get(k) is not None}
    fields = Fields({**config, **{k: v for k, v in (inner or {}).items() if v is not None}, **whole}, name)
    model_type = fields.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        raise fields.fail("model_type", f"one of {', '.join(READERS)}")
    spec = READERS[model_type](fields)
    if spec["top_k"] > spec["experts"]:
        most = spec["experts"]
        raise InputError(f"{name}: {spec['top_k']} experts a token of {most}; expected at most {most}")
    if not spec["moe_layers"]:
        raise InputError(f"{name}: no layer of the {spec['layers']} is routed; expected a Mixture-of-Experts model")
    matrices = spec.get("expert_matrices", 3)
    expert, weight, embedding = _stored_bytes(fields, matrices * spec["hidden"] * spec["expert_ffn"])
    return ModelSpec(
        name=name,
        vocab=fields.integer("vocab_size"),
        tied=fields.flag("tie_word_embeddings", model_type in _TIED),
        expert_bytes=(expert,) * len(spec["moe_layers"]),
        weight_bytes=weight,
        embedding_bytes=embedding,
        source=str(config.get("_source", "")),
        **({"windows": (0,) * spec["layers"]} | spec),
    )


def _stored_bytes(fields: Fields, expert_parameters: int) -> tuple[int, int, int]:
    """Bytes of one expert, of a weight elsewhere, and of a weight of embedding and routers, as stored.

    fp8: one byte a weight in every linear layer; its block scales (0.02 %) are left out. mxfp4: 4 bits a weight and one
    8-bit scale for 32 of them (OCP Microscaling Formats 1.0), in the experts alone.
    """
    key = "dtype" if fields.config.get("dtype") is not None else "torch_dtype"
    dtype = fields.config.get(key) or "bfloat16"
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fields.fail(key, f"one of {', '.join(DTYPE_BYTES)}")
    plain = DTYPE_BYTES[dtype]
    quantised = fields.config.get("quantization_config") or {}
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
    if not quantised:
        return plain * expert_parameters, plain, plain
    if method == "fp8":
        return expert_parameters, 1, plain
    if method == "mxfp4":
        return -(-expert_parameters * 17 // 32), plain, plain
    raise InputError(f'{fields.name}: quantization_config.quant_method is {method!r}; expected "fp8", "mxfp4" or none')
