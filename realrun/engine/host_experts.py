"""Experts that run on the host, where their weights lie, for plans that choose so.

The states of a call are fetched to the host, a thread computes its experts one after another as their weights lie in
pinned memory, and their outputs are copied back to the rows of their pairs. The thread touches host memory alone: what
concerns the device is done by the run's own thread, so that the device's driver serves one thread only.

One row is multiplied by torch's own product, several rows by oneDNN's. oneDNN takes two to six times as long for one
row in bf16 (torch 2.13, an EPYC with AVX-512: 5.1 ms against 2.5 for 59 MB and one thread, 7.8 against 1.3 for two).
Other builds may have no such kernel, so both are tried before a run. Where the device is a CPU its experts are computed
alike wherever they lie.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from realrun.device.devices import Device
from realrun.device.host_store import HostStore
from realrun.device.torch_device import the_torch
from realrun.engine.experts import Rows, matrices
from realrun.engine.layers import Step, feed_forward
from traces.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

Results = list[tuple[int, int, "torch.Tensor"]]
"""The first pair, the end and the outputs (pairs, H) of each expert."""


class HostedExperts:
    """Computes experts on the host for one run; ``close`` ends its thread.

    ``threads`` is how many compute at once, by default all of torch's. One less, which leaves a processor to the thread
    that looks after the device, was no quicker on an H200's host: 7.3 instead of 6.6 ms, beside copies 7.6 and 7.3.
    """

    def __init__(self, device: Device, store: HostStore, model: ModelSpec, threads: int | None = None) -> None:
        torch = the_torch()
        self._device, self._store = device, store
        self._shape = (model.hidden, model.expert_ffn, model.expert_matrices == 3)
        self._before = torch.get_num_threads()
        self.threads = threads or self._before
        # Of the thread that asks, and of those that begin later.
        self._thread = ThreadPoolExecutor(1, "hosted", torch.set_num_threads, (self.threads,))
        self._computed = 0
        chooses = device.torch_device.type != "cpu"
        self._own = self._thread.submit(self._own_is_faster).result() if chooses else False
        """Whether one row is multiplied by torch's own kernel."""

    def begin(self, step: Step, experts: list[int], pairs: list[tuple[int, int]], take: Rows) -> "Future[Results]":
        """Start on ``experts`` of a call, each for its range of ``pairs``; ``take`` gives the row of each pair.

        The route of the call has been seen, so its states stay as they are until the next layer is launched. Fetching
        them waits for what was launched before.
        """
        torch = the_torch()
        states, rows = step.states.to("cpu", copy=True), torch.tensor(take.listed)
        return self._thread.submit(self._run, states, rows, experts, pairs)

    def bring(self, step: Step, results: Results) -> None:
        """Copy what was computed to the outputs of its pairs, before what the computing stream does next."""
        for first, end, result in results:
            self._device.compute.launch(step.outputs[first:end].copy_, result)

    def progress(self) -> int:
        """How many experts have been computed so far."""
        return self._computed

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
        the_torch().set_num_threads(self._before)

    def _run(
        self, states: "torch.Tensor", rows: "torch.Tensor", experts: list[int], pairs: list[tuple[int, int]]
    ) -> Results:
        torch = the_torch()
        results: Results = []
        mkldnn = torch.backends.mkldnn
        (was, *_) = mkldnn.set_flags()
        try:
            with torch.no_grad():
                for expert, (first, end) in zip(experts, pairs, strict=True):
                    if self._own:
                        mkldnn.set_flags(end - first > 1)
                    result = feed_forward(states.index_select(0, rows[first:end]), *self._matrices(expert))
                    results.append((first, end, result))
                    self._computed += 1
        finally:
            mkldnn.set_flags(was)
        return results

    def _matrices(self, expert: int) -> "tuple[torch.Tensor, torch.Tensor]":
        return matrices(self._store.expert(expert).view(the_torch().bfloat16), *self._shape)

    def _own_is_faster(self) -> bool:
        """Whether torch's own kernel takes one row through an expert faster than oneDNN's, the best of three each."""
        torch = the_torch()
        row = torch.ones(1, self._shape[0], dtype=torch.bfloat16)
        mkldnn = torch.backends.mkldnn
        (was, *_) = mkldnn.set_flags()
        times: dict[bool, list[int]] = {True: [], False: []}
        try:
            with torch.no_grad():
                for turn in range(4):  # the first one warms up
                    for one_dnn, found in times.items():
                        mkldnn.set_flags(one_dnn)
                        begin = time.perf_counter_ns()
                        feed_forward(row, *self._matrices(2 * turn + one_dnn))
                        found.append(time.perf_counter_ns() - begin)
        finally:
            mkldnn.set_flags(was)
        return min(times[False][1:]) < min(times[True][1:])
