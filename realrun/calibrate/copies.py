"""Copies over the link: time against size, in both directions, alone, in a row, and beside other work.

A copy alone pays a start-up before its first byte; one that is queued behind another does not, so a row of them is
timed apart: ``(time of n - time of 1) / (n - 1)``.

A run copies from all over its pinned memory to slots all over the GPU's, where addresses are not found in the caches
that translate them; so copies here go from place to place too.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from realrun.calibrate.machine import Machine
from realrun.calibrate.timing import Timing, host_ns
from realrun.device.devices import Device, Event

if TYPE_CHECKING:
    import torch

Direction = Literal["h2d", "d2h"]

SIZES = tuple(int(mib * 2**20) for mib in (1 / 16, 1 / 4, 1, 4, 16, 64, 176, 352))
"""Bytes; the last two are an expert of Phi-3.5-MoE, near enough, and one of Mixtral."""

ROW, SHORT_ROW = 12, 4
"""Copies in a row, and of those from or to memory that is not pinned: they take long."""

PLACES = (2**32, 24 * 2**30)
"""Bytes of pinned host memory and of the device that copies are spread over: more takes long to pin."""


@dataclass(frozen=True)
class Copies:
    """Times of copies, by size in bytes."""

    alone: dict[int, Timing]
    queued: dict[int, Timing]


@dataclass(frozen=True)
class Buffers:
    """Memory that copies are taken over: pinned, of the device, and ordinary memory for the slow ones."""

    pinned: "torch.Tensor"
    device: "torch.Tensor"
    pageable: "torch.Tensor"


def buffers(machine: Machine, sizes: tuple[int, ...] = SIZES, places: tuple[int, int] = PLACES) -> Buffers:
    """So many bytes as ``places`` says, at least a copy of the largest size. Raises InputError if that is too much."""
    host, device = (max(sizes[-1], size) for size in places)
    return Buffers(machine.host(host, True), machine.bytes(device), machine.host(sizes[-1], False))


def copy_times(
    machine: Machine, direction: Direction, memory: Buffers, sizes: tuple[int, ...] = SIZES, pinned: bool = True
) -> Copies:
    """Copies of each of ``sizes`` between host and device, one alone and each of a row.

    Those of memory that is not ``pinned`` are slow and noisy, and a long series of them would take minutes: their rows
    are short, and repeated less.
    """
    host, row = (memory.pinned, ROW) if pinned else (memory.pageable, SHORT_ROW)
    runs = machine.repeats if pinned else machine.repeats // 4
    copies = {
        size: [_copy(*_ends(host, memory.device, size, direction, place / row)) for place in range(row)]
        for size in sizes
    }
    alone = machine.times(copies, repeats=max(3, runs), alone=True)
    rows = {size: [partial(_all, each)] for size, each in copies.items()}
    of_rows = machine.times(rows, repeats=max(3, runs // 2), alone=True)
    return Copies(alone, {size: of_rows[size].over(row - 1, beyond=alone[size].ns) for size in sizes})


def _ends(
    host: Any, device: Any, size: int, direction: Direction, place: float = 0.0
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Source and target of a copy; ``place``, from 0 up to 1, is where in each memory, as far as it goes."""

    def at(memory: Any) -> Any:
        begin = int((memory.numel() - size) * place) // 4096 * 4096
        return memory[begin : begin + size]

    return (at(host), at(device)) if direction == "h2d" else (at(device), at(host))


def _copy(source: Any, target: Any) -> Callable[[], Any]:
    return partial(target.copy_, source, non_blocking=True)


def _all(copies: list[Callable[[], Any]]) -> None:
    for copy in copies:
        copy()


def shared_rates(machine: Machine, size: int = SIZES[-2], rows: int = 8) -> dict[str, float]:
    """GB/s of copies of ``size`` bytes in rows of ``rows``, each alone and beside others.

    Two streams at once have one rate together. A loop on the host that copies memory with all threads counts the bytes
    that it reads and those that it writes.
    """
    one, two, back = Lane(machine, size, "h2d"), Lane(machine, size, "h2d"), Lane(machine, size, "d2h")
    buffers = machine.host(size, False), machine.host(size, False)
    (h2d,), (d2h,) = _rates(machine, [one], rows), _rates(machine, [back], rows)
    there, back_again = _rates(machine, [one, back], rows)
    host_alone, _ = _host_rate(machine, buffers, [], rows)
    host, beside_host = _host_rate(machine, buffers, [one], 3 * rows)
    return {
        "h2d_alone": h2d, "d2h_alone": d2h, "h2d_two_streams": _shared_rate(machine, one, two, rows),
        "h2d_beside_d2h": there, "d2h_beside_h2d": back_again,
        "host_alone": host_alone, "host_beside_h2d": host, "h2d_beside_host": beside_host,
    }  # fmt: skip


class Lane:
    """One stream of copies in one direction, between buffers of its own."""

    def __init__(self, machine: Machine, size: int, direction: Direction) -> None:
        self.machine, self.size = machine, size
        self.source, self.target = _ends(machine.host(size, True), machine.bytes(size), size, direction)
        self.stream = machine.torch.cuda.Stream() if machine.cuda else None

    def enqueue(self, rows: int) -> "tuple[Any, Any] | int":
        """Start ``rows`` copies; the events around them, or on the CPU the nanoseconds that they took."""
        if self.stream is None:
            return host_ns(partial(_all, [_copy(self.source, self.target)] * rows))
        event = self.machine.torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        with self.machine.torch.cuda.stream(self.stream):
            begin.record()
            for _ in range(rows):
                self.target.copy_(self.source, non_blocking=True)
            end.record()
        return begin, end


def _rates(machine: Machine, lanes: list[Lane], rows: int) -> list[float]:
    """GB/s of each lane with all of them busy; the first round warms up."""
    for _ in range(2):
        machine.synchronize()
        marks = [lane.enqueue(rows) for lane in lanes]
        machine.synchronize()
    return [lane.size * rows / _elapsed(mark) for lane, mark in zip(lanes, marks, strict=True)]


def _shared_rate(machine: Machine, one: Lane, two: Lane, rows: int) -> float:
    """GB/s of two lanes as one, from the first one's begin to whichever end is later: they may take turns."""
    for _ in range(2):
        machine.synchronize()
        first, second = one.enqueue(rows), two.enqueue(rows)
        machine.synchronize()
    if isinstance(first, int) or isinstance(second, int):
        took = _elapsed(first) + _elapsed(second)
    else:
        took = max(_elapsed((first[0], end)) for end in (first[1], second[1]))
    return (one.size + two.size) * rows / took


def _elapsed(mark: "tuple[Any, Any] | int") -> float:
    """Nanoseconds between the events of `Lane.enqueue`."""
    return max(1.0, mark if isinstance(mark, int) else mark[0].elapsed_time(mark[1]) * 1e6)


def _host_rate(machine: Machine, buffers: tuple[Any, Any], lanes: list[Lane], rows: int) -> tuple[float, float]:
    """GB/s that copies between two ``buffers`` of the host read and write while ``lanes`` are busy, and of all those.

    The copies follow each other, with all of torch's threads.
    """
    one, other = buffers
    rounds: list[int] = []
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            rounds.append(host_ns(lambda: one.copy_(other)))

    def until(count: int) -> None:
        while len(rounds) < count:
            time.sleep(0.001)

    worker = threading.Thread(target=loop, daemon=True)
    worker.start()
    try:
        until(2)  # threads and pages are warm
        first = len(rounds)
        copied = sum(_rates(machine, lanes, rows))
        last = max(len(rounds), first + 3)
        until(last)
    finally:
        stop.set()
        worker.join()
    during = sorted(rounds[first:last])
    return 2 * one.numel() / during[len(during) // 2], copied


class Traffic:
    """Copies of ``size`` bytes that keep the link of ``device`` busy beside something else, on its copying stream."""

    AHEAD = 3
    """Copies that are handed over at a time."""

    def __init__(self, machine: Machine, device: Device, size: int = 32 * 2**20) -> None:
        self._device = device
        self._source, self._target = machine.host(size, True), machine.bytes(size)
        self._under_way: deque[Event] = deque()

    def keep(self) -> None:
        """Start copies until `AHEAD` are under way; to be called again before those can be over."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        while len(self._under_way) < self.AHEAD:
            self._device.copy(self._target, self._source)
            self._under_way.append(self._device.copies.record())
