"""Where a run happens: a GPU's streams and events, or the same of a CPU.

A stream does what it is given one after another, beside the host. A device has two: one that computes and one that
copies. Everything a run does on a device goes through them, so that the engine is one and the same on a GPU and on a
CPU, where each stream is a thread and a copy is a copy from one buffer to another.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from ground.errors import InputError
from ground.text import amount
from realrun.device.faults import RunError
from realrun.device.host_memory import free_host_bytes
from realrun.device.torch_device import the_device, the_torch

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(Protocol):
    """Work in order, beside the host."""

    def launch(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Have ``work(*arguments)`` done after all that was launched before; returns at once."""

    def record(self, again: Any = None) -> Event:
        """The point after all that was launched so far; ``again`` is an event that nobody waits for any more."""

    def mark(self) -> Event:
        """The same, with the time at which it is passed; see ``Device.between``."""

    def wait(self, event: Any) -> None:
        """What is launched from now on waits for ``event``, of any stream of this device."""

    def delay(self, seconds: float) -> None:
        """Do nothing for about so long, as a kernel that sleeps."""


class Device(Protocol):
    """A device with a stream that computes and one that copies."""

    torch_device: "torch.device"
    memory: str
    """What its memory is called."""

    @property
    def compute(self) -> Stream:
        """The stream that computes."""

    @property
    def copies(self) -> Stream:
        """The stream that copies experts."""

    @property
    def aside(self) -> Stream:
        """The stream of predictions that run beside the step."""

    @property
    def name(self) -> str:
        """What it is, for a report."""

    def running(self) -> Any:
        """A context in which the compute stream is the current one; every launch belongs inside."""

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", begin: int = 0, end: int | None = None) -> None:
        """Copy bytes ``begin`` to ``end`` to the same place of ``target``, on the copying stream.

        Both are contiguous and must stay until that is done, the host's side pinned. Raises RunError.
        """

    def between(self, first: Any, last: Any) -> int:
        """Nanoseconds between two marks that have been passed."""

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, which must always touch the same tensors, ready to be launched at little cost."""

    def small(self, *shape: int) -> "torch.Tensor":
        """A few int64 numbers of host memory that the device writes to beside the host."""

    def pin(self, address: int, size: int) -> None:
        """Lock host memory into place, so that copies from it run beside everything else. Raises MemoryError."""

    def unpin(self, address: int) -> None:
        """Let go of what ``pin`` locked."""

    def hold_back(self, event: Any) -> None:
        """What the host's own thread computes from now on, as a model does, waits for ``event``."""

    def breathe(self) -> None:
        """The host has nothing to do but to look again."""

    def synchronize(self) -> None:
        """Wait until all streams are idle."""

    def free_bytes(self) -> int | None:
        """Device memory that is not in use, None if that is not known."""


@contextmanager
def open_device(name: str) -> Iterator[Device]:
    """``cuda``, ``cuda:1`` or ``cpu``. Raises InputError where torch is missing or there is no such device."""
    device = the_device(name)
    if device.type == "cuda":
        yield CudaDevice(device)
        return
    host = HostDevice()
    try:
        yield host
    finally:
        host.close()


# -- a GPU -----------------------------------------------------------------------------------------------------------


class _CudaStream:
    def __init__(self, device: "torch.device", priority: int = 0) -> None:
        self._torch = the_torch()
        self._event = self._torch.cuda.Event
        self.stream = self._torch.cuda.Stream(device, priority=priority)

    def launch(self, work: Callable[..., Any], *arguments: Any) -> None:
        work(*arguments)  # a launch on a GPU returns at once; the current stream is this one

    def record(self, again: Any = None) -> Event:
        event = self._event() if again is None else again
        event.record(self.stream)
        return event

    def mark(self) -> Event:
        event = self._event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def delay(self, seconds: float) -> None:
        with self._torch.cuda.stream(self.stream):
            self._torch.cuda._sleep(int(seconds * 1.8e9))  # cycles of a clock of about that rate


class CudaDevice:
    """An NVIDIA GPU. The copying stream has the higher priority: its kernels-free work must never queue."""

    memory = "GPU memory"

    def __init__(self, device: "torch.device") -> None:
        self._torch = torch = the_torch()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.compute = _CudaStream(self.torch_device)
        self.copies = _CudaStream(self.torch_device, priority=-1)
        self.aside = _CudaStream(self.torch_device)
        self._to_device = _driver_copy(self.torch_device)

    @property
    def name(self) -> str:
        """Name of the GPU, and of the software."""
        torch = self._torch
        return f"{torch.cuda.get_device_name(self.torch_device)}, torch {torch.__version__}, CUDA {torch.version.cuda}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute stream current, no gradients."""
        with self._torch.no_grad(), self._torch.cuda.stream(self.compute.stream):
            yield

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", begin: int = 0, end: int | None = None) -> None:
        """Asynchronous where the source is pinned; by the driver itself, since torch takes several times as long."""
        stop = source.nbytes if end is None else end
        if self._to_device is not None:
            stream = self.copies.stream.cuda_stream
            failed = self._to_device(target.data_ptr() + begin, source.data_ptr() + begin, stop - begin, stream)
            if failed:
                raise RunError(f"copy of {stop - begin:,} bytes to {self.torch_device}: CUDA error {failed}")
            return
        flat = self._torch.uint8
        with self._torch.cuda.stream(self.copies.stream):
            target.view(flat)[begin:stop].copy_(source.view(flat)[begin:stop], non_blocking=True)

    def between(self, first: Any, last: Any) -> int:
        """From the events' own clock, half a microsecond fine."""
        return max(0, round(first.elapsed_time(last) * 1e6))

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph, captured after two plain runs in which libraries allocate what they need."""
        torch = self._torch
        self.synchronize()
        for _ in range(2):
            work()
        self.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=self.compute.stream, capture_error_mode="thread_local"):
            work()
        return captured.replay

    def small(self, *shape: int) -> "torch.Tensor":
        """Pinned."""
        return self._torch.zeros(*shape, dtype=self._torch.int64, pin_memory=True)

    def pin(self, address: int, size: int) -> None:
        """Register pages with CUDA."""
        failed = int(self._torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failed:
            raise MemoryError(f"cudaHostRegister: error {failed}")

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._torch.cuda.cudart().cudaHostUnregister(address)

    def hold_back(self, event: Any) -> None:
        """The host's thread launches on the compute stream: that waits, not the host."""
        self.compute.wait(event)

    def breathe(self) -> None:
        """Look again at once: microseconds count."""

    def synchronize(self) -> None:
        """Wait for the whole GPU."""
        self._torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int | None:
        """What CUDA says is free, and what torch holds without using it."""
        torch, device = self._torch, self.torch_device
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _driver_copy(device: "torch.device") -> Callable[[int, int, int, int], int] | None:
    """``cuMemcpyHtoDAsync(device address, host address, bytes, stream)`` of the driver, None if it cannot be had."""
    import ctypes

    torch = the_torch()
    try:
        copy: Any = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    except (OSError, AttributeError):
        return None
    copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    copy.restype = ctypes.c_int
    there = torch.zeros(64, dtype=torch.uint8, device=device)  # torch's context is the thread's from here on
    here = torch.arange(64, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize(device)
    works = not copy(there.data_ptr(), here.data_ptr(), 64, torch.cuda.current_stream(device).cuda_stream)
    torch.cuda.synchronize(device)
    return copy if works and torch.equal(there.cpu(), here) else None


# -- a CPU -----------------------------------------------------------------------------------------------------------


class _Passed:
    """A point of a thread's work."""

    def __init__(self) -> None:
        self.ns = 0
        self._passed = threading.Event()

    def passed(self) -> None:
        self.ns = time.perf_counter_ns()
        self._passed.set()

    def query(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
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
        event = _Passed()
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


class HostDevice:
    """The CPU as a device: what would be device memory is ordinary memory, and every copy moves real bytes."""

    memory = "host memory"

    def __init__(self) -> None:
        self.torch_device = the_torch().device("cpu")
        self.compute = _Thread("compute")
        self.copies = _Thread("copies")
        self.aside = _Thread("aside")

    @property
    def name(self) -> str:
        """That it is a CPU, and the software."""
        return f"CPU, torch {the_torch().__version__}"

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

    def between(self, first: Any, last: Any) -> int:
        """By the host's clock."""
        return max(0, last.ns - first.ns)

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Nothing to gain."""
        return work

    def small(self, *shape: int) -> "torch.Tensor":
        """Plain."""
        torch = the_torch()
        return torch.zeros(*shape, dtype=torch.int64)

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
        for stream in (self.compute, self.copies, self.aside):
            event: Any = stream.record()
            event.wait()
        self._check()

    def free_bytes(self) -> int | None:
        """The host's: experts, the model around them and slots all take of it."""
        gc.collect()  # what a run before this one took may hang on a cycle
        return free_host_bytes()

    def close(self) -> None:
        """End the threads."""
        for stream in (self.compute, self.copies, self.aside):
            stream.close()

    def _check(self) -> None:
        for stream in (self.compute, self.copies, self.aside):
            if stream.failed is not None:
                raise stream.failed


def refuse_too_little(what: str, need: int, have: int | None, remedy: str) -> None:
    """Raise InputError if ``need`` bytes of ``what`` are more than there are; None is not known."""
    if have is not None and need > have:
        raise InputError(f"{what}: needs {amount(need)} and {amount(have)} are free; {remedy}")
