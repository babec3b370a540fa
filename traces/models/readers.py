"""What a model of each type is made of, by its configuration: families whose layers all attend in one way.

A reader gives the fields of a `ModelSpec` that differ from family to family. Field names and layer rules are those of
the ``transformers`` configuration and modelling classes of each type.
"""

from collections.abc import Callable
from typing import Any

from traces.models.attention import Attention
from traces.models.fields import Fields

#: More layers than this are a slip of the keyboard.
MOST_LAYERS = 10_000


def heads_of(fields: Fields, hidden: int) -> tuple[int, int]:
    """The number of query heads and the width of one."""
    heads = fields.integer("num_attention_heads")
    if fields.config.get("head_dim") is None and hidden % heads:
        raise fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}, or a head_dim")
    return heads, fields.integer("head_dim", default=hidden // heads)


def grouped(fields: Fields, hidden: int, gated: bool = False) -> Attention:
    """Attention whose keys and values are shared by groups of equally many query heads."""
    heads, head_dim = heads_of(fields, hidden)
    kv_heads = fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return Attention.grouped(hidden, heads, kv_heads, head_dim, gated)


def latent(fields: Fields, hidden: int, index_heads: int = 0, index_dim: int = 0) -> Attention:
    """Multi-head latent attention; the queries of an index are made of their latent, which then must be there."""
    return Attention.latent(
        hidden,
        heads=fields.integer("num_attention_heads"),
        q_rank=fields.integer("q_lora_rank", default=None if index_heads else 0),
        kv_rank=fields.integer("kv_lora_rank"),
        nope=fields.integer("qk_nope_head_dim"),
        rope=fields.integer("qk_rope_head_dim"),
        value=fields.integer("v_head_dim"),
        index_heads=index_heads,
        index_dim=index_dim,
    )


def trunk(fields: Fields) -> dict[str, Any]:
    """Fields that decoder-only types share."""
    return {
        "layers": fields.integer("num_hidden_layers", most=MOST_LAYERS),
        "hidden": fields.integer("hidden_size"),
        "top_k": fields.integer("num_experts_per_tok", "experts_per_token", "top_k_experts"),
    }


def _routed(fields: Fields, layers: int, rule: Callable[[int], bool], listed: bool = False) -> dict[str, Any]:
    """The routed layers: those of the family's ``rule``.

    Where the family's class reads a list of them (``listed``), those that ``mlp_layer_types`` calls sparse come first.
    """
    kinds = fields.words("mlp_layer_types", layers) if listed else None
    if kinds and not {"dense", "sparse"}.issuperset(kinds):
        raise fields.fail("mlp_layer_types", "dense or sparse for each layer")
    routed = tuple(n for n in range(layers) if (kinds[n] == "sparse" if kinds else rule(n)))
    return {"moe_layers": routed, "dense_ffn": fields.integer("intermediate_size") if len(routed) < layers else 0}


def mixtral(fields: Fields) -> dict[str, Any]:
    """Every layer routed; ``intermediate_size`` is the experts' (Mixtral, Phi-3.5-MoE, OLMoE, Granite-MoE)."""
    spec = trunk(fields)
    window = fields.integer("sliding_window", least=0, default=0)
    return spec | {
        "moe_layers": tuple(range(spec["layers"])),
        "experts": fields.integer("num_local_experts", "num_experts"),
        "expert_ffn": fields.integer("intermediate_size"),
        "attention": grouped(fields, spec["hidden"]),
        "windows": (window,) * spec["layers"],
    }


def qwen(fields: Fields) -> dict[str, Any]:
    """Routed every ``decoder_sparse_step`` layers except ``mlp_only_layers``."""
    spec = trunk(fields)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.layer_numbers("mlp_only_layers", spec["layers"]) or ()
    spec |= _routed(fields, spec["layers"], lambda n: n not in dense and (n + 1) % step == 0)
    return spec | {
        "experts": fields.integer("num_experts", "num_local_experts"),
        "expert_ffn": fields.integer("moe_intermediate_size"),
        "attention": grouped(fields, spec["hidden"]),
    }


def qwen2(fields: Fields) -> dict[str, Any]:
    """The same with a shared expert."""
    return qwen(fields) | {"shared_ffn": fields.integer("shared_expert_intermediate_size")}


def deepseek(
    fields: Fields,
    attention: Callable[[Fields, int], Attention] = latent,
    first: int | None = None,
    listed: bool = False,
) -> dict[str, Any]:
    """Dense first layers, ``first`` where the file need not say, then routed ones with shared experts of one width."""
    spec = trunk(fields)
    if not listed or fields.config.get("mlp_layer_types") is None:
        first = fields.integer("first_k_dense_replace", least=0, default=first)
    step = fields.integer("moe_layer_freq", default=1)
    spec |= _routed(fields, spec["layers"], lambda n: n >= (first or 0) and n % step == 0, listed)
    width = fields.integer("moe_intermediate_size")
    return spec | {
        "experts": fields.integer("n_routed_experts", "num_local_experts", "num_experts"),
        "expert_ffn": width,
        "shared_ffn": fields.integer("n_shared_experts", "num_shared_experts", least=0, default=0) * width,
        "attention": attention(fields, spec["hidden"]),
    }


def granite_shared(fields: Fields) -> dict[str, Any]:
    """As Mixtral, with a shared expert."""
    return mixtral(fields) | {"shared_ffn": fields.integer("shared_intermediate_size", least=0)}


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """As Mixtral, with a window in some layers."""
    spec = mixtral(fields)
    kinds = fields.words("layer_types", spec["layers"])
    # Every other layer is windowed, beginning with the first, where the file does not list them.
    windowed = [kind == "sliding_attention" for kind in kinds] if kinds else [n % 2 == 0 for n in range(spec["layers"])]
    window = fields.integer("sliding_window")
    return spec | {"windows": tuple(window if short else 0 for short in windowed)}


def llama4(fields: Fields) -> dict[str, Any]:
    """Routed every ``interleave_moe_layer_step`` layers, with one shared expert as wide as a routed one."""
    spec = trunk(fields)
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
        "attention": grouped(fields, spec["hidden"]),
        "windows": tuple(chunk if (n + 1) % interval else 0 for n in range(layers)),
    }


def switch(fields: Fields) -> dict[str, Any]:
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
