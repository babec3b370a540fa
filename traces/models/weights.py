"""The weight matrices of a model, by what they do: what a quantisation gives a format each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from traces.models.attention import Matrix
from traces.models.spec import ModelSpec

Part = Literal["experts", "attention", "ffn", "embeddings", "routers"]


@dataclass(frozen=True)
class Weight:
    """Matrices of one shape in one layer; those of the embeddings are in none, -1."""

    part: Part
    layer: int
    matrix: Matrix


def weights_of(model: ModelSpec) -> Iterator[Weight]:
    """All matrices of ``model``: those of one routed expert for all of its layer, in the order of layers.

    ``ffn`` is what every token passes: dense FFNs and shared experts.
    """
    hidden, routed = model.hidden, set(model.moe_layers)
    for layer in range(model.layers):
        crossed = 2 if model.cross_attention and layer >= model.encoder_layers else 1
        for matrix in model.attention_of(layer).matrices:
            yield Weight("attention", layer, replace(matrix, count=matrix.count * crossed))
        if layer in routed:
            yield Weight("routers", layer, Matrix("ffn_gate_inp", hidden, model.experts))
            yield from _ffn("experts", model, layer, model.expert_ffn)
        yield from _ffn("ffn", model, layer, model.shared_ffn if layer in routed else model.dense_ffn)
    yield Weight("embeddings", -1, Matrix("token_embd", hidden, model.vocab))
    if not model.tied:
        yield Weight("embeddings", -1, Matrix("output", hidden, model.vocab))


def _ffn(part: Part, model: ModelSpec, layer: int, width: int) -> Iterator[Weight]:
    if not width:
        return
    for role in ("ffn_gate", "ffn_up")[3 - model.expert_matrices :]:
        yield Weight(part, layer, Matrix(role, model.hidden, width))
    yield Weight(part, layer, Matrix("ffn_down", width, model.hidden))
