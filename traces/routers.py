"""Router adapters: how to read the routes of each family of Hugging Face Mixture-of-Experts models.

A family is one entry of ``FAMILIES``, keyed by the class name of its router module. Routers are found by class, never
by a configuration field, so a model without a known router is refused instead of silently recording nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traces.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Routing:
    """What one router call decided for N tokens: ids (N, K) in router order, weights (N, K), probabilities (N, E)."""

    ids: "torch.Tensor"
    weights: "torch.Tensor"
    probs: "torch.Tensor"
    tied: "torch.Tensor"  # (N,) bool: the last chosen expert's score equals that of the best one not chosen


@dataclass(frozen=True)
class Family:
    """One router family.

    ``read`` turns the router's output into a Routing; ``apply`` gives the ids (N, K) that a router's weights choose
    for hidden states (N, H) of another layer, without calling the module (a call would fire its hooks again).
    ``experts`` is the attribute, beside the router, of the module that receives (hidden, ids, weights).
    """

    read: Callable[["nn.Module", Any], Routing]
    apply: Callable[["nn.Module", "torch.Tensor"], "torch.Tensor"]
    experts: str = "experts"


@dataclass(frozen=True)
class RoutedLayer:
    """A routed layer of a model: its layer number, router, experts module and family."""

    layer: int
    name: str
    router: "nn.Module"
    experts: "nn.Module"
    family: Family


def _read_softmax_of_all(router: "nn.Module", output: Any) -> Routing:
    """(logits (N, E), weights (N, K), ids (N, K)); probabilities are the softmax of the logits over all experts."""
    import torch

    logits, weights, ids = output
    top = torch.topk(logits.float(), min(ids.shape[-1] + 1, logits.shape[-1]), dim=-1).values
    tied = (top[:, -1] == top[:, -2]) if top.shape[-1] > ids.shape[-1] else torch.zeros(len(ids), dtype=torch.bool)
    return Routing(ids, weights, torch.softmax(logits.float(), dim=-1), tied)


def _apply_linear(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """Top K of a linear router without bias."""
    import torch

    return torch.topk(torch.nn.functional.linear(hidden, router.weight).float(), router.top_k, dim=-1).indices


FAMILIES: dict[str, Family] = {
    "MixtralTopKRouter": Family(read=_read_softmax_of_all, apply=_apply_linear),
}


def routed_layers(model: "nn.Module") -> list[RoutedLayer]:
    """The routed layers of ``model`` in layer order.

    Raises InputError if there is none (a dense model, or a family that FAMILIES does not know) or if a router has no
    experts module beside it.
    """
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        family = FAMILIES.get(type(module).__name__)
        if family is None:
            continue
        block = name.rpartition(".")[0]
        experts = modules.get(f"{block}.{family.experts}")
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        if experts is None or not numbers:
            raise InputError(f"{type(model).__name__}: router {name} has no module {family.experts!r} beside it")
        found.append(RoutedLayer(int(numbers[0]), name, module, experts, family))
    if not found:
        raise InputError(f"{type(model).__name__}: no MoE layer with a known router ({', '.join(FAMILIES)})")
    return sorted(found, key=lambda routed: routed.layer)
