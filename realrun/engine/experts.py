"""Routed experts computed from their slots.

A layer call is a list of pairs, a row and an expert that it takes; pairs of one expert stand together, experts in
rising order. Each pair's output goes to a row of its own, and they are added up afterwards in a fixed order, so a run
gives the same bits whatever was resident and whatever came late.

On a GPU the experts that serve one row each go through one Triton kernel a stage, however many they are and wherever
their slots lie; elsewhere, and for more rows, each expert is two matrix products.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ground.errors import InputError
from realrun.device.slots import DeviceCache
from realrun.device.torch_device import the_torch
from realrun.engine.portions import AT_ONCE
from traces.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

MOST_PAIRS = 2**16
"""Of a call whose single rows go through the kernels, which are given pairs and rows as 16-bit numbers."""


class Rows(NamedTuple):
    """The row of each pair of a call (P,), as numbers and, where rows are many, on the device as well."""

    listed: list[int]
    there: "torch.Tensor | None" = None


class Experts:
    """The experts of one model in the slots of one cache.

    An expert's bytes are its matrices in bf16, gate and up (2F, H) or up alone (F, H), then down (H, F).

    Raises InputError if the model stores its experts in another precision.
    """

    def __init__(self, model: ModelSpec, cache: DeviceCache, batched: bool | None = None) -> None:
        torch = the_torch()
        hidden, inner = model.hidden, model.expert_ffn
        self.gated = model.expert_matrices == 3
        self.hidden, self.inner = hidden, inner
        self._weights = cache.bytes.view(torch.bfloat16)
        views = [matrices(weights, hidden, inner, self.gated) for weights in self._weights.unbind(0)]
        self._into, self._out = [into for into, _ in views], [out for _, out in views]
        self._batched: Any = None
        if _kernels(cache) if batched is None else batched:
            from realrun.engine.expert_kernels import Batched

            self._batched = Batched(self._weights, hidden, inner, self.gated)

    def launch(
        self,
        states: "torch.Tensor",
        outputs: "torch.Tensor",
        slots: Sequence[int],
        pairs: Sequence[tuple[int, int]],
        take: Rows,
    ) -> None:
        """Compute the experts in ``slots``, each for its range of ``pairs`` of rows ``take``.

        ``states`` are (rows, H), ``outputs`` (P + 1, H).
        """
        if self._batched is not None and len(outputs) <= MOST_PAIRS:
            rows = take.listed
            single = [
                (slot, first, rows[first]) for slot, (first, end) in zip(slots, pairs, strict=True) if end - first == 1
            ]
            for begin in range(0, len(single), AT_ONCE):
                self._batched.launch(states, outputs, single[begin : begin + AT_ONCE])
            if len(single) == len(slots):
                return
            several = [i for i, (first, end) in enumerate(pairs) if end - first > 1]
            slots, pairs = [slots[i] for i in several], [pairs[i] for i in several]
        for slot, (first, end) in zip(slots, pairs, strict=True):
            self._one(states, outputs, slot, first, end, take)

    def _one(
        self, states: "torch.Tensor", outputs: "torch.Tensor", slot: int, first: int, end: int, take: Rows
    ) -> None:
        if states.shape[0] == 1:
            rows = states
        elif take.there is not None:
            rows = states.index_select(0, take.there[first:end])
        else:
            row = take.listed[first]
            rows = states[take.listed[first:end]] if end - first > 1 else states[row : row + 1]
        run_ffn(rows, self._into[slot], self._out[slot], self.gated, outputs[first:end])


def run_ffn(
    rows: "torch.Tensor", into: "torch.Tensor", out: "torch.Tensor", gated: bool, target: "torch.Tensor"
) -> None:
    """One expert over ``rows`` (n, H): ``target`` (n, H) = out (silu(gate rows) * up rows), or out relu(up rows)."""
    torch = the_torch()
    inner = torch.mm(rows, into.t())
    if gated:
        gate, up = inner.chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
    else:
        inner = torch.relu(inner)
    torch.mm(inner, out.t(), out=target)


def matrices(weights: "torch.Tensor", hidden: int, inner: int, gated: bool) -> "tuple[torch.Tensor, torch.Tensor]":
    """The two stages of an expert whose bf16 numbers lie one after another: (2F or F, H) and (H, F)."""
    first = hidden * inner * (2 if gated else 1)
    return weights[:first].view(-1, hidden), weights[first : first + hidden * inner].view(hidden, inner)


def expert_size(model: ModelSpec) -> int:
    """Bytes of one expert of ``model`` in bf16. Raises InputError unless that is what its layers say, all alike."""
    size = 2 * model.expert_parameters
    if set(model.expert_bytes) != {size}:
        raise InputError(
            f"model {model.name}: experts of {', '.join(f'{b:,}' for b in sorted(set(model.expert_bytes)))} bytes; "
            f"real runs compute in bf16, in which one has {size:,}"
        )
    return size


def _kernels(cache: DeviceCache) -> bool:
    """Whether the Triton kernels can be used."""
    if not cache.bytes.is_cuda:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
