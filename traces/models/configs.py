"""Read a Hugging Face ``config.json`` into a `ModelSpec`: one small function a model type.

Field names and layer rules are those of the ``transformers`` configuration and modelling classes of each type. Class
defaults are not trusted for sizes: a size that the file does not state is an error.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ground.errors import InputError
from traces.models.spec import Attention, ModelSpec

#: Bytes a weight of the floating types that models are released in.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: More layers than this are a slip of the keyboard.
MOST_LAYERS = 10_000


class Fields:
    """Typed access to one config; every refusal names the config and the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def fail(self, key: str, expected: str) -> InputError:
        """The error for a field that is missing or impossible."""
        found = f"is {self.config[key]!r}" if key in self.config else "is missing"
        return InputError(f"{self.name}: {key} {found}; expected {expected}")

    def integer(self, *keys: str, least: int = 1, most: int = 10**9, default: int | None = None) -> int:
        """The first of ``keys`` that is there, a whole number from ``least`` to ``most``; null counts as missing."""
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"a whole number from {least} to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A true or false field."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def layer_numbers(self, key: str, layers: int) -> tuple[int, ...] | None:
        """A list of distinct layer numbers, ascending, or None where the field is missing or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(n) is not int or not 0 <= n < layers for n in value):
            raise self.fail(key, f"a list of layer numbers from 0 to {layers - 1}")
        return tuple(sorted(set(value)))

    def words(self, key: str, length: int) -> list[str] | None:
        """A list of ``length`` strings, or None where the field is missing or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length or not all(isinstance(w, str) for w in value):
            raise self.fail(key, f"a list of {length} strings, one a layer")
        return list(value)


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
        tied=fields.flag("tie_word_embeddings", model_type == "switch_transformers"),
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


def _grouped(fields: Fields, hidden: int) -> Attention:
    heads = fields.integer("num_attention_heads")
    if fields.config.get("head_dim") is None and hidden % heads:
        raise fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}, or a head_dim")
    kv_heads = fields.integer("num_key_value_heads")
    return Attention.grouped(hidden, heads, kv_heads, fields.integer("head_dim", default=hidden // heads))


def _latent(fields: Fields, hidden: int) -> Attention:
    return Attention.latent(
        hidden,
        heads=fields.integer("num_attention_heads"),
        q_rank=fields.integer("q_lora_rank", default=0),
        kv_rank=fields.integer("kv_lora_rank"),
        nope=fields.integer("qk_nope_head_dim"),
        rope=fields.integer("qk_rope_head_dim"),
        value=fields.integer("v_head_dim"),
    )


def _trunk(fields: Fields) -> dict[str, Any]:
    """Fields that decoder-only types share."""
    return {
        "layers": fields.integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden": fields.integer("hidden_size"),
        "top_k": fields.integer("num_experts_per_tok", "experts_per_token"),
    }


def _routed(fields: Fields, layers: int, rule: Callable[[int], bool]) -> dict[str, Any]:
    """The routed layers: those that ``mlp_layer_types`` calls sparse or, without it, those of the family's ``rule``."""
    kinds = fields.words("mlp_layer_types", layers)
    if kinds and not {"dense", "sparse"}.issuperset(kinds):
        raise fields.fail("mlp_layer_types", "dense or sparse for each layer")
    routed = tuple(n for n in range(layers) if (kinds[n] == "sparse" if kinds else rule(n)))
    return {"moe_layers": routed, "dense_ffn": fields.integer("intermediate_size") if len(routed) < layers else 0}


def _mixtral(fields: Fields) -> dict[str, Any]:
    """Every layer routed; ``intermediate_size`` is the experts' (Mixtral, Phi-3.5-MoE, OLMoE, Granite-MoE)."""
    spec = _trunk(fields)
    window = fields.integer("sliding_window", least=0, default=0)
    return spec | {
        "moe_layers": tuple(range(spec["layers"])),
        "experts": fields.integer("num_local_experts", "num_experts"),
        "expert_ffn": fields.integer("intermediate_size"),
        "attention": _grouped(fields, spec["hidden"]),
        "windows": (window,) * spec["layers"],
    }


def _qwen(fields: Fields) -> dict[str, Any]:
    """Routed every ``decoder_sparse_step`` layers except ``mlp_only_layers``."""
    spec = _trunk(fields)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.layer_numbers("mlp_only_layers", spec["layers"]) or ()
    spec |= _routed(fields, spec["layers"], lambda n: n not in dense and (n + 1) % step == 0)
    return spec | {
        "experts": fields.integer("num_experts", "num_local_experts"),
        "expert_ffn": fields.integer("moe_intermediate_size"),
        "attention": _grouped(fields, spec["hidden"]),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return _qwen(fields) | {"shared_ffn": fields.integer("shared_expert_intermediate_size")}


def _deepseek(
    fields: Fields, attention: Callable[[Fields, int], Attention] = _latent, first: int | None = None
) -> dict[str, Any]:
    """Dense first layers, ``first`` where the file need not say, then routed ones with shared experts of one width."""
    spec = _trunk(fields)
    if fields.config.get("mlp_layer_types") is None:
        first = fields.integer("first_k_dense_replace", least=0, default=first)
    step = fields.integer("moe_layer_freq", default=1)
    spec |= _routed(fields, spec["layers"], lambda n: n >= (first or 0) and n % step == 0)
    width = fields.integer("moe_intermediate_size")
    return spec | {
        "experts": fields.integer("n_routed_experts", "num_local_experts", "num_experts"),
        "expert_ffn": width,
        "shared_ffn": fields.integer("n_shared_experts", "num_shared_experts", least=0, default=0) * width,
        "attention": attention(fields, spec["hidden"]),
    }


def _granite_shared(fields: Fields) -> dict[str, Any]:
    return _mixtral(fields) | {"shared_ffn": fields.integer("shared_intermediate_size", least=0)}


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    spec = _mixtral(fields)
    kinds = fields.words("layer_types", spec["layers"])
    # Every other layer is windowed, beginning with the first, where the file does not list them.
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [n % 2 == 0 for n in range(spec["layers"])]
    window = fields.integer("sliding_window")
    return spec | {"windows": tuple(window if short else 0 for short in windowed)}


def _llama4(fields: Fields) -> dict[str, Any]:
    """Routed every ``interleave_moe_layer_step`` layers, with one shared expert as wide as a routed one."""
    spec = _trunk(fields)
    layers = spec["layers"]
    step = fields.integer("interleave_moe_layer_step", default=1)
    routed = fields.layer_numbers("moe_layers", layers) or tuple(range(step - 1, layers, step))
    width = fields.integer("intermediate_size")
    # Layers with rotary positions attend within chunks, every 4th one without them attends to everything.
    chunk = fields.integer("attention_chunk_size", least=0, default=0)
    interval = fields.integer("no_rope_layer_interval", default=4)
    return spec | {
        "moe_layers": routed,
        "experts": fields.integer("num_local_experts"),
        "expert_ffn": width,
        "shared_ffn": width,
        "dense_ffn": fields.integer("intermediate_size_mlp") if len(routed) < layers else 0,
        "attention": _grouped(fields, spec["hidden"]),
        "windows": tuple(chunk if (n + 1) % interval else 0 for n in range(layers)),
    }


def _switch(fields: Fields) -> dict[str, Any]:
    """Encoder, then decoder; in each stack layer 1 and every ``step``-th after it is routed, top-1."""
    encoder = fields.integer("num_layers", most=MOST_LAYERS)
    decoder = fields.integer("num_decoder_layers", "num_layers", most=MOST_LAYERS)
    hidden, heads = fields.integer("d_model"), fields.integer("num_heads")

    def routed(layers: int, key: str) -> list[int]:
        sparse = fields.integer(key, least=0)
        step = layers // sparse if sparse else 0
        return [n for n in range(layers) if step == 1 or (step and n % step == 1)]

    moe = routed(encoder, "num_sparse_encoder_layers")
    moe += [encoder + n for n in routed(decoder, "num_sparse_decoder_layers")]
    return {
        "layers": encoder + decoder,
        "moe_layers": tuple(moe),
        "hidden": hidden,
        "experts": fields.integer("num_experts"),
        "top_k": 1,
        "expert_ffn": fields.integer("d_ff"),
        "dense_ffn": fields.integer("d_ff"),
        "expert_matrices": 2,
        "attention": Attention.grouped(hidden, heads, heads, fields.integer("d_kv")),
        "encoder_layers": encoder,
        "cross_attention": True,
    }


# Read as DeepSeek's, with ordinary attention: the first DeepSeek-MoE, GLM-4-MoE, dots.1, EXAONE-MoE.
_deepseek_moe = partial(_deepseek, attention=_grouped)

READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    **dict.fromkeys(("mixtral", "phimoe", "olmoe", "flex_olmo", "granitemoe"), _mixtral),
    "granitemoeshared": _granite_shared,
    "qwen2_moe": _qwen2,
    # The last two, as glm4v_moe_text, are the text part of models that see or hear.
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), _qwen),
    **dict.fromkeys(("glm4v_moe_text", "deepseek", "glm4_moe", "dots1"), _deepseek_moe),
    # transformers' class has no field for dense first layers: all are routed.
    "solar_open": partial(_deepseek_moe, first=0),
    "exaone_moe": _deepseek_moe,
    # transformers' class lists the layers instead, by default all but the first.
    "glm4_moe_lite": partial(_deepseek, first=1),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "switch_transformers": _switch,
}
