"""A GPU as a device: streams and events of CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from realrun.device.cuda_graph import recorded
from realrun.device.devices import Device, Event
from realrun.device.faults import RunError
from realrun.device.torch_device import the_torch

if TYPE_CHECKING:
    import torch


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


class CudaDevice(Device):
    """An NVIDIA GPU. The copying stream has the higher priority: its kernels-free work must never queue."""

    memory = "GPU memory"

    def __init__(self, device: "torch.device") -> None:
        self._torch = torch = the_torch()
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        model = torch.cuda.get_device_name(self.torch_device)
        self.name = f"{model}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        self.compute: _CudaStream = _CudaStream(self.torch_device)
        self.copies: _CudaStream = _CudaStream(self.torch_device, priority=-1)
        self.aside = _CudaStream(self.torch_device)
        self._to_device = _driver_copy(self.torch_device)

    @property
    def copies_by_driver(self) -> bool:
        """Whether the driver's own functions can be called, as a trial has shown."""
        return self._to_device is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute stream current, no gradients."""
        with self._torch.no_grad(), self._torch.cuda.stream(self.compute.stream):
            yield

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", begin: int = 0, end: int | None = None) -> None:
        """Asynchronous where the source is pinned; by the driver itself, since torch takes several times as long."""
        stop = source.nbytes if end is None else end
        if self._to_device is None:
            flat = self._torch.uint8
            with self._torch.cuda.stream(self.copies.stream):
                target.view(flat)[begin:stop].copy_(source.view(flat)[begin:stop], non_blocking=True)
            return
        stream = self.copies.stream.cuda_stream
        if failed := self._to_device(target.data_ptr() + begin, source.data_ptr() + begin, stop - begin, stream):
            raise RunError(f"copy of {stop - begin:,} bytes to {self.torch_device}: CUDA error {failed}")

    def copy_back(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        """Asynchronous where the target is pinned."""
        with self._torch.cuda.stream(self.copies.stream):
            target.copy_(source, non_blocking=True)

    def between(self, first: Any, last: Any) -> int:
        """From the events' own clock, half a microsecond fine."""
        return max(0, round(first.elapsed_time(last) * 1e6))

    def graph(self, work: Callable[[], Any]) -> Callable[[], None]:
        """A CUDA graph, which does not keep ``work`` alive."""
        self.synchronize()
        graph, _ = recorded(work, self.compute.stream)
        replay: Callable[[], None] = graph.replay
        return replay

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
