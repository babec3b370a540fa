"""Which model a routing record is of: known models by shape, and what a person says where the file does not."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ground.errors import InputError
from traces.arrays import integers


@dataclass(frozen=True)
class Given:
    """What a person says of a record; None leaves it to the file. A known model may be written in any case."""

    model: str | None = None
    experts: int | None = None
    layers: str | None = None
    domain: str | None = None
    source: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model.lower() in KNOWN:
            object.__setattr__(self, "model", self.model.lower())


@dataclass(frozen=True)
class Shape:
    """Routing shape of a model: the layer numbers that are routed, of how many, experts a layer and experts a token."""

    routed: range
    layers: int
    experts: int
    top_k: int


def _all(layers: int, experts: int, top_k: int) -> Shape:
    return Shape(range(layers), layers, experts, top_k)


def _after(dense: int, layers: int, experts: int, top_k: int) -> Shape:
    return Shape(range(dense, layers), layers, experts, top_k)


# num_hidden_layers, experts, experts per token and first_k_dense_replace of each model's published config.json.
KNOWN = {
    "mixtral-8x7b": _all(32, 8, 2),
    "mixtral-8x22b": _all(56, 8, 2),
    "phi-3.5-moe": _all(32, 16, 2),
    "qwen1.5-moe-a2.7b": _all(24, 60, 4),
    "qwen3-30b-a3b": _all(48, 128, 8),
    "qwen3-235b-a22b": _all(94, 128, 8),
    "qwen3-next-80b-a3b": _all(48, 512, 10),
    "olmoe-1b-7b": _all(16, 64, 8),
    "gpt-oss-20b": _all(24, 32, 4),
    "gpt-oss-120b": _all(36, 128, 4),
    "deepseek-moe-16b": _after(1, 28, 64, 6),
    "deepseek-v2-lite": _after(1, 27, 64, 6),
    "deepseek-v2": _after(1, 60, 160, 6),
    "deepseek-v3": _after(3, 61, 256, 8),
    "kimi-k2": _after(1, 61, 384, 8),
}


def parse_layers(text: str) -> list[int]:
    """Layer numbers of a text such as ``1-26`` or ``1,3,5-7``, increasing; raises InputError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if not match:
            raise InputError(f"layers {text!r}: {part!r}, expected numbers and ranges such as 1-26 or 1,3,5")
        low, high = int(match[1]), int(match[2] or match[1])
        numbers += range(low, high + 1)
    return _increasing(numbers, f"layers {text!r}")


def _increasing(numbers: list[int], where: str) -> list[int]:
    if not numbers or numbers[0] < 0 or any(b <= a for a, b in pairwise(numbers)):
        raise InputError(f"{where}: {numbers!s:.60}, expected increasing layer numbers from 0")
    return numbers


def by_shape(layers: int, top_k: int | None = None, experts: int | None = None, among: Iterable[str] = KNOWN) -> str:
    """The one known model with this many routed layers (and experts a token, and experts a layer).

    Raises InputError if none or several fit.
    """
    fits = [
        name
        for name in among
        if len(KNOWN[name].routed) == layers
        and top_k in (None, KNOWN[name].top_k)
        and experts in (None, KNOWN[name].experts)
    ]
    if len(fits) != 1:
        size = f"{layers} layers" + (f" x {experts} experts" if experts else "") + (f", top-{top_k}" if top_k else "")
        which = f"fits {' and '.join(fits)}" if fits else "is of no known model"
        raise InputError(f"model: a record of {size} {which}, expected --model NAME")
    return fits[0]


def one_number(name: str, array: np.ndarray) -> int:
    """The whole number that an array of one entry holds; raises InputError."""
    if array.size != 1 or array.dtype.kind not in "iu":
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected one whole number")
    return int(array.reshape(-1)[0])


def resolve_experts(model: str, given: int | None, stored: np.ndarray | None) -> int:
    """E: of --experts, the file's ``n_experts`` and the known model, which must agree; raises InputError."""
    said = {}
    if given is not None:
        said["--experts"] = given
    if stored is not None:
        said["array 'n_experts'"] = one_number("n_experts", stored)
    if model in KNOWN:
        said[model] = KNOWN[model].experts
    if not said:
        raise InputError(f"experts: the file does not say how many {model} has, expected --experts N")
    if len(set(said.values())) > 1:
        raise InputError(f"experts: {', '.join(f'{who} says {n}' for who, n in said.items())}, expected one number")
    experts = next(iter(said.values()))
    if not 1 <= experts <= 2**15:
        raise InputError(f"experts: {experts}, expected 1 to {2**15}")
    return experts


def resolve_layers(model: str, recorded: int, given: str | None, stored: np.ndarray | None) -> list[int]:
    """Model layer number of each of ``recorded`` layers.

    A model whose first layers are dense, or which is not known, must be told: a record's row number is not a layer
    number there. Raises InputError if they are missing, contradict each other or do not fit the model.
    """
    layers = None if given is None else parse_layers(given)
    if stored is not None:
        ids = integers(stored.reshape(-1), np.int32, "array 'layer_ids'").tolist()
        _increasing(ids, "array 'layer_ids'")
        if layers is not None and layers != ids:
            raise InputError(f"array 'layer_ids': {ids!s:.60}, but --layers says {given}")
        layers = ids
    shape = KNOWN.get(model)
    if layers is None:
        if shape is None or len(shape.routed) < shape.layers:
            why = "is not known" if shape is None else f"has dense layers ({shape.layers - len(shape.routed)})"
            hint = f"--layers {shape.routed[0]}-{shape.routed[-1]}" if shape else f"such as --layers 0-{recorded - 1}"
            raise InputError(f"layers: {model} {why} and the file has no layer_ids, expected them or {hint}")
        layers = list(shape.routed)
        if len(layers) != recorded:
            raise InputError(f"layers: {recorded} recorded, expected the {len(layers)} routed layers of {model}")
    elif shape is not None and layers != list(shape.routed):
        raise InputError(
            f"layers: {layers!s:.60}, expected all {len(shape.routed)} routed layers of {model}, "
            f"{shape.routed[0]}-{shape.routed[-1]}"
        )
    return layers


def unlike_model(model: str, top_k: int) -> list[str]:
    """A note where a record's top_k is not the model's own."""
    if model not in KNOWN or KNOWN[model].top_k == top_k:
        return []
    return [f"run with {top_k} experts a token; {model}'s own config says {KNOWN[model].top_k}"]
