"""Hooks on a running model's embedding layer, routers and experts: one set for all who follow what it routes."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.foreign_code import errors_name
from traces.capture.routers import RoutedLayer, present

if TYPE_CHECKING:
    import torch
    from torch import nn


class Listener:
    """Is told of each forward pass while it runs; n rows are the tokens of the pass, padding included.

    ``index`` counts routed layers from 0. What a listener does not care for it leaves as it is here.
    """

    def embedded(self, states: "torch.Tensor") -> None:
        """A pass begins: the embedding layer gave ``states`` (n, H)."""

    def routed(self, index: int, hidden: "torch.Tensor", output: Any) -> None:
        """A router gave ``output``, see ``Family.routing``, for its input ``hidden`` (n, H)."""

    def called(self, index: int, ids: "torch.Tensor", weights: "torch.Tensor") -> None:
        """The experts of a layer are about to run, with these ids and weights (n, K)."""


def listen(model: Any, part: str, layers: Sequence[RoutedLayer], listener: Listener) -> list[Any]:
    """Tell ``listener`` of every pass of ``model``, or of its stack ``part``; the handles, to be removed in the end.

    The model is put in evaluation mode: no jitter of routers, no dropout.
    """

    def embedding(module: "nn.Module", inputs: Any, output: "torch.Tensor") -> None:
        listener.embedded(_rows(output))

    def router(index: int, module: "nn.Module", inputs: Any, output: Any) -> None:
        listener.routed(index, _rows(inputs[0]), output)

    def experts(index: int, module: "nn.Module", inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids, weights = layers[index].family.given((*inputs, *named.values()))
        listener.called(index, ids.detach(), weights.detach())

    model.eval()
    # The two stacks of an encoder-decoder model have embedding modules of their own, with shared weights.
    stack = getattr(model, part) if part else model
    handles = [stack.get_input_embeddings().register_forward_hook(embedding)]
    for index, routed in enumerate(layers):
        handles.append(routed.router.register_forward_hook(partial(router, index)))
        if routed.experts is not None:
            handles.append(routed.experts.register_forward_pre_hook(partial(experts, index), with_kwargs=True))
    return handles


def _rows(states: "torch.Tensor") -> "torch.Tensor":
    return states.detach().reshape(-1, states.shape[-1])


def look_ahead(routed: RoutedLayer, states: "torch.Tensor", top_k: int) -> "torch.Tensor":
    """Ids (n, K) that a router's weights choose for states (n, H) of the layer before, where its weights lie."""
    router = routed.router
    where = f"layer {routed.layer}: router {routed.name}"
    remedy = "a smaller --batch or --chunk may help"
    with errors_name(where, "its weights cannot be applied for look-ahead", remedy), present(router):
        weights = next(chain(router.parameters(), router.buffers()), states)
        return routed.family.ahead(router, states.to(weights.device), top_k)


def in_8_bits(probs: "torch.Tensor") -> "torch.Tensor":
    """Probabilities as a trace holds them: uint8, 255 times the value, rounded."""
    import torch

    return (probs * 255).round().to(torch.uint8)


def on_host(tensor: "torch.Tensor") -> np.ndarray:
    """A tensor's numbers on the host."""
    return np.asarray(tensor.detach().cpu().numpy())
