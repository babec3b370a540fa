"""What a router family is, and where the routers of a Hugging Face Mixture-of-Experts model are.

A family is one `Family` in ``traces.capture.families.FAMILIES``, keyed by the class name of its router module. Routers are
found by class, never by a configuration field, so a model without a known router is refused instead of silently
recording nothing. `docs/capture.md` shows how to add a family of one's own.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ground.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

PARTS = ("encoder", "decoder")
_ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class Routing:
    """What one router call decided for N tokens: ids (N, K) in router order, weights (N, K), probabilities (N, E).

    An id of -1 is a token that its expert had no room for; its weight is 0.
    """

    ids: "torch.Tensor"
    weights: "torch.Tensor"
    probs: "torch.Tensor"
    tied: "torch.Tensor"  # (N,) bool: the last chosen expert's score equals that of the best one not chosen


def linear(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """Logits (N, E) of a router that is one matrix, with or without bias, in the model's precision."""
    import torch

    return torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))


def softmax(router: Any, logits: "torch.Tensor") -> "torch.Tensor":
    """Probabilities (N, E): the softmax of the logits over all experts, in float32."""
    return logits.float().softmax(dim=-1)


def by_probability(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    """The experts with the largest probabilities are chosen."""
    return probs


def triple(router: Any, hidden: "torch.Tensor", output: Any) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """(logits, weights, ids) of an output in that order or the reverse: ids are the integers."""
    first, weights, last = output
    return (last, weights, first) if not first.is_floating_point() else (first, weights, last)


def second_and_third(inputs: tuple[Any, ...]) -> "tuple[torch.Tensor, torch.Tensor]":
    """(ids, weights) of experts that are called with (hidden, ids, weights)."""
    return inputs[1], inputs[2]


@dataclass(frozen=True)
class Family:
    """One router family. The defaults are those of most: a linear router, softmax over all experts, the K largest.

    ``read(router, hidden, output)`` gives logits (N, E), weights (N, K) and ids (N, K) of a router's output for its
    input ``hidden`` (N, H). ``probs(router, logits)`` are its routing probabilities (N, E) and
    ``choice(router, logits, probs)`` the scores (N, E) whose K largest are chosen. ``logits(router, hidden)`` applies
    the router's weights to other states without calling the module, which would fire its hooks again.

    ``matrix`` names the router's weights of shape (E, H), which is checked; "" if it has none of that shape.

    ``experts`` names the module beside the router that is called with what the router chose, and ``given`` finds
    (ids, weights) in its positional inputs; "" where there is no such module: then nothing is compared.
    ``normalised(router)`` tells whether the weights of a token sum to 1 before ``scale(router)``.
    """

    read: Callable[[Any, "torch.Tensor", Any], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"] = triple
    logits: Callable[[Any, "torch.Tensor"], "torch.Tensor"] = linear
    probs: Callable[[Any, "torch.Tensor"], "torch.Tensor"] = softmax
    choice: Callable[[Any, "torch.Tensor", "torch.Tensor"], "torch.Tensor"] = by_probability
    matrix: str = "weight"
    experts: str = "experts"
    given: Callable[[tuple[Any, ...]], "tuple[torch.Tensor, torch.Tensor]"] = second_and_third
    normalised: Callable[[Any], bool] = lambda router: True
    scale: Callable[[Any], float] = lambda router: float(getattr(router, "routed_scaling_factor", 1.0))
    probabilities: str = "softmax of the router's logits over all experts"

    def routing(self, router: Any, hidden: "torch.Tensor", output: Any) -> Routing:
        """What a router's output for ``hidden`` (N, H) says."""
        logits, weights, ids = self.read(router, hidden, output)
        probs = self.probs(router, logits)
        return Routing(ids, weights, probs, _tied(self.choice(router, logits, probs), ids.shape[-1]))

    def ahead(self, router: Any, hidden: "torch.Tensor", top_k: int) -> "torch.Tensor":
        """Ids (N, K) that the router's weights choose for states (N, H) of another layer."""
        logits = self.logits(router, hidden)
        return self.choice(router, logits, self.probs(router, logits)).topk(top_k, dim=-1).indices

    def facts(self, router: Any) -> dict[str, Any]:
        """What a trace's meta says of its router: stored probabilities, and how weights are scaled."""
        return {
            "class": type(router).__name__,
            "probabilities": self.probabilities,
            "weights_sum_to_1": bool(self.normalised(router)),
            "weights_scaled_by": self.scale(router),
        }


@dataclass(frozen=True)
class RoutedLayer:
    """A routed layer of a model: its layer number, router, experts module (None: nothing to compare) and family."""

    layer: int
    name: str
    router: "nn.Module"
    experts: "nn.Module | None"
    family: Family


def _tied(scores: "torch.Tensor", top_k: int) -> "torch.Tensor":
    """(N,) whether the K-th largest score equals the next one."""
    import torch

    if top_k >= scores.shape[-1]:
        return torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    best = scores.topk(top_k + 1, dim=-1).values
    return best[:, -1] == best[:, -2]


def parts(model: Any) -> tuple[str, ...]:
    """``encoder`` and ``decoder`` of a model that has both, else one part without a name."""
    return PARTS if getattr(model.config, "is_encoder_decoder", False) else ("",)


def routed_layers(
    model: "nn.Module", part: str = "", families: Mapping[str, Family] | None = None
) -> list[RoutedLayer]:
    """The routed layers of ``model``, or of its encoder or decoder, in layer order.

    Raises InputError if there is none (a dense model), if a router is of a family that ``families`` (default: FAMILIES)
    does not know, if it has no experts module beside it, or if its weights are quantised.
    """
    from traces.capture.families import FAMILIES  # its entries are made of what this module defines

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
        _refuse_quantised(int(numbers[0]), name, module)
        found[block] = RoutedLayer(int(numbers[0]), name, module, experts, family)
    _refuse_unknown(model, modules, set(found))
    if not found and not part:
        raise no_router(model)
    return sorted(found.values(), key=lambda routed: routed.layer)


def no_router(model: Any) -> InputError:
    """What to raise for a model without a router of a known family."""
    from traces.capture.families import NAMES

    return InputError(
        f"{type(model).__name__}: no MoE layer with a known router; known are those of {', '.join(NAMES)}. "
        "docs/capture.md lists them and shows how to describe another"
    )


def _refuse_quantised(layer: int, name: str, router: "nn.Module") -> None:
    """A packed router no longer holds the weights that look-ahead applies, and seldom routes as the model did.

    Buffers of one dimension may be whole numbers: counters.
    """
    matrices = [(field, buffer) for field, buffer in router.named_buffers() if buffer.dim() > 1]
    for field, weight in [*router.named_parameters(), *matrices]:
        if not weight.is_floating_point() or weight.element_size() < 2:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"layer {layer}: router {name} is quantised ({field} is {kind}); load it with the router left out of "
                f"quantisation"
            )


def check_matrix(routed: RoutedLayer, experts: int, hidden: int) -> None:
    """Raise InputError unless a router's weights have the shape that it routes by: look-ahead needs them whole."""
    field = routed.family.matrix
    if not field:
        return
    held = {**dict(routed.router.named_parameters()), **dict(routed.router.named_buffers())}.get(field)
    if held is None or tuple(held.shape) != (experts, hidden):
        shape = "not there" if held is None else " x ".join(map(str, held.shape))
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
