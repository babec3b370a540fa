"""A model in another precision, as a person names it: a preset, formats of single parts, or both.

``q4_k_m`` is a preset of llama.cpp, ``fp8`` one format for all but embeddings and routers, ``q4_k_m+attention=q8_0`` a
preset with one part in another format, ``experts=mxfp4`` the model as it is with other experts.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from ground.errors import InputError
from traces.models.blocks import FORMATS, matrix_bytes
from traces.models.gguf_mixes import BASE, Mix
from traces.models.spec import ModelSpec, Stored
from traces.models.weights import Part, Weight, weights_of

_LINEAR: tuple[Part, ...] = ("experts", "attention", "ffn")
WHOLE: dict[str, tuple[str, tuple[Part, ...]]] = {
    "fp8": ("fp8", _LINEAR),
    "mxfp4": ("mxfp4", ("experts",)),
    "nvfp4": ("nvfp4", _LINEAR),
    "awq": ("int4-awq", _LINEAR),
    "gptq": ("int4-gptq", _LINEAR),
}
"""Presets of one format, and the parts that have it. All else is in bf16: embeddings, routers; with mxfp4, as gpt-oss
has it, attention too."""
PRESETS = (*BASE, *WHOLE)
PARTS: tuple[Part, ...] = (*_LINEAR, "embeddings")
"""Parts that may have a format of their own; ``ffn`` is dense FFNs and shared experts."""


def quantised(model: ModelSpec, quant: str | None) -> ModelSpec:
    """``model`` as ``quant`` has it; as it is for None. Bytes are those of the formats' blocks, exactly.

    Raises InputError for what is no preset, part or format.
    """
    if quant is None:
        return model
    preset, parts = _parsed(quant)
    rule = None if preset is None else _rule(preset, model)
    sizes, forms = Counter[tuple[str, int]](), Counter[str]()
    for weight in weights_of(model):
        form = parts.get(weight.part) or (rule(weight) if rule else None)
        if form is None:
            continue
        matrix = weight.matrix
        where = matrix.role if weight.part == "embeddings" else weight.part
        sizes[where, weight.layer] += matrix.count * matrix_bytes(form, matrix.columns, matrix.rows)
        if weight.part == "experts":
            forms[form] += matrix.weights * model.experts

    def bytes_of(part: Part, layers: Iterable[int], kept: Callable[[int], int]) -> tuple[int, ...]:
        given = rule is not None or part in parts
        return tuple(sizes[part, layer] if given else kept(layer) for layer in layers)

    every, own = range(model.layers), model.stored
    embedding = sizes["token_embd", -1] or model.embedding_table_bytes
    expert_of = dict(zip(model.moe_layers, model.expert_bytes, strict=True))
    return replace(
        model,
        expert_bytes=bytes_of("experts", model.moe_layers, expert_of.__getitem__),
        stored=Stored(
            attention=bytes_of("attention", every, model.attention_bytes),
            ffn=bytes_of("ffn", every, model.ffn_bytes),
            routers=bytes_of("routers", model.moe_layers, model.router_bytes),
            embedding=embedding,
            head=embedding if model.tied else sizes["output", -1] or model.head_bytes,
            formats=tuple(forms.items()) or (own.formats if own else ()),
            label=quant,
        ),
    )


def _parsed(quant: str) -> tuple[str | None, dict[Part, str]]:
    """The preset, if there is one, and the format of each part that is named."""
    first, *rest = (text.strip().lower() for text in quant.split("+"))
    named = rest if "=" not in first else [first, *rest]
    preset = first if "=" not in first else None
    if preset is not None and preset not in PRESETS:
        raise InputError(
            f"--quant {quant!r}: {first!r} is no preset; expected one of {', '.join(PRESETS)}, or PART=FORMAT with a "
            f"part of {', '.join(PARTS)}"
        )
    parts: dict[Part, str] = {}
    for text in named:
        name, _, form = text.partition("=")
        part = next((one for one in PARTS if one == name), None)
        if part is None or part in parts or form not in FORMATS:
            raise InputError(
                f"--quant {quant!r}: {text!r}; expected one of {', '.join(PARTS)} once, = and a format of "
                f"{', '.join(FORMATS)}"
            )
        parts[part] = form
    return preset, parts


def _rule(preset: str, model: ModelSpec) -> Callable[[Weight], str]:
    """The format that a preset gives each matrix of ``model``."""
    if preset in BASE:
        return Mix(preset, model).form
    form, having = WHOLE[preset]
    return lambda weight: form if weight.part in having else "bf16"
