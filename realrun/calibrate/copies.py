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
from realrun.calibrate.timing import Timing
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
    return Copies(alone, {size: _one_of(row, all_of_it, alone[size]) for size, all_of_it in of_rows.items()})


def _ends(
    host: Any, device: Any, size: int, direction: Direction, place: float = 0.0
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Source and target of a copy; ``place``, from 0 up to 1, is where in each memory, as far as it goes."""

    def at(memory: Any) -> Any:
        begin = int((memory.numel() - size) * place) // 4096 * 4096
        return memory[begin : begin + size]

    return (at(host), at(device)) if direction == "h2d" else (at(device), at(host))


def _copy(source: Any, target: Any) -> Callable[[], None]:
    return lambda: target.copy_(source, non_blocking=True)


def _all(copies: list[Callable[[], None]]) -> None:
    for copy in copies:
        copy()


def _one_of(count: int, row: Timing, alone: Timing) -> Timing:
    """What one of ``count`` copies adds to their ``row``."""
    low, middle, high = (max(1, round((ns - alone.ns) / (count - 1))) for ns in (row.low, row.ns, row.high))
    return Timing(middle, low, high, row.runs)


@dataclass(frozen=True)
class SharedRates:
    """GB/s of copies that share the machine, each beside what it reaches alone."""

    h2d_alone: float
    d2h_alone: float
    h2d_two_streams: float
    """Both streams together."""
    h2d_beside_d2h: float
    d2h_beside_h2d: float
    host_alone: float
    """Bytes read and written by a loop on the host that copies memory, all threads."""
    host_beside_h2d: float
    h2d_beside_host: float


def shared_rates(machine: Machine, size: int = SIZES[-2], rows: int = 8) -> SharedRates:
    """Copies of ``size`` bytes in rows of ``rows``: two streams at once, both directions at once, beside the host."""
    one, two, back = Lane(machine, size, "h2d"), Lane(machine, size, "h2d"), Lane(machine, size, "d2h")
    host = HostWork(machine, size)
    (h2d,), (d2h,) = _rates(machine, [one], rows), _rates(machine, [back], rows)
    there, return_ = _rates(machine, [one, back], rows)
    alone = host.rate(machine, [], rows)
    beside = host.rate(machine, [one], 3 * rows)
    return SharedRates(h2d, d2h, _shared_rate(machine, one, two, rows), there, return_, alone[0], beside[0], beside[1])


class Lane:
    """One stream of copies in one direction, between buffers of its own."""

    def __init__(self, machine: Machine, size: int, direction: Direction) -> None:
        self.machine, self.size = machine, size
        self.source, self.target = _ends(machine.host(size, True), machine.bytes(size), size, direction)
        self.stream = machine.torch.cuda.Stream() if machine.cuda else None

    def enqueue(self, rows: int) -> "tuple[Any, Any] | int":
        """Start ``rows`` copies; the events around them, or on the CPU the nanoseconds that they took."""
        if self.stream is None:
            begin = time.perf_counter_ns()
            for _ in range(rows):
                self.target.copy_(self.source)
            return time.perf_counter_ns() - begin
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


class HostWork:
    """A loop on the host that is bound by its memory: copies between two buffers, with all of torch's threads."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.a, self.b = machine.host(size, False), machine.host(size, False)

    def rate(self, machine: Machine, lanes: list[Lane], rows: int) -> tuple[float, float]:
        """GB/s that the loop reads and writes while ``lanes`` are busy, and theirs together meanwhile."""
        rounds: list[int] = []
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                begin = time.perf_counter_ns()
                self.a.copy_(self.b)
                rounds.append(time.perf_counter_ns() - begin)

        worker = threading.Thread(target=loop, daemon=True)
        worker.start()
        try:
            while len(rounds) < 2:  # threads and pages are warm
                time.sleep(0.001)
            first = len(rounds)
            copied = sum(_rates(machine, lanes, rows)) if lanes else 0.0
            last = len(rounds) if lanes else first
            while len(rounds) < max(last, first + 3):
                time.sleep(0.001)
            during = sorted(rounds[first : max(last, first + 3)])
        finally:
            stop.set()
            worker.join()
        return 2 * self.a.numel() / during[len(during) // 2], copied


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
