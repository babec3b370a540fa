"""Where the routers of a Hugging Face Mixture-of-Experts model are, and which of them cannot be recorded.

Routers are found by class, never by a configuration field, so a model without a known router is refused instead of
silently recording nothing.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.capture.families import FAMILIES
from traces.capture.family import Family

if TYPE_CHECKING:
    import torch
    from torch import nn

PARTS = ("encoder", "decoder")
_ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class RoutedLayer:
    """A routed layer of a model: its layer number, router, experts module (None: nothing to compare) and family."""

    layer: int
    name: str
    router: "nn.Module"
    experts: "nn.Module | None"
    family: Family


def parts(model: Any) -> tuple[str, ...]:
    """``encoder`` and ``decoder`` of a model that has both, else one part without a name."""
    return PARTS if getattr(model.config, "is_encoder_decoder", False) else ("",)


def routed_layers(
    model: "nn.Module", part: str = "", families: Mapping[str, Family] | None = None
) -> list[RoutedLayer]:
    """The routed layers of ``model``, or of its encoder or decoder, in layer order.

    Raises InputError if there is none (a dense model), if a router is of a family that ``families`` (default: FAMILIES)
    does not know, if it has no experts module beside it, or if it is quantised or holds a value that is not finite.
    """
    known = FAMILIES if families is None else families
    modules = {name: module for name, module in model.named_modules() if not part or name.startswith(f"{part}.")}
    found = {}
    for name, module in modules.items():
        family = known.get(type(module).__name__)
        if family is None:
            continue
        block = name.rpartition(".")[0]
        experts = modules.get(f"{block}.{family.experts}") if family.experts else None
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        if (experts is None and family.experts) or not numbers:
            raise InputError(f"{type(model).__name__}: router {name} has no module {family.experts!r} beside it")
        found[block] = RoutedLayer(int(numbers[0]), name, module, experts, family)
        _refuse_quantised(found[block])
        _refuse_not_finite(found[block])
    _refuse_unknown(model, modules, set(found))
    if not found and not part:
        raise no_router(model)
    return sorted(found.values(), key=lambda routed: routed.layer)


def no_router(model: Any) -> InputError:
    """What to raise for a model without a router of a known family."""
    known = ", ".join(family.models for family in FAMILIES.values())
    return InputError(
        f"{type(model).__name__}: no MoE layer with a known router; known are those of {known}. "
        "docs/capture.md lists them and shows how to describe another"
    )


def _refuse_quantised(routed: RoutedLayer) -> None:
    """A packed router no longer holds the weights that look-ahead applies, and seldom routes as the model did.

    Buffers of one dimension may be whole numbers: counters.
    """
    matrices = [(field, buffer) for field, buffer in routed.router.named_buffers() if buffer.dim() > 1]
    for field, weight in [*routed.router.named_parameters(), *matrices]:
        if not weight.is_floating_point() or weight.element_size() < 2:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"layer {routed.layer}: router {routed.name} is quantised ({field} is {kind}); load it with the router "
                f"left out of quantisation"
            )


def _refuse_not_finite(routed: RoutedLayer) -> None:
    """A NaN or infinity that selection reads sends all tokens to the same experts, or some experts none."""
    for field, tensor in held(routed.router):
        if tensor.is_meta or not tensor.is_floating_point() or bool((fine := tensor.isfinite()).all()):
            continue
        place = (~fine).nonzero()[0].tolist()
        raise InputError(
            f"layer {routed.layer}: router {routed.name}: {field}, entry {place} is {tensor[tuple(place)].item()}; "
            f"expected finite numbers in a router"
        )


def held(module: "nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """The parameters and buffers of a module by name, with their values where accelerate keeps these elsewhere."""
    with present(module):
        yield from module.named_parameters()
        yield from module.named_buffers()


def present(module: "nn.Module") -> ExitStack:
    """A context in which the weights of a module that accelerate has offloaded are where it runs."""
    stack = ExitStack()
    for one in module.modules():
        if hasattr(one, "_hf_hook"):
            from accelerate.utils import align_module_device

            stack.enter_context(align_module_device(one))
    return stack


def check_matrix(routed: RoutedLayer, experts: int, hidden: int) -> None:
    """Raise InputError unless a router's weights have the shape that it routes by: look-ahead needs them whole."""
    field = routed.family.matrix
    if not field:
        return
    matrix = dict(held(routed.router)).get(field)
    if matrix is None or tuple(matrix.shape) != (experts, hidden):
        shape = "not there" if matrix is None else " x ".join(map(str, matrix.shape))
        raise InputError(
            f"layer {routed.layer}: router {routed.name} is packed ({field} is {shape}, expected {experts} x {hidden}, "
            f"experts x hidden size); load it with the router left out of quantisation"
        )


def _refuse_unknown(model: "nn.Module", modules: Mapping[str, "nn.Module"], found: set[str]) -> None:
    """Experts beside a router of no known family would be missing from the trace."""
    for name in modules:
        block, _, last = name.rpartition(".")
        if last != "experts" or block in found:
            continue
        routers = [f"{block}.{beside}" for beside in _ROUTER_NAMES if f"{block}.{beside}" in modules]
        if routers:
            kind = type(modules[routers[0]]).__name__
            raise InputError(
                f"{type(model).__name__}: router {routers[0]} is a {kind}, of no known family (or replaced when the "
                f"model was quantised); docs/capture.md shows how to describe a family"
            )
