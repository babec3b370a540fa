"""What a plan charges for predicting, done as real work of that size.

A plan says how many nanoseconds a prediction takes by the software profile of the run. Here that becomes a look-up that
reads as many bytes as the profile's formula turns into those nanoseconds, a matrix-vector product over table entries
and the choice of the nearest, on the GPU or on the host as the profile has it; the host waits for its answer. On a GPU
with Triton that is this project's own look-up kernel as a CUDA graph, elsewhere two operations of torch.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from realrun.device.devices import Device, Event
from realrun.device.host_device import Passed
from realrun.device.torch_device import the_torch
from realrun.device.triton_launch import triton_runs_on
from realrun.engine.lookup import Fused
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts

if TYPE_CHECKING:
    import torch

_TABLE_BYTES = 64 * 2**20
"""Of a table in the host's memory; four times as much in a GPU's. What is larger is read several times."""
_MOST_READY = 2**14
"""Entries of a look-up that is made ready: of a longer one the launches are no matter."""
_NEAREST = 8
_STEP = 64
"""Sizes of look-ups that are made ready are multiples of so many entries."""


class Predictions:
    """Look-ups of one run in tables of ``dims`` numbers an entry."""

    def __init__(self, device: Device, software: PredictionCosts, hardware: Hardware, dims: int) -> None:
        torch = the_torch()
        self._device = device
        self.on_gpu = software.where == "gpu"
        self._fixed_ns = software.search_us.value * 1e3
        bandwidth = hardware.memory_bytes_per_s if software.gbps is None else software.gbps.value * 1e9
        self._entries_a_ns = bandwidth / 1e9 / (dims * software.element_bytes)
        where = device.torch_device if self.on_gpu else torch.device("cpu")
        self._query = torch.ones(dims, dtype=torch.bfloat16 if self.on_gpu else torch.float32, device=where)
        size = _TABLE_BYTES * (4 if where.type == "cuda" else 1)
        self._entries = max(_NEAREST, size // (dims * software.element_bytes))
        self._answer = device.small(_NEAREST)
        self._ready: dict[int, Callable[[], Any]] = {}

    @cached_property
    def _table(self) -> "torch.Tensor":
        """The entries, made when they are first needed: most policies never look anything up."""
        return self._query.new_empty(self._entries, len(self._query)).normal_()

    @cached_property
    def _scores(self) -> "torch.Tensor":
        return self._query.new_empty(self._entries)

    def prepare(self, costs: Iterable[int]) -> None:
        """Make ready what look-ups of these ns need. Nothing may be running meanwhile."""
        sizes = {self._size(ns) for ns in costs if ns}
        if not sizes:
            return
        _ = self._table, self._scores
        if not self.on_gpu or not triton_runs_on(self._device.torch_device):
            return
        for count in sorted(sizes - set(self._ready)):
            if count <= min(_MOST_READY, self._entries):
                self._ready[count] = Fused(self._table[:count].unsqueeze(0), self._query, _NEAREST).graph()

    def _size(self, ns: int) -> int:
        """``entries`` as they are made ready."""
        return -(-self.entries(ns) // _STEP) * _STEP

    def entries(self, ns: int) -> int:
        """How many entries a look-up of ``ns`` nanoseconds reads, at least as many as it chooses."""
        return max(_NEAREST, round((ns - self._fixed_ns) * self._entries_a_ns))

    def begin(self, ns: int, critical: bool) -> Event:
        """Start a look-up, before what the computing stream does next or beside it; its end is when it is answered."""
        count = self.entries(ns)
        if self.on_gpu:
            stream = self._device.compute if critical else self._device.aside
            # Whatever a run launches, it launches with the computing stream as the current one.
            other = None if critical else getattr(stream, "stream", None)
            stream.launch(self._on_stream, other, count, self._ready.get(self._size(ns)))
            return stream.record()
        done = Passed()
        if critical:
            self._search(count)
            done.passed()
        else:
            threading.Thread(target=self._beside, args=(count, done), daemon=True).start()
        return done

    def _on_stream(self, other: Any, count: int, ready: "Callable[[], Any] | None") -> None:
        if other is not None:
            with the_torch().cuda.stream(other):
                self._on_stream(None, count, ready)
        elif ready is None:
            self._search(count)
        else:
            self._answer.copy_(ready()[1][0], non_blocking=True)

    def _search(self, count: int) -> None:
        torch = the_torch()
        while count > self._entries:
            torch.mv(self._table, self._query, out=self._scores)
            count -= self._entries
        last = max(_NEAREST, count)
        torch.mv(self._table[:last], self._query, out=self._scores[:last])
        self._answer.copy_(self._scores[:last].topk(_NEAREST).indices, non_blocking=True)

    def _beside(self, count: int, done: Passed) -> None:
        with the_torch().no_grad():
            self._search(count)
        done.passed()
