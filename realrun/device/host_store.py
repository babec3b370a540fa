"""Every expert in pinned host memory, from where it is copied to the GPU.

Memory is mapped in a few big arenas and then pinned in place: torch's allocator of pinned memory would round each block
up to a power of two (pytorch/pytorch#150517), which for an expert of 129.5 MB costs 256. Pinning takes its time (1.6
GiB/s were seen), so a store is made once and serves all policies of a run.

Each expert carries a stamp of four numbers, its mark, its own number, the sum of its bytes taken as 32-bit integers and
its version, which travels with it where a run checks what it computes with.
"""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ground.errors import InputError
from ground.text import amount
from realrun.device.devices import Device, refuse_too_little
from realrun.device.host_memory import free_host_bytes
from realrun.device.torch_device import the_torch
from sim.run.terms import Slots

if TYPE_CHECKING:
    from torch import Tensor

ARENA_BYTES = 8 * 2**30
ALIGNMENT = 256
MARK = 0x4D6F45
STAMP = 4
"""Numbers of a stamp: mark, expert, sum, version."""

Fill = Callable[[int, "Tensor"], int | None]
"""Writes the bytes of one stored expert into a buffer of host memory; gives their checksum if it knows it."""


class HostStore:
    """``experts`` experts of ``size`` bytes each in pinned memory of ``device``'s host.

    Args:
        device: who copies from it.
        experts: how many there are; an expert's number is ``layer * E + expert``.
        size: bytes of one, a multiple of 4.
        fill: gives each its bytes; by default random weights of expectation 0 and deviation ``scale``.
        shared: keep only so many, each standing for several: for a machine with less memory. Bytes and times are those
            of all, contents are not.
        limit: bytes of host memory that may be used; by default what the system says is available.
        scale: of random weights.

    Raises InputError where there is too little memory or it cannot be pinned, naming the bytes asked for.
    """

    def __init__(
        self, device: Device, experts: int, size: int, *, fill: Fill | None = None, shared: int | None = None,
        limit: int | None = None, scale: float = 0.02, seed: int = 0,
    ) -> None:  # fmt: skip
        if size % 4 or size <= 0:
            raise InputError(f"an expert of {size} bytes; expected a multiple of 4 above 0")
        if shared is not None and shared < 1:
            raise InputError(f"--shared {shared}; expected at least 1 expert in host memory")
        self.device, self.experts, self.size = device, experts, size
        self.stored = min(experts, shared or experts)
        self._stride = -(-size // ALIGNMENT) * ALIGNMENT
        self._arenas: list[tuple[mmap.mmap, int]] = []
        self._views: list[Tensor] = []
        have = free_host_bytes() if limit is None else limit
        fewer = "--shared N to keep fewer, each standing for several, or " if fill is None else ""
        more = f"give {fewer}{'--host-memory if the system can give more' if limit is None else 'more --host-memory'}"
        refuse_too_little(f"host memory for {self.stored} experts", self.need, have, more)
        self.stamps = device.small(experts, STAMP)
        begun = time.perf_counter()
        try:
            self._map(" or give --shared N" if fill is None else "")
            self._write(fill or _random(device, size, scale, seed))
        except BaseException:
            self.close()
            raise
        self.seconds = time.perf_counter() - begun

    @property
    def need(self) -> int:
        """Bytes of host memory that the store takes: arenas are not rounded up to powers of two."""
        return host_bytes(self.stored, self.size) + self.experts * STAMP * 8

    def expert(self, number: int) -> "Tensor":
        """The bytes of one expert (size,) uint8, where they lie."""
        return self._views[number % self.stored]

    def close(self) -> None:
        """Unpin and let go of the memory; views handed out before must not be used any more."""
        self._views.clear()
        for _, address in self._arenas:
            self.device.unpin(address)
        self._arenas.clear()

    def refuse_slots(self, slots: Slots, remedy: str, held: int = 0) -> int:
        """Bytes of ``slots``, of which ``held`` are there; on a CPU they are memory of the host as the experts are.

        Raises InputError, which ends with ``remedy``, where that does not hold them.
        """
        each = [min(pool // self.size, self.experts) for pool in slots.capacity]
        count = sum(each) + len(slots.reserved)
        if self.device.torch_device.type == "cpu" and count * self.size > held:
            free = self.device.free_bytes()
            have = None if free is None else free + held
            refuse_too_little(f"{self.device.memory} for {count} expert slots", count * self.size, have, remedy)
        return count * self.size

    def describe(self) -> str:
        """In words, for a report."""
        each = "" if self.stored == self.experts else f", each standing for {self.experts / self.stored:.3g} of them"
        return f"{self.stored} of {self.experts} experts in pinned host memory ({amount(self.need)}){each}"

    def _map(self, remedy: str) -> None:
        torch = the_torch()
        each = max(1, ARENA_BYTES // self._stride)
        for first in range(0, self.stored, each):
            count = min(each, self.stored - first)
            arena, address = _mapped(self.device, count * self._stride, self.need, remedy)
            self._arenas.append((arena, address))
            whole = torch.frombuffer(arena, dtype=torch.uint8)
            begins = [i * self._stride for i in range(count)]
            self._views += [whole[begin : begin + self.size] for begin in begins]

    def _write(self, fill: Fill) -> None:
        sums = []
        for number, view in enumerate(self._views):
            known = fill(number, view)
            sums.append(checksum(view) if known is None else known)
        for expert in range(self.experts):
            stamp = [MARK, expert, sums[expert % self.stored], 1]
            self.stamps[expert] = self.stamps.new_tensor(stamp)


def host_bytes(stored: int, size: int) -> int:
    """Bytes of host memory that ``stored`` experts of ``size`` bytes take, pinned in arenas."""
    return stored * (-(-size // ALIGNMENT) * ALIGNMENT)


def checksum(data: "Tensor") -> int:
    """The sum of bytes (n,) uint8, taken as 32-bit integers, modulo 2^64: no order of summing changes it."""
    torch = the_torch()
    return int(data.view(torch.int32).sum(dtype=torch.int64))


def _mapped(device: Device, size: int, whole: int, remedy: str) -> tuple[mmap.mmap, int]:
    """An arena of ``size`` bytes, touched and pinned, and its address."""
    import ctypes

    try:
        arena = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as failed:
        raise InputError(f"host memory: {size:,} bytes of {whole:,} cannot be had ({failed})") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        arena.madvise(mmap.MADV_HUGEPAGE)
    _touch(arena, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    try:
        device.pin(address, size)
    except (MemoryError, RuntimeError) as failed:
        raise InputError(
            f"host memory: {size:,} bytes cannot be pinned ({failed}), {whole:,} in all; this is memory of the host, "
            f"not of the GPU: raise the limit on locked memory (ulimit -l){remedy}"
        ) from None
    return arena, address


def _touch(arena: mmap.mmap, size: int) -> None:
    """Have every page there before pinning, several threads at a time: pinning alone faults them in one by one."""
    torch = the_torch()
    whole = torch.frombuffer(arena, dtype=torch.uint8)
    piece = 64 * 2**20
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda begin: whole[begin : begin + piece].zero_(), range(0, size, piece)))


def _random(device: Device, size: int, scale: float, seed: int) -> Fill:
    """Random bf16 weights, made on the device, which is faster than the host by far."""
    torch = the_torch()
    where = device.torch_device
    generator = torch.Generator(where).manual_seed(seed)
    drawn = torch.empty(size // 2, dtype=torch.bfloat16, device=where)

    def fill(number: int, target: "Tensor") -> int:
        drawn.normal_(0.0, scale, generator=generator)
        data = drawn.view(torch.uint8)
        target.copy_(data)
        return checksum(data)

    return fill
