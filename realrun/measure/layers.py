"""Attention and router of one layer: a token over the context that it attends to, and a prompt over its rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from realrun.measure.machine import Machine, Timing
from sim.model import ModelSpec

CONTEXTS = (64, 256, 1024, 2048, 4096, 8192)
PROMPTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, order=True)
class Heads:
    """What of a model decides the time of a layer: its width, its grouped-query heads, its router."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int

    @property
    def shape(self) -> str:
        """As ``Attention.shape`` of a model has it."""
        return f"GQA {self.heads}/{self.kv_heads}/{self.head_dim}"


def heads_of(models: Iterable[ModelSpec]) -> list[Heads]:
    """The distinct layers of ``models``; those with latent attention, windows or fp8 weights are left out."""
    found: dict[tuple[object, ...], Heads] = {}
    for model in models:
        kind, _, numbers = model.attention.shape.partition(" ")
        if kind != "GQA" or any(model.windows) or model.cross_attention or model.weight_bytes != 2:
            continue
        heads, kv_heads, head_dim = map(int, numbers.split("/"))
        # One layer is timed for models that differ in nothing but how many experts a token takes.
        key = (model.hidden, model.attention.shape, model.experts)
        found.setdefault(key, Heads(model.hidden, heads, kv_heads, head_dim, model.experts, model.top_k))
    return sorted(found.values())


@dataclass(frozen=True)
class LayerTimes:
    """By cached tokens, of one row; and by rows, of a prompt."""

    decode: dict[int, Timing]
    prefill: dict[int, Timing]


def layer_times(
    machine: Machine, heads: Heads, graph: bool, contexts: Iterable[int] = CONTEXTS, prompts: Iterable[int] = PROMPTS
) -> LayerTimes:
    """Times of one layer, weights and cache not in any cache of the device."""
    weight_bytes = 2 * heads.hidden * heads.head_dim * 2 * (heads.heads + heads.kv_heads)
    sets = [_weights(machine, heads) for _ in range(min(12, machine.copies(weight_bytes)))]

    def time(rows: int, context: int) -> Timing:
        work = [_layer(machine, heads, weights, rows, context) for weights in sets]
        return machine.time(*([machine.graph(one) for one in work] if graph else work))

    return LayerTimes({c: time(1, c) for c in contexts}, {r: time(r, r) for r in prompts})


def _weights(machine: Machine, heads: Heads) -> list[Any]:
    width = heads.head_dim * (heads.heads + 2 * heads.kv_heads)
    return [
        machine.random(width, heads.hidden),
        machine.random(heads.hidden, heads.heads * heads.head_dim),
        machine.random(heads.experts, heads.hidden),
    ]


def _layer(machine: Machine, heads: Heads, weights: list[Any], rows: int, context: int) -> Callable[[], Any]:
    """Projections, attention over ``context`` cached tokens of which ``rows`` are new, output, router, top-k."""
    functional = machine.torch.nn.functional
    into, out, router = weights
    tokens = machine.random(rows, heads.hidden, scale=1.0)
    cache = [machine.random(1, heads.kv_heads, context, heads.head_dim) for _ in range(2)]
    split = [heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * heads.head_dim]

    def run() -> Any:
        query, key, value = functional.linear(tokens, into).split(split, dim=1)
        for held, new in zip(cache, (key, value), strict=True):
            held[0, :, context - rows :] = new.view(rows, heads.kv_heads, heads.head_dim).transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(
            query.view(1, rows, heads.heads, heads.head_dim).transpose(1, 2),
            *cache,
            is_causal=rows > 1,
            enable_gqa=True,
        )
        states = tokens + functional.linear(mixed.transpose(1, 2).reshape(rows, -1), out)
        return functional.linear(states, router).float().softmax(-1).topk(heads.top_k)

    return run
