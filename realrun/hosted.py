"""Experts that run on the host, where their weights lie, for plans that choose so.

The states of a call are fetched to the host, a thread computes its experts one after another as their weights lie in
pinned memory, and their outputs are copied back to the rows of their pairs.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from realrun.device import Device, Event
from realrun.experts import matrices, run_ffn
from realrun.host_store import HostStore
from realrun.layers import Step
from realrun.measure.machine import the_torch
from sim.model import ModelSpec

if TYPE_CHECKING:
    import torch


class HostedExperts:
    """Computes experts on the host for one run; ``close`` ends its thread."""

    def __init__(self, device: Device, store: HostStore, model: ModelSpec) -> None:
        self._device, self._store = device, store
        self._shape = (model.hidden, model.expert_ffn, model.expert_matrices == 3)
        self._thread = ThreadPoolExecutor(1, "hosted")
        self._results: list[tuple[int, int, torch.Tensor]] = []

    def begin(self, step: Step, experts: list[int], pairs: list[tuple[int, int]], take: Any) -> "Future[None]":
        """Start on ``experts`` of a call, each for its range of ``pairs``; ``take`` gives the row of each pair."""
        torch = the_torch()
        states = torch.empty(step.states.shape, dtype=step.states.dtype)
        self._device.compute.launch(states.copy_, step.states)
        fetched = self._device.compute.record()
        self._results.clear()
        return self._thread.submit(self._run, fetched, states, experts, pairs, take)

    def bring(self, step: Step) -> None:
        """Copy what was computed to the outputs of its pairs, before what the computing stream does next."""
        for first, end, result in self._results:
            self._device.compute.launch(step.outputs[first:end].copy_, result)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _run(
        self, fetched: Event, states: "torch.Tensor", experts: list[int], pairs: list[tuple[int, int]], take: Any
    ) -> None:
        torch = the_torch()
        wait: Any = getattr(fetched, "synchronize", None) or getattr(fetched, "wait")  # noqa: B009 (either stream's)
        wait()
        hidden, inner, gated = self._shape
        with torch.no_grad():
            for expert, (first, end) in zip(experts, pairs, strict=True):
                into, out = matrices(self._store.expert(expert).view(torch.bfloat16), hidden, inner, gated)
                rows = torch.as_tensor(take[first:end]).cpu()
                result = torch.empty(end - first, hidden, dtype=torch.bfloat16)
                run_ffn(states.index_select(0, rows), into, out, gated, result)
                self._results.append((first, end, result))
