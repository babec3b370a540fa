"""The driver's functions that compiled code calls, by their addresses.

On an NVIDIA GPU these are functions of libcuda. Elsewhere Python stands behind functions of the same signatures, so the
same compiled code runs on a CPU, slowly. All numbers are handed over as 64-bit ones; 0 is success.
"""

import ctypes
import time
from itertools import count
from typing import Any

from realrun.device.cuda_device import CudaDevice
from realrun.device.devices import Device
from realrun.device.host_device import Passed

NOT_READY = 600
"""What a query answers of an event that has not been passed."""
CLOCK: int = getattr(time, "CLOCK_MONOTONIC", 1)
"""The clock that ``time.perf_counter_ns`` reads."""
NAMES = ("copy", "copy_back", "record", "query", "wait")


class Driver:
    """Addresses and handles for one run on ``device``.

    Attributes:
        functions: address of each of `NAMES`, and of the C library's ``clock_gettime`` and ``usleep``.
        streams: handles of the computing and the copying stream.
        pause_us: how long whoever waits sleeps between two looks.
    """

    def __init__(self, device: Device) -> None:
        self._device: Any = device
        c_library = ctypes.CDLL(None)
        self.functions = {"clock": _address(c_library.clock_gettime), "pause": _address(c_library.usleep)}
        self._library = _libcuda(device)
        if self._library is not None:
            self.pause_us = 0
            self.streams = (device.compute.stream.cuda_stream, device.copies.stream.cuda_stream)  # type: ignore[attr-defined]
            called = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventQuery",
                      "cuStreamWaitEvent")  # fmt: skip
            self.functions |= {n: _address(getattr(self._library, f)) for n, f in zip(NAMES, called, strict=True)}
            return
        self.pause_us = 20
        self.streams = (0, 1)
        self._stand_in = _StandIn(device)
        self.functions |= {name: _address(getattr(self._stand_in, name)) for name in NAMES}

    def events(self, number: int) -> list[int]:
        """So many new events."""
        if self._library is None:
            return [-1 - event for event in range(number)]
        made = []
        for _ in range(number):
            event = ctypes.c_void_p()
            if failed := self._library.cuEventCreate(ctypes.byref(event), 2):  # without times
                raise MemoryError(f"cuEventCreate: error {failed}")
            made.append(int(event.value or 0))
        return made

    def forget(self, events: list[int]) -> None:
        """Nobody uses these events any more."""
        if self._library is not None:
            for event in events:
                self._library.cuEventDestroy_v2(ctypes.c_void_p(event))

    def handle(self, event: Any) -> int:
        """What compiled code knows an event of a stream by, 0 for one that only Python can look at.

        The event must live until it has been passed.
        """
        if self._library is None:
            return self._stand_in.handle(event)
        return 0 if isinstance(event, Passed) else int(event.cuda_event)


class _StandIn:
    """The driver's functions for a device that has none, on its streams."""

    def __init__(self, device: Any) -> None:
        self._device, self._events, self._numbers = device, dict[int, Any](), count(1)
        number = ctypes.c_int64
        call = {n: ctypes.CFUNCTYPE(ctypes.c_int32, *[number] * n) for n in (1, 2, 3, 4)}
        self.copy, self.copy_back = call[4](self._copy), call[4](self._copy)
        self.record, self.query, self.wait = call[2](self._record), call[1](self._query), call[3](self._wait)

    def handle(self, event: Any) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        self._device.move(target, source, size)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self._events[event] = self._device.copies.record()
        return 0

    def _query(self, event: int) -> int:
        if not self._events[event].query():
            return NOT_READY
        if event > 0:  # asked until it is passed
            del self._events[event]
        return 0

    def _wait(self, stream: int, event: int, flags: int) -> int:
        if event in self._events:
            self._device.compute.wait(self._events[event])
        return 0


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _libcuda(device: Device) -> Any:
    """The driver's library for an NVIDIA GPU to which its copies have been tried, else None."""
    if not isinstance(device, CudaDevice) or not device.copies_by_driver:
        return None
    return ctypes.CDLL("libcuda.so.1")
