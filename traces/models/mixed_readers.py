"""What a model of each type is made of, by its configuration: families whose layers mix tokens in more than one way.

Some layers have linear attention, an index that selects what attention reads, or attention of another size.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from traces.models.attention import Attention
from traces.models.fields import Fields
from traces.models.readers import deepseek, granite_shared, grouped, heads_of, latent, mixtral, qwen2, trunk

# Names that older files have.
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _layers_of_kind(
    fields: Fields, layers: int, kinds: tuple[str, str], rule: Callable[[int], bool], key: str = "layer_types"
) -> tuple[int, ...]:
    """Layers of the first of two ``kinds``: as the file lists them or, where it does not, by the family's ``rule``."""
    listed = [_OLDER.get(kind, kind) for kind in fields.words(key, layers) or ()]
    if not set(kinds).issuperset(listed):
        raise fields.fail(key, f"{kinds[0]} or {kinds[1]} for each layer")
    return tuple(n for n in range(layers) if (listed[n] == kinds[0] if listed else rule(n)))


_linear_layers = partial(_layers_of_kind, kinds=("linear_attention", "full_attention"))


def minimax(fields: Fields) -> dict[str, Any]:
    """As Mixtral; every other layer, beginning with the second, has lightning attention."""
    spec = mixtral(fields)
    return spec | {
        "other_attention": Attention.lightning(spec["hidden"], *heads_of(fields, spec["hidden"])),
        "other_layers": _linear_layers(fields, spec["layers"], rule=lambda n: n % 2 == 1),
    }


def qwen3_next(fields: Fields) -> dict[str, Any]:
    """As Qwen2-MoE; every ``full_attention_interval``-th layer has gated attention, the others are gated delta nets."""
    spec = qwen2(fields)
    interval = fields.integer("full_attention_interval", default=4)
    return spec | {
        "attention": grouped(fields, spec["hidden"], gated=True),
        "other_attention": Attention.delta(
            spec["hidden"],
            heads=fields.integer("linear_num_key_heads"),
            key=fields.integer("linear_key_head_dim"),
            value_heads=fields.integer("linear_num_value_heads"),
            value=fields.integer("linear_value_head_dim"),
            kernel=fields.integer("linear_conv_kernel_dim"),
        ),
        "other_layers": _linear_layers(fields, spec["layers"], rule=lambda n: (n + 1) % interval > 0),
    }


def qwen3_5(fields: Fields) -> dict[str, Any]:
    """As Qwen3-Next with every layer routed: its class knows no other."""
    unread = ("decoder_sparse_step", "mlp_only_layers")
    return qwen3_next(Fields({k: v for k, v in fields.config.items() if k not in unread}, fields.name))


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """As Granite-MoE-shared; the layers that the file lists, without a list all, are Mamba-2."""
    spec = granite_shared(fields)
    inner = fields.integer("mamba_expand") * spec["hidden"]
    heads = fields.integer("mamba_n_heads")
    stated = fields.config.get("mamba_d_head")
    if inner % heads or stated not in (None, "auto", inner // heads):
        raise fields.fail("mamba_d_head", f'"auto", and mamba_n_heads {heads} heads that make {inner}')
    return spec | {
        "other_attention": Attention.mamba2(
            spec["hidden"], heads, inner // heads,
            groups=fields.integer("mamba_n_groups"),
            state=fields.integer("mamba_d_state"),
            kernel=fields.integer("mamba_d_conv"),
        ),
        "other_layers": _linear_layers(fields, spec["layers"], rule=lambda n: True),
    }  # fmt: skip


def _indexed(fields: Fields, hidden: int) -> Attention:
    return latent(fields, hidden, fields.integer("index_n_heads"), fields.integer("index_head_dim"))


def deepseek_v32(fields: Fields) -> dict[str, Any]:
    """As DeepSeek-V3; an index chooses ``index_topk`` of the tokens before a row, which alone its attention reads."""
    spec = deepseek(fields, _indexed, listed=True)
    return spec | {"windows": (fields.integer("index_topk"),) * spec["layers"]}


def glm_dsa(fields: Fields) -> dict[str, Any]:
    """As DeepSeek-V3.2; some layers have no index and read what that of a layer before them chose."""
    spec = deepseek_v32(fields)
    frequency = fields.integer("index_topk_freq", default=1)
    offset = fields.integer("index_skip_topk_offset", least=0, default=2)
    pattern = fields.config.get("index_topk_pattern")
    if isinstance(pattern, str):
        pattern = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if fields.config.get("indexer_types") is None:
        fields = Fields({**fields.config, "indexer_types": pattern}, fields.name)
    kinds, skips = ("shared", "full"), lambda n: max(n - offset + 1, 0) % frequency > 0
    return spec | {
        "other_attention": latent(fields, spec["hidden"]),
        "other_layers": _layers_of_kind(fields, spec["layers"], kinds, skips, "indexer_types"),
    }


def gemma4(fields: Fields) -> dict[str, Any]:
    """Every layer has a dense FFN beside its experts; all layers but every 6th and the last have a window.

    Layers without a window have heads of their own number and width. Keys are their values where ``attention_k_eq_v``
    says so, and both are cached, since keys alone are turned by their positions.
    """
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.config.get(key) != 0:
            raise fields.fail(key, "0: per-layer embeddings and shared keys are not charged")
    spec = trunk(fields)
    layers, hidden = spec["layers"], spec["hidden"]
    listed = _layers_of_kind(fields, layers, ("sliding_attention", "full_attention"), lambda n: (n + 1) % 6 > 0)
    windowed = tuple(n for n in listed if n < layers - 1)
    wide = _without_window(fields, set(range(layers)).difference(windowed))
    attention = grouped(wide, hidden)
    if wide.flag("attention_k_eq_v", False):
        attention = replace(attention, matrices=tuple(m for m in attention.matrices if m.role != "attn_v"))
    window = fields.integer("sliding_window")
    return spec | {
        "moe_layers": tuple(range(layers)) if fields.flag("enable_moe_block", False) else (),
        "experts": fields.integer("num_experts"),
        "expert_ffn": fields.integer("moe_intermediate_size"),
        "shared_ffn": fields.integer("intermediate_size"),
        "attention": attention,
        "other_attention": grouped(fields, hidden),
        "other_layers": windowed,
        "windows": tuple(window if n in windowed else 0 for n in range(layers)),
    }


def _without_window(fields: Fields, layers: set[int]) -> Fields:
    """The fields of ``layers``: as released, with names of their own; as transformers saves them, a layer at a time."""
    config = fields.config
    saved = config.get("per_layer_config")
    if saved is None:
        own = {"head_dim": config.get("global_head_dim")}
        if fields.flag("attention_k_eq_v", False) and config.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
        fields.integer("global_head_dim")
        return Fields({**config, **own}, fields.name)
    entries = list(saved.values()) if isinstance(saved, Mapping) else []
    numbers = {int(key) for key in saved if str(key).isdecimal()} if entries else set()
    if numbers != layers or not isinstance(entries[0], Mapping) or any(one != entries[0] for one in entries):
        raise fields.fail("per_layer_config", "the same fields for each layer of full_attention and no other")
    return Fields({**config, **entries[0]}, fields.name)
