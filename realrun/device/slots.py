"""The GPU's expert slots: the simulator's cache, with memory behind each slot.

Who is evicted is decided by ``sim.run.slots.ExpertCache``, so demand-only policies find exactly what they find in the
simulator. Here each expert that holds room also holds a slot of one big buffer.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ground.errors import InputError
from realrun.device.devices import Device, refuse_too_little
from realrun.device.host_store import STAMP
from realrun.device.torch_device import the_torch
from sim.eviction import Eviction
from sim.run.slots import ExpertCache
from sim.run.terms import Slots

if TYPE_CHECKING:
    import torch


class SlotBuffer:
    """Slots of ``size`` bytes on ``device``: in each pool as many as it holds, at most ``every``.

    Args:
        capacity: bytes of each pool.
        room: gives a buffer of so many slots of so many bytes; by default a new one.

    Raises InputError if the device has too little memory.
    """

    def __init__(
        self, device: Device, size: int, every: int, capacity: Sequence[int], room: "Room | None" = None
    ) -> None:  # fmt: skip
        counts = [min(pool // size, every) for pool in capacity]
        self.n_slots = sum(counts)
        self.bytes = (room or Room(device)).of(self.n_slots, size)
        """The slots (n_slots, size) uint8."""
        self.rows = self.bytes.unbind(0)
        """Each slot (size,)."""
        self.stamps = the_torch().zeros(self.n_slots, STAMP, dtype=the_torch().int64, device=device.torch_device)
        """What was stamped on the expert in each slot, where a run checks."""
        ends = np.cumsum(counts).tolist()
        self.of_pools = [list(range(end - count, end))[::-1] for end, count in zip(ends, counts, strict=True)]
        """The slots of each pool, the first one last."""


class DeviceCache(ExpertCache):
    """Slots of ``size`` bytes on ``device``.

    Args:
        device: whose memory.
        size: bytes of one expert, the same in all ``n_layers`` layers.
        n_layers, n_experts: L and E.
        slots: the pools of ``sim.run.terms.slots_of``.
        eviction, first_call: as in ``sim.run.slots.ExpertCache``.
        room: gives a buffer of so many slots of so many bytes; by default a new one.

    Raises InputError if a pool cannot hold one expert or the device has too little memory.
    """

    def __init__(
        self, device: Device, size: int, n_layers: int, n_experts: int, slots: Slots,
        eviction: str | Callable[[np.ndarray], Eviction] = "lru", first_call: np.ndarray | None = None,
        room: "Room | None" = None,
    ) -> None:  # fmt: skip
        sizes = (size,) * n_layers
        super().__init__(
            sizes, n_experts, slots.capacity, slots.pool, eviction, first_call, slots.reserved, slots.shared
        )
        every = n_experts * n_layers
        buffer = SlotBuffer(device, size, every, self.capacity, room)
        self.n_slots, self.bytes, self.rows, self.stamps = buffer.n_slots, buffer.bytes, buffer.rows, buffer.stamps
        self._free = buffer.of_pools
        self.slot = [-1] * every
        """The slot of each expert that holds one, -1 for the others."""

    def allot(self, expert: int, passed: int, demand: bool) -> list[int] | None:
        """As ``sim.run.slots.ExpertCache.allot``; whoever gets room gets a slot."""
        victims = super().allot(expert, passed, demand)
        if victims is not None:
            self.slot[expert] = self._free[self.pool[expert]].pop()
        return victims

    def release(self, expert: int) -> None:
        """Empty the slot; what lies in it stays until somebody's copy overwrites it."""
        super().release(expert)
        self._free[self.pool[expert]].append(self.slot[expert])
        self.slot[expert] = -1


class Room:
    """A buffer of slots on ``device`` that one run after another uses, made anew only where it is too small."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None

    def of(self, count: int, size: int) -> "torch.Tensor":
        """Slots (count, size) uint8. Raises InputError if the device has too little memory."""
        torch, device = the_torch(), self._device
        if self._bytes is None or self._bytes.shape[0] < count or self._bytes.shape[1] != size:
            self._bytes = None  # its memory may be needed
            what = f"{device.memory} for {count} expert slots"
            refuse_too_little(what, count * size, device.free_bytes(), "give a smaller --cache")
            try:
                self._bytes = torch.zeros(count, size, dtype=torch.uint8, device=device.torch_device)
            except RuntimeError as failed:
                reason = str(failed).splitlines()[0]
                raise InputError(f"{count} slots of {size:,} bytes cannot be had on {device.name} ({reason})") from None
        return self._bytes[:count]
