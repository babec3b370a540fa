"""Record what the routers of a running model decide, checked against what its experts were given."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.capture.family import Family, Routing
from traces.capture.listening import Listener, in_8_bits, listen, look_ahead
from traces.capture.routers import RoutedLayer, check_matrix, no_router, parts, routed_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

ODD_ROUTES = {
    "tied": "{} routes hung on two equal scores; the ids are those that the model used",
    "weights": "{} weights above 0 are too small for 16 bits and stored as 0",
    "probs": "{} routes have no probability that 8 bits can hold; all of theirs are stored as 0",
}
"""What a trace notes of (row, layer) pairs that it cannot show as they were, by what is counted of them."""


@dataclass(frozen=True)
class PassRows:
    """Rows of one forward pass, padding removed, on the host: n rows, L routed layers, K slots, E experts, H hidden.

    ``states[:, 0]`` is the embedding layer's output and ``states[:, 1 + l]`` routed layer l's router input, on the
    model's device and in its dtype (one level alone where ``take`` was asked for one); ``lookahead[:, l]`` is what
    layer l+1's router weights choose for layer l's input.
    """

    experts: "torch.Tensor"  # (n, L, K) int16
    gates: "torch.Tensor"  # (n, L, K) float16
    probs: "torch.Tensor"  # (n, L, E) uint8, probability x 255 rounded
    lookahead: "torch.Tensor"  # (n, L, K) int16
    states: "torch.Tensor"  # (n, L+1, H), or (n, H) of one level
    odd: Counter[str]  # by the keys of ODD_ROUTES


class Recorder(Listener):
    """Record every router call of ``model`` while the context is open; ``take`` after each forward pass.

    ``part`` is "encoder" or "decoder" of a model that has both. The model is put in eval mode (no jitter, no dropout).
    Raises InputError if it has no router that ``families`` (default: FAMILIES) knows.
    """

    def __init__(self, model: "nn.Module", part: str = "", families: Mapping[str, Family] | None = None) -> None:
        self.model = model.eval()
        self.part = part
        self.layers: list[RoutedLayer] = routed_layers(model, part, families)
        self._handles: list[Any] = []
        self._clear()

    def __enter__(self) -> "Recorder":
        self._handles = listen(self.model, self.part, self.layers, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def embedded(self, states: "torch.Tensor") -> None:
        """Keep the embedding layer's output."""
        self._embedding.append(states)

    def routed(self, index: int, hidden: "torch.Tensor", output: Any) -> None:
        """Keep a router's input and what it says."""
        layer = self.layers[index]
        routing = layer.family.routing(layer.router, hidden, output)
        if not self._inputs[index]:
            check_matrix(layer, routing.probs.shape[-1], hidden.shape[-1])
        self._inputs[index].append(hidden)
        self._routings[index].append(routing)

    def called(self, index: int, ids: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Keep what the experts were given."""
        self._used[index].append((ids, weights))

    def take(self, valid: "torch.Tensor", position: "torch.Tensor", level: int | None = None) -> PassRows:
        """The rows of the forward pass since the last call for which ``valid`` (batch x length, bool) is True.

        ``position`` (batch x length, or one row for all) is each token's place in its sequence. ``level`` keeps the
        states of that level alone. Raises InputError naming the layer unless each router recorded exactly one row for
        each token of the pass, finite, with the ids and weights that its experts module was given.
        """
        import torch

        rows = valid.numel()
        self._check_rows(rows)
        keep = valid.reshape(-1).nonzero().squeeze(1)
        hidden = [torch.cat(state) for state in (self._embedding, *self._inputs)]
        hidden = [state.to(keep.device).index_select(0, keep) for state in hidden]
        routings = [_joined(calls, keep) for calls in self._routings]
        # Before the comparison with the experts: what is not a number equals nothing, not even itself.
        self._check_finite(routings, valid, position)
        self._check_experts(rows)
        self._clear()
        ids, weights, probs = (
            torch.stack([getattr(routing, name) for routing in routings], dim=1) for name in ("ids", "weights", "probs")
        )
        ahead = torch.full_like(ids, -1)
        for index, following in enumerate(self.layers[1:]):
            ahead[:, index] = look_ahead(following, hidden[1 + index], ids.shape[-1]).to(ids.device)
        gates, shares = weights.to(torch.float16), in_8_bits(probs)
        odd = {
            "tied": torch.stack([routing.tied for routing in routings]),
            "weights": (gates == 0) & (weights != 0),
            "probs": (shares == 0).all(dim=-1) & (probs != 0).any(dim=-1),
        }
        return PassRows(
            experts=ids.to(torch.int16).cpu(),
            gates=gates.cpu(),
            probs=shares.cpu(),
            lookahead=ahead.to(torch.int16).cpu(),
            states=torch.stack(hidden, dim=1) if level is None else hidden[level],
            odd=Counter({name: int(found.sum()) for name, found in odd.items()}),
        )

    def _check_rows(self, rows: int) -> None:
        """One row a token at every layer."""
        embedded = sum(len(state) for state in self._embedding)
        if embedded != rows:
            raise InputError(f"the embedding layer recorded {embedded} rows of {rows}")
        for routed, routings in zip(self.layers, self._routings, strict=True):
            recorded = sum(len(routing.ids) for routing in routings)
            if recorded != rows:
                raise InputError(
                    f"layer {routed.layer} captured {recorded} rows of {rows} ({routed.name}: the router is bypassed, "
                    "perhaps by a fused kernel; load the model without kernels)"
                )

    def _check_experts(self, rows: int) -> None:
        """The same ids and weights at router and experts; rows that do not count may hold anything in both."""
        for routed, routings, used in zip(self.layers, self._routings, self._used, strict=True):
            if routed.experts is None:
                continue
            if sum(len(ids) for ids, _ in used) != rows:
                raise InputError(
                    f"layer {routed.layer}: its experts were called for another number of rows than {rows}"
                )
            for routing, (ids, weights) in zip(routings, used, strict=True):
                if not bool((routing.ids == ids).all()):
                    raise InputError(f"layer {routed.layer}: the experts that ran are not those of its router")
                if not bool(((routing.weights == weights) | (routing.weights.isnan() & weights.isnan())).all()):
                    raise InputError(f"layer {routed.layer}: the experts' weights are not those of its router")

    def _check_finite(self, routings: list[Routing], valid: "torch.Tensor", position: "torch.Tensor") -> None:
        """No router may give what a trace cannot hold: NaN, or a weight beyond 16 bits."""
        import torch

        for routed, routing in zip(self.layers, routings, strict=True):
            fits = (routing.weights.to(torch.float16).isfinite().all(-1) & routing.probs.isfinite().all(-1)).cpu()
            if not bool(fits.all()):
                sequence, place = valid.cpu().nonzero()[~fits][0].tolist()
                token = int(position.expand_as(valid)[sequence, place])
                raise InputError(
                    f"layer {routed.layer}: router {routed.name} gave a value that is not finite in 16 bits, for token "
                    f"{token} of sequence {sequence} of its batch (counted from 0)"
                )

    def _clear(self) -> None:
        self._embedding: list[torch.Tensor] = []
        self._inputs: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self._routings: list[list[Routing]] = [[] for _ in self.layers]
        self._used: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]


def recorders(model: Any, families: Mapping[str, Family] | None = None) -> dict[str, Recorder]:
    """A recorder for each part of ``model`` that has routed layers: one named "", or encoder and decoder.

    Raises InputError if there is none.
    """
    found = {part: Recorder(model, part, families) for part in parts(model)}
    kept = {part: recorder for part, recorder in found.items() if recorder.layers}
    if not kept:
        raise no_router(model)
    return kept


def _joined(calls: list[Routing], keep: "torch.Tensor") -> Routing:
    """The kept rows of the calls of one router."""
    import torch

    def rows(name: str) -> "torch.Tensor":
        return torch.cat([getattr(call, name).detach() for call in calls]).to(keep.device).index_select(0, keep)

    return Routing(rows("ids"), rows("weights"), rows("probs"), rows("tied"))
