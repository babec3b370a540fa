"""Record what the routers of a running model decide, checked against what its experts were given."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.capture.family import Family
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


_OTHER = ("the experts that ran are not those of its router", "the experts' weights are not those of its router")


@dataclass(frozen=True)
class HeldRows:
    """Rows of one or more passes, padding removed: n rows, L routed layers, K slots, E experts, H hidden.

    All lie on the model's device. ``states[:, 0]`` is the embedding layer's output and ``states[:, 1 + l]`` routed
    layer l's router input, in the model's dtype (one level alone where ``take`` was asked for one);
    ``lookahead[:, l]`` is what layer l+1's router weights choose for layer l's input. ``keep`` (n,) counts the rows
    among all of the passes, padding included.
    """

    experts: "torch.Tensor"  # (n, L, K) int16
    gates: "torch.Tensor"  # (n, L, K) float16
    probs: "torch.Tensor"  # (n, L, E) uint8, probability x 255 rounded
    lookahead: "torch.Tensor"  # (n, L, K) int16
    states: "torch.Tensor"  # (n, L+1, H), or (n, H) of one level
    keep: "torch.Tensor"
    odd: Counter[str]  # by the keys of ODD_ROUTES


@dataclass(frozen=True)
class _Held:
    """One pass as it was given, all N tokens: copies, since what a model gave may be overwritten by its next pass."""

    valid: "torch.Tensor"  # (batch, length) bool
    position: "torch.Tensor"
    embedded: "torch.Tensor"  # (N, H)
    inputs: "torch.Tensor"  # (N, L, H)
    logits: "torch.Tensor"  # (N, L, E)
    weights: "torch.Tensor"  # (N, L, K)
    ids: "torch.Tensor"  # (N, L, K)
    wrong: "torch.Tensor"  # (2, L) bool: the experts ran with other ids, with other weights


class Recorder(Listener):
    """Record every router call of ``model`` while the context is open: ``hold`` after each forward pass, then ``take``.

    While the model runs, a layer costs no more than a reference to what it gave. ``hold`` copies these in a few calls,
    whatever the number of layers, and waits for nothing; ``take`` does all the rest for many passes at once.

    ``part`` is "encoder" or "decoder" of a model that has both. The model is put in eval mode (no jitter, no dropout).
    Raises InputError if it has no router that ``families`` (default: FAMILIES) knows.
    """

    def __init__(self, model: "nn.Module", part: str = "", families: Mapping[str, Family] | None = None) -> None:
        self.model = model.eval()
        self.part = part
        self.layers: list[RoutedLayer] = routed_layers(model, part, families)
        self._handles: list[Any] = []
        self._held: list[_Held] = []
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
        self._routed[index].append((hidden, *layer.family.read(layer.router, hidden, output)))

    def called(self, index: int, ids: "torch.Tensor", weights: "torch.Tensor") -> None:
        """Keep what the experts were given."""
        self._used[index].append((ids, weights))

    def hold(self, valid: "torch.Tensor", position: "torch.Tensor") -> None:
        """Keep the forward pass since the last call, of which the rows count where ``valid`` (batch x length) is True.

        ``position`` (batch x length, or one row for all) is each token's place in its sequence. Raises InputError
        naming the layer unless each router recorded exactly one row for each token of the pass, and its experts ran
        for as many.
        """
        import torch

        self._check_rows(valid.numel())
        place = valid.device
        inputs, logits, weights, ids = (_side_by_side(self._routed, part, place) for part in range(4))
        # Where no module of experts is known, there is nothing to compare with: a router equals itself.
        used = [used or [call[:1:-1] for call in calls] for used, calls in zip(self._used, self._routed, strict=True)]
        wrong = self._other(ids, weights, *(_side_by_side(used, part, place) for part in range(2)))
        embedded = torch.cat(self._embedding).to(place)
        self._held.append(_Held(valid, position, embedded, inputs, logits, weights, ids, wrong))
        self._clear()

    def discard(self) -> None:
        """Forget what is held: a batch before ended in an error."""
        self._held.clear()
        self._clear()

    @property
    def rows_held(self) -> int:
        """How many rows wait to be taken, padding included."""
        return sum(one.valid.numel() for one in self._held)

    def take(self, level: int | None = None) -> HeldRows:
        """The rows that count of all passes held since the last call.

        ``level`` keeps the states of that level alone. Raises InputError naming the layer unless all that its router
        gave is finite, and its experts were given the same ids and weights.
        """
        import torch

        held, self._held = self._held, []
        keep = torch.cat([one.valid.reshape(-1) for one in held]).nonzero().squeeze(1)
        embedded, inputs, logits, weights, ids = (
            _kept([getattr(one, name) for one in held], keep)
            for name in ("embedded", "inputs", "logits", "weights", "ids")
        )
        for routed in self.layers:
            check_matrix(routed, logits.shape[-1], inputs.shape[-1])
        judged = [
            routed.family.judged(routed.router, logits[:, index], ids.shape[-1])
            for index, routed in enumerate(self.layers)
        ]
        probs, tied = (torch.stack([one[part].to(keep.device) for one in judged], dim=1) for part in (0, 1))
        gates, shares = weights.to(torch.float16), in_8_bits(probs)
        # Before the comparison with the experts: what is not a number equals nothing, not even itself.
        fits = gates.isfinite().all(dim=-1) & probs.isfinite().all(dim=-1)
        odd = {
            "tied": tied,
            "weights": (gates == 0) & (weights != 0),
            "probs": (shares == 0).all(dim=-1) & (probs != 0).any(dim=-1),
        }
        wrong = torch.stack([one.wrong for one in held])
        bad, *counts = torch.stack([(~fits).sum() + wrong.sum(), *(found.sum() for found in odd.values())]).tolist()
        if bad:
            self._refuse(held, fits)
        ahead = torch.full_like(ids, -1, dtype=torch.int16)
        for index, following in enumerate(self.layers[1:]):
            ahead[:, index] = look_ahead(following, inputs[:, index], ids.shape[-1]).to(ids.device)
        if level is None:
            states = torch.cat((embedded.unsqueeze(1), inputs), dim=1)
        else:
            states = inputs[:, level - 1].clone() if level else embedded
        found = Counter(dict(zip(odd, counts, strict=True)))
        return HeldRows(ids.to(torch.int16), gates, shares, ahead, states, keep, found)

    def _check_rows(self, rows: int) -> None:
        """One row a token at every layer, of its router and of its experts."""
        embedded = sum(len(state) for state in self._embedding)
        if embedded != rows:
            raise InputError(f"the embedding layer recorded {embedded} rows of {rows}")
        for routed, calls, used in zip(self.layers, self._routed, self._used, strict=True):
            recorded = sum(len(call[-1]) for call in calls)
            if recorded != rows:
                raise InputError(
                    f"layer {routed.layer} captured {recorded} rows of {rows} ({routed.name}: the router is bypassed, "
                    "perhaps by a fused kernel; load the model without kernels)"
                )
            if routed.experts is None:
                continue
            if sum(len(ids) for ids, _ in used) != rows:
                raise InputError(
                    f"layer {routed.layer}: its experts were called for another number of rows than {rows}"
                )
            if used[0][0].shape[1:] != calls[0][-1].shape[1:]:
                raise InputError(f"layer {routed.layer}: {_OTHER[0]}")

    @staticmethod
    def _other(
        ids: "torch.Tensor", weights: "torch.Tensor", used: "torch.Tensor", shares: "torch.Tensor"
    ) -> "torch.Tensor":
        """(2, L) whether ids, and weights, of routers and experts differ.

        Rows that do not count may hold anything in both.
        """
        import torch

        same = (weights == shares) | (weights.isnan() & shares.isnan())
        return torch.stack(((ids != used).any(dim=2).any(dim=0), (~same).any(dim=2).any(dim=0)))

    def _refuse(self, held: list[_Held], fits: "torch.Tensor") -> None:
        """Raise InputError for the first pass and layer that a trace cannot hold: ``fits`` (n, L) tells of all rows."""
        counted = [one.valid.cpu().nonzero() for one in held]
        for one, places, fine in zip(held, counted, fits.cpu().split([len(one) for one in counted]), strict=True):
            for index, routed in enumerate(self.layers):
                if not bool(fine[:, index].all()):
                    sequence, place = places[~fine[:, index]][0].tolist()
                    token = int(one.position.expand_as(one.valid)[sequence, place])
                    raise InputError(
                        f"layer {routed.layer}: router {routed.name} gave a value that is not finite in 16 bits, for "
                        f"token {token} of sequence {sequence} of its batch (counted from 0)"
                    )
            for routed, kinds in zip(self.layers, one.wrong.T.tolist(), strict=True):
                if any(kinds):
                    raise InputError(f"layer {routed.layer}: {_OTHER[kinds.index(True)]}")

    def _clear(self) -> None:
        self._embedding: list[torch.Tensor] = []
        # (input, logits, weights, ids) of each call of a router, and (ids, weights) of its experts.
        self._routed: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.layers]
        self._used: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self.layers]


def recorders(model: Any, families: Mapping[str, Family] | None = None) -> dict[str, Recorder]:
    """A recorder for each part of ``model`` that has routed layers: one named "", or encoder and decoder.

    Raises InputError if there is none.
    """
    found = {part: Recorder(model, part, families) for part in parts(model)}
    kept = {part: recorder for part, recorder in found.items() if recorder.layers}
    if not kept:
        raise no_router(model)
    return kept


def _whole(parts: list["torch.Tensor"], place: Any) -> "torch.Tensor":
    """Rows of one layer's calls below each other, on the device ``place``; of one call without a copy."""
    import torch

    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(place)


def _side_by_side(calls: "Sequence[list[tuple[torch.Tensor, ...]]]", part: int, place: Any) -> "torch.Tensor":
    """(N, layers, any): one part of what each layer's calls gave, copied."""
    import torch

    return torch.stack([_whole([call[part] for call in one], place) for one in calls], dim=1)


def _kept(parts: list["torch.Tensor"], keep: "torch.Tensor") -> "torch.Tensor":
    """The rows ``keep`` of several passes."""
    return _whole(parts, keep.device).index_select(0, keep)
