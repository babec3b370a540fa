"""Routed experts computed from their slots.

A layer call is a list of pairs, a row and an expert that it takes; pairs of one expert stand together, experts in
rising order. Each pair's output goes to a row of its own, and they are added up afterwards in a fixed order, so a run
gives the same bits whatever was resident and whatever came late.

On a GPU the experts that serve a few rows each go through one Triton kernel a stage, however many they are and wherever
their slots lie; elsewhere, and for more rows, each expert is two matrix products.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ground.errors import InputError
from realrun.device.slots import DeviceCache
from realrun.device.torch_device import the_torch
from realrun.device.triton_launch import triton_runs_on
from realrun.engine.layers import feed_forward
from realrun.engine.portions import few_rows, portions
from traces.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

MOST_PAIRS = 2**16
"""Of a call whose single rows go through the kernels, which are given pairs and rows as 16-bit numbers."""


class Rows(NamedTuple):
    """The row of each pair of a call (P,), as numbers and, where there are several rows, on the device as well."""

    listed: list[int]
    there: "torch.Tensor | None" = None


class Experts:
    """The experts of one model in the slots of one cache.

    An expert's bytes are its matrices in bf16, gate and up (2F, H) or up alone (F, H), then down (H, F).

    Raises InputError if the model stores its experts in another precision.
    """

    def __init__(self, model: ModelSpec, cache: DeviceCache, batched: bool | None = None) -> None:
        torch = the_torch()
        shape = (model.hidden, model.expert_ffn, model.expert_matrices == 3)
        slots = cache.bytes.view(torch.bfloat16)
        self._matrices = [matrices(weights, *shape) for weights in slots.unbind(0)]
        self._batched: Any = None
        self.few = 1
        """Rows up to which an expert goes through the kernels, where there are any."""
        if triton_runs_on(slots.device) if batched is None else batched:
            from realrun.engine.expert_kernels import Batched

            self._batched = Batched(slots, *shape)
            self.few = few_rows(2 * model.expert_parameters)

    def launch(
        self, states: "torch.Tensor", outputs: "torch.Tensor",
        slots: Sequence[int], pairs: Sequence[tuple[int, int]], take: Rows,
    ) -> None:  # fmt: skip
        """Compute the experts in ``slots``, each for its range of ``pairs`` of rows ``take``.

        ``states`` are (rows, H), ``outputs`` (P + 1, H).
        """
        if self._batched is not None and len(outputs) <= MOST_PAIRS:
            each, rows = list(zip(slots, pairs, strict=True)), take.listed
            through = [one for one in each if one[1][1] - one[1][0] <= self.few]
            for some in portions([pair for _, pair in through], self.few):
                here = [(slot, pair) for slot, pairs_ in map(through.__getitem__, some) for pair in range(*pairs_)]
                self._batched.launch(states, outputs, [(slot, pair, rows[pair]) for slot, pair in here])
            if len(through) == len(slots):
                return
            several = [(slot, pair) for slot, pair in each if pair[1] - pair[0] > self.few]
            slots, pairs = [slot for slot, _ in several], [pair for _, pair in several]
        for slot, (first, end) in zip(slots, pairs, strict=True):
            feed_forward(_rows(states, take, first, end), *self._matrices[slot], outputs[first:end])


def _rows(states: "torch.Tensor", take: Rows, first: int, end: int) -> "torch.Tensor":
    """The rows of ``states`` that the pairs from ``first`` to ``end`` take, without a copy where it is one."""
    if end - first == 1:
        row = take.listed[first]
        return states[row : row + 1]
    assert take.there is not None
    return states.index_select(0, take.there[first:end])


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
