"""Experts on the host: what one takes for one row, with the link idle and while copies cross it.

As in a run, `realrun.engine.host_experts.HostedExperts` computes a token's experts where they lie in pinned memory,
while the thread that looks after the device looks again and again. More experts are used in turn than any cache of the
host holds: large ones and small ones, so that what each takes beside its bytes can be told.
"""

import time
from dataclasses import dataclass

from realrun.calibrate.copies import Traffic
from realrun.calibrate.machine import Machine
from realrun.calibrate.threads import rest
from realrun.calibrate.timing import Timing, bursts
from realrun.device.devices import Device
from realrun.device.host_store import HostStore
from realrun.device.open_device import open_device
from realrun.device.torch_device import the_torch
from realrun.engine.experts import Rows, expert_size
from realrun.engine.host_experts import HostedExperts
from realrun.engine.layers import Step
from realrun.engine.loop import PAUSE_SECONDS, undisturbed
from traces.models.spec import ModelSpec

STORED_BYTES = 2**30
"""Bytes of the experts that are used in turn, about."""


@dataclass(frozen=True)
class HostedTimes:
    """Of an expert of ``size`` bytes for one row."""

    size: int
    at_once: int
    """How many a call had."""
    charged: int
    """How many threads compute in a run."""
    threads: dict[int, dict[bool, Timing]]
    """By that number, those of a run first, then others for comparison; and by whether copies cross the link meanwhile.
    """

    def ns(self, busy: bool) -> float:
        """What one takes in a run."""
        return self.threads[self.charged][busy].ns


@dataclass(frozen=True)
class HostedRates:
    """What experts take on the host: ``call_ns`` a call and ``floor_ns`` each, and so many bytes a nanosecond.

    The bytes are read ``alone``, or beside copies (``shared``).
    """

    call_ns: float
    floor_ns: float
    alone: float
    shared: float

    @staticmethod
    def of(large: HostedTimes, small: HostedTimes, single: HostedTimes) -> "HostedRates":
        """From what was measured of large experts, small ones, and small ones alone in their call.

        The last two tell what a call takes. What is left is a line through both sizes, or one through the large alone
        where the small took longer for it. Beside copies the floor is the same, and the rest is the large one's rate.
        """
        shares = 1 / single.at_once - 1 / small.at_once
        call = max(0.0, (single.ns(False) - small.ns(False)) / shares)
        idle, busy, little = (
            max(1.0, one.ns(copies) - call / one.at_once)
            for one, copies in ((large, False), (large, True), (small, False))
        )
        slope = max(0.0, idle - little) / (large.size - small.size)
        slope = min(slope or idle / large.size, idle / large.size)
        floor = idle - slope * large.size
        return HostedRates(call, floor, 1 / slope, large.size / max(busy - floor, large.size * slope))


def hosted_times(machine: Machine, model: ModelSpec) -> HostedTimes:
    """Of experts of ``model``, ``top_k`` at a time. Raises InputError where memory cannot be pinned."""
    torch = the_torch()
    most = torch.get_num_threads()
    counts = dict.fromkeys(n for n in (most, most - 1, most - 2, most * 3 // 4, most // 2) if n > 0)
    samples: dict[int, dict[bool, list[float]]] = {threads: {False: [], True: []} for threads in counts}
    with open_device(str(machine.device)) as device:
        size, top_k = expert_size(model), model.top_k
        stored = -(-min(STORED_BYTES, 128 * size) // (size * top_k)) * top_k
        store = HostStore(device, stored, size, scale=model.hidden**-0.5)
        try:
            with device.running(), undisturbed():
                step = Step(model, 1, model.top_k, device)
                device.compute.launch(step.states.normal_)
                device.synchronize()
                for threads, found in [*samples.items()] * 2:  # later again: a shared host has slow seconds
                    hosted = HostedExperts(device, store, model, threads)
                    _time(machine, device, hosted, step, stored, found)
                    hosted.close()
        finally:
            device.synchronize()
            store.close()
    times = {threads: {busy: Timing.of(ns) for busy, ns in found.items()} for threads, found in samples.items()}
    return HostedTimes(store.size, model.top_k, most, times)


def _time(
    machine: Machine, device: Device, hosted: HostedExperts, step: Step, stored: int, samples: dict[bool, list[float]]
) -> None:  # fmt: skip
    """Add what an expert takes, by whether copies cross the link, to ``samples``."""
    traffic = Traffic(machine, device, 32 * 2**20 if machine.cuda else 2**16)
    calls = [list(range(first, first + step.top_k)) for first in range(0, stored, step.top_k)]
    turns = 0
    rest()
    for runs in bursts(machine.repeats):
        for busy, found in samples.items():
            for run in range(1 + runs):  # the first one warms up
                experts, turns = calls[turns % len(calls)], turns + 1
                begin = time.perf_counter_ns()
                work = hosted.begin(step, experts, [(i, i + 1) for i in range(len(experts))], Rows([0] * len(experts)))
                while not work.done():
                    if busy:
                        traffic.keep()
                    device.breathe()
                    time.sleep(PAUSE_SECONDS)
                hosted.bring(step, work.result())
                if run:
                    found.append((time.perf_counter_ns() - begin) / len(experts))
            device.synchronize()
