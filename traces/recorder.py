"""Hooks that record what the routers of a running model decide, checked against what its experts were given."""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from traces.errors import InputError
from traces.routers import RoutedLayer, Routing, routed_layers

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Recorded:
    """Rows of one forward pass, padding removed, on the host: n rows, L routed layers, K slots, E experts, H hidden.

    ``states[:, 0]`` is the embedding layer's output and ``states[:, 1 + l]`` routed layer l's router input, on the
    model's device and in its dtype; ``lookahead[:, l]`` is what layer l+1's router weights choose for layer l's input.
    """

    experts: "torch.Tensor"  # (n, L, K) int16
    gates: "torch.Tensor"  # (n, L, K) float16
    probs: "torch.Tensor"  # (n, L, E) uint8, probability x 255 rounded
    lookahead: "torch.Tensor"  # (n, L, K) int16
    states: "torch.Tensor"  # (n, L+1, H)
    ties: int  # (row, layer) pairs whose choice hung on two equal scores


class Recorder:
    """Record every router call of ``model`` while the context is open; ``take`` after each forward pass.

    The model is put in eval mode (no jitter, no dropout). Raises InputError if it has no known router.
    """

    def __init__(self, model: "nn.Module") -> None:
        self.model = model.eval()
        self.layers: list[RoutedLayer] = routed_layers(model)
        self._handles: list[Any] = []
        self._clear()

    def __enter__(self) -> "Recorder":
        model: Any = self.model
        self._handles.append(model.get_input_embeddings().register_forward_hook(self._keep_embedding))
        for index, routed in enumerate(self.layers):
            self._handles.append(routed.router.register_forward_hook(self._router_hook(index)))
            self._handles.append(routed.experts.register_forward_pre_hook(self._experts_hook(index)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self, valid: "torch.Tensor") -> Recorded:
        """The rows of the forward pass since the last call for which ``valid`` (batch x length, bool) is True.

        Raises InputError naming the layer unless each router recorded exactly one row for each token of the pass, with
        the ids that its experts module was given.
        """
        import torch

        rows = valid.numel()
        self._check(rows)
        keep = valid.reshape(-1).nonzero().squeeze(1)
        hidden = [torch.cat(self._embedding), *(torch.cat(inputs) for inputs in self._inputs)]
        hidden = [state.index_select(0, keep) for state in hidden]
        routings = [_joined(calls, keep) for calls in self._routings]
        ids = torch.stack([routing.ids for routing in routings], dim=1)
        ahead = torch.full_like(ids, -1)
        for index, following in enumerate(self.layers[1:]):
            ahead[:, index] = following.family.apply(following.router, hidden[1 + index])
        self._clear()
        return Recorded(
            experts=ids.to(torch.int16).cpu(),
            gates=torch.stack([routing.weights for routing in routings], dim=1).to(torch.float16).cpu(),
            probs=(torch.stack([r.probs for r in routings], dim=1) * 255).round().to(torch.uint8).cpu(),
            lookahead=ahead.to(torch.int16).cpu(),
            states=torch.stack(hidden, dim=1),
            ties=int(torch.stack([routing.tied for routing in routings]).sum()),
        )

    def _check(self, rows: int) -> None:
        """One row a token at every layer, and the same ids at router and experts."""
        embedded = sum(len(state) for state in self._embedding)
        if embedded != rows:
            raise InputError(f"the embedding layer recorded {embedded} rows of {rows}")
        for routed, routings, used in zip(self.layers, self._routings, self._used, strict=True):
            recorded = sum(len(routing.ids) for routing in routings)
            if recorded != rows:
                raise InputError(
                    f"layer {routed.layer} captured {recorded} rows of {rows} ({routed.name}: the router is bypassed)"
                )
            if sum(len(ids) for ids in used) != rows:
                raise InputError(
                    f"layer {routed.layer}: its experts were called for another number of rows than {rows}"
                )
            for routing, ids in zip(routings, used, strict=True):
                if not bool((routing.ids == ids).all()):
                    raise InputError(f"layer {routed.layer}: the experts that ran are not those of its router")

    def _clear(self) -> None:
        self._embedding: list[torch.Tensor] = []
        self._inputs: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self._routings: list[list[Routing]] = [[] for _ in self.layers]
        self._used: list[list[torch.Tensor]] = [[] for _ in self.layers]

    def _keep_embedding(self, module: "nn.Module", inputs: Any, output: "torch.Tensor") -> None:
        self._embedding.append(output.detach().reshape(-1, output.shape[-1]))

    def _router_hook(self, index: int) -> Any:
        family = self.layers[index].family

        def keep(module: "nn.Module", inputs: Any, output: Any) -> None:
            self._inputs[index].append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]))
            self._routings[index].append(family.read(module, output))

        return keep

    def _experts_hook(self, index: int) -> Any:
        def keep(module: "nn.Module", inputs: Any) -> None:
            self._used[index].append(inputs[1].detach())

        return keep


def _joined(calls: list[Routing], keep: "torch.Tensor") -> Routing:
    """The kept rows of the calls of one router."""
    import torch

    def rows(name: str) -> "torch.Tensor":
        return torch.cat([getattr(call, name).detach() for call in calls]).to(keep.device).index_select(0, keep)

    return Routing(rows("ids"), rows("weights"), rows("probs"), rows("tied"))
