"""The CPU as a device: each stream is a thread, and a copy is a copy from one buffer to another."""

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from realrun.device.devices import Device, Event
from realrun.device.host_memory import free_host_bytes
from realrun.device.torch_device import the_torch

if TYPE_CHECKING:
    import torch


class Passed:
    """A point of a thread's work: an `Event`, and the time ``ns`` at which it was passed."""

    def __init__(self) -> None:
        self.ns = 0
        self._passed = threading.Event()

    def passed(self) -> None:
        """Now it is."""
        self.ns = time.perf_counter_ns()
        self._passed.set()

    def query(self) -> bool:
        """Whether it has been passed."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Until it is passed."""
        self._passed.wait()


class _Thread:
    """A stream that is a thread."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch = the_torch()
        with torch.no_grad():
            while (item := self._work.get()) is not None:
                work, arguments = item
                try:
                    work(*arguments)
                except BaseException as wrong:  # as a GPU's errors, it comes up where the host looks next
                    self.failed = self.failed or wrong

    def launch(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._work.put((work, arguments))

    def record(self, again: Any = None) -> Event:
        event = Passed()
        self.launch(event.passed)
        return event

    mark = record

    def wait(self, event: Any) -> None:
        self.launch(event.wait)

    def delay(self, seconds: float) -> None:
        self.launch(time.sleep, seconds)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class HostDevice(Device):
    """The CPU as a device: what would be device memory is ordinary memory, and every copy moves real bytes."""

    memory = "host memory"

    def __init__(self) -> None:
        self.torch_device = the_torch().device("cpu")
        self.name = f"CPU, torch {the_torch().__version__}"
        self.compute, self.copies, self.aside = _Thread("compute"), _Thread("copies"), _Thread("aside")
        self._streams = (self.compute, self.copies, self.aside)

    @contextmanager
    def running(self) -> Iterator[None]:
        """No gradients, also where the host itself touches tensors."""
        with the_torch().no_grad():
            yield

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", begin: int = 0, end: int | None = None) -> None:
        """In the copying thread."""
        if begin or end is not None:
            target, source = target[begin:end], source[begin:end]
        self.copies.launch(target.copy_, source)

    def move(self, target: int, source: int, size: int) -> None:
        """Copy so many bytes between addresses, in the copying thread."""
        self.copies.launch(ctypes.memmove, target, source, size)

    def copy_back(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        """In the copying thread."""
        self.copies.launch(target.copy_, source)

    def between(self, first: Any, last: Any) -> int:
        """By the host's clock."""
        return max(0, last.ns - first.ns)

    def graph(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Nothing to gain."""
        return work

    def small(self, *shape: int) -> "torch.Tensor":
        """Plain."""
        return the_torch().zeros(*shape, dtype=the_torch().int64)

    def pin(self, address: int, size: int) -> None:
        """All memory is alike."""

    def unpin(self, address: int) -> None:
        """All memory is alike."""

    def hold_back(self, event: Any) -> None:
        """The host's thread computes itself."""
        event.wait()

    def breathe(self) -> None:
        """Let the threads have the processor; raise what went wrong in them."""
        time.sleep(1e-5)
        self._check()

    def synchronize(self) -> None:
        """Wait for all three threads."""
        for stream in self._streams:
            event: Any = stream.record()
            event.wait()
        self._check()

    def free_bytes(self) -> int | None:
        """The host's: experts, the model around them and slots all take of it."""
        gc.collect()  # what a run before this one took may hang on a cycle
        return free_host_bytes()

    def close(self) -> None:
        """End the threads."""
        for stream in self._streams:
            stream.close()

    def _check(self) -> None:
        for stream in self._streams:
            if stream.failed is not None:
                raise stream.failed
