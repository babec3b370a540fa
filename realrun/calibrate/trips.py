"""What a prediction on the GPU costs a run: from the launch until the host has seen the answer.

What is launched is what a run launches (`realrun.engine.predicting.Predictions`), and the host looks for the answer as
a run does. That takes longer than the kernel by the launch, the copy of the answer and the event, and longer still
while copies to the device go on. Before each the device is idle, as it is when a route is known, and has read so much
else that no table is found in its cache, as experts do it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from realrun.calibrate.copies import Traffic
from realrun.calibrate.machine import L2_BYTES, Machine
from realrun.calibrate.timing import Key, Timing, bursts
from realrun.device.devices import Device, Event
from realrun.device.open_device import open_device
from realrun.engine.layers import feed_forward
from realrun.engine.loop import undisturbed
from realrun.engine.predicting import Predictions
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts

Dimensions = tuple[int, ...]
"""Of a table (entries, dimensions) or of a net (input, hidden layer, output)."""

Begin = Callable[[], Event]
"""Launches something whose end is the event, with the answer in host memory."""

LEAD_IN = 2
"""Trips of each burst that do not count."""


def trips(
    machine: Machine, hardware: Hardware, tables: Iterable[tuple[int, int]], nets: Iterable[tuple[int, int, int]]
) -> dict[tuple[Dimensions, bool], Timing]:
    """Of searches and of nets on one row, by their dimensions and whether the link is busy."""
    with open_device(str(machine.device)) as device, device.running(), undisturbed():
        nets_of = {net: _net(machine, device, *net) for net in nets}
        return _times(machine, device, _searches(device, hardware, tables) | nets_of)


def _searches(device: Device, hardware: Hardware, tables: Iterable[tuple[int, int]]) -> dict[Dimensions, Begin]:
    """The start of each search, by predictions that take an entry a nanosecond, so that these say how many to read."""
    found: dict[Dimensions, Begin] = {}
    by_dims: dict[int, list[int]] = {}
    for entries, dims in tables:
        by_dims.setdefault(dims, []).append(entries)
    for dims, sizes in by_dims.items():
        predictions = Predictions(device, entry_a_nanosecond(dims), hardware, dims)
        predictions.prepare(sizes)
        found |= {(entries, dims): partial(predictions.begin, entries, critical=True) for entries in sizes}
    return found


def entry_a_nanosecond(dims: int) -> PredictionCosts:
    """Predictors whose search of tables of ``dims`` numbers takes a nanosecond for each entry and nothing else."""
    nothing = {"search_us": 0, "iteration_us": 0, "network_us": 0}
    return PredictionCosts.model_validate(
        {"name": "an entry a nanosecond", "where": "gpu", "element_bytes": 2, "gbps": 2 * dims, **nothing}
    )


def _net(machine: Machine, device: Device, inner: int, hidden: int, out: int) -> Begin:
    """The start of a two-layer net on one row, a CUDA graph as a fixed shape allows."""
    torch, compute = machine.torch, device.compute
    row, first, second = machine.random(1, inner), machine.random(hidden, inner), machine.random(out, hidden)
    result, answer = machine.random(1, out), machine.host(2 * out, True).view(torch.bfloat16)[None]

    ready = device.graph(lambda: result.copy_(feed_forward(row, first, second)))

    def begin(_weights: tuple[Any, ...] = (row, first, second)) -> Event:
        compute.launch(ready)  # a graph knows addresses alone: what lies there must live as long
        compute.launch(answer.copy_, result, True)
        return compute.record()

    return begin


def _times(machine: Machine, device: Device, begins: Mapping[Key, Begin]) -> dict[tuple[Key, bool], Timing]:
    """Of each trip, and of each with the link kept busy, in bursts."""
    torch = machine.torch
    cache, size = (L2_BYTES, 32 * 2**20) if machine.cuda else (2**16, 2**16)
    others, ones = machine.random(cache // 2 // 4096, 4096), machine.random(4096)
    read = partial(torch.mv, others, ones, out=torch.mv(others, ones))
    traffic = Traffic(machine, device, size)
    samples: dict[tuple[Key, bool], list[float]] = {(key, busy): [] for busy in (False, True) for key in begins}
    for runs in bursts(machine.repeats):
        for (key, busy), found in samples.items():
            for run in range(LEAD_IN + runs):
                device.compute.launch(read)
                _await(device, device.compute.record())
                if busy:
                    traffic.keep()
                begun = time.perf_counter_ns()
                _await(device, begins[key]())
                if run >= LEAD_IN:
                    found.append(time.perf_counter_ns() - begun)
        device.synchronize()  # the link is idle again
    return {key: Timing.of(found) for key, found in samples.items()}


def _await(device: Device, event: Event) -> None:
    """Look again and again, as a run does."""
    while not event.query():
        device.breathe()
