"""A model's sizes as its own file has them: every tensor's bytes by what it does, from headers alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from traces.models.spec import ModelSpec, Stored
from traces.models.weights import Part


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its name, its length in each dimension, the fastest first, its format and all its bytes."""

    name: str
    shape: tuple[int, ...]
    form: str
    size: int


@dataclass
class Sizes:
    """Bytes of a model by what they are for.

    Attributes:
        layers: of each part and layer.
        embedding, head: outside of layers; None for a head that is the embedding.
        forms: weights of the routed experts by format.
    """

    layers: Counter[tuple[Part, int]] = field(default_factory=Counter)
    embedding: int = 0
    head: int | None = None
    forms: Counter[str] = field(default_factory=Counter)

    def add(self, tensor: Tensor, part: Part | None, layer: int) -> None:
        """Count a tensor; ``part`` None for one that is not run."""
        if part == "embeddings" and layer == HEAD:
            self.head = (self.head or 0) + tensor.size
        elif part == "embeddings":
            self.embedding += tensor.size
        elif part is not None:
            self.layers[part, layer] += tensor.size

    def stored(self, model: ModelSpec, label: str) -> Stored:
        """What `ModelSpec` keeps of them."""

        def of(part: Part, layers: Iterable[int]) -> tuple[int, ...]:
            return tuple(self.layers[part, layer] for layer in layers)

        return Stored(
            attention=of("attention", range(model.layers)),
            ffn=of("ffn", range(model.layers)),
            routers=of("routers", model.moe_layers),
            embedding=self.embedding,
            head=self.embedding if self.head is None else self.head,
            formats=tuple(self.forms.items()),
            label=label,
        )

    def expert_bytes(self, model: ModelSpec) -> tuple[int, ...]:
        """Of one expert of each routed layer; of unequal ones the mean, rounded up."""
        return tuple(-(-self.layers["experts", layer] // model.experts) for layer in model.moe_layers)


HEAD = -2
"""The layer of what comes after all layers."""

_BLOCK = re.compile(r"(?:^|\.)(?:blk|layers|block|h)\.(\d+)\.(.*)")


def placed(name: str, part_of: Callable[[str], Part]) -> tuple[Part | None, int]:
    """The part and the layer of a tensor by its name; ``part_of`` tells the part by what follows the layer's number."""
    if match := _BLOCK.search(name):
        return part_of(match[2]), int(match[1])
    last = name.startswith(("output", "lm_head")) or ".norm." in f".{name}"
    return "embeddings", HEAD if last and "norm" not in name else -1
