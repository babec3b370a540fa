"""Experts on the host: what one takes for one row, with the link idle and while copies cross it.

As in a run, `realrun.engine.host_experts.HostedExperts` computes a token's experts where they lie in pinned memory,
while the thread that looks after the device looks again and again. More experts are used in turn than any cache of the
host holds.
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

STORED = 4


@dataclass(frozen=True)
class HostedTimes:
    """Of an expert of ``size`` bytes for one row."""

    size: int
    charged: int
    """How many threads compute in a run."""
    threads: dict[int, dict[bool, Timing]]
    """By that number, those of a run first, then others for comparison; and by whether copies cross the link meanwhile.
    """

    def gbps(self, busy: bool) -> float:
        """Bytes a nanosecond in a run."""
        return self.size / self.threads[self.charged][busy].ns


def hosted_times(machine: Machine, model: ModelSpec) -> HostedTimes:
    """Of experts of ``model``, ``top_k`` at a time. Raises InputError where memory cannot be pinned."""
    torch = the_torch()
    most = torch.get_num_threads()
    times: dict[int, dict[bool, Timing]] = {}
    with open_device(str(machine.device)) as device:
        store = HostStore(device, STORED, expert_size(model), scale=model.hidden**-0.5)
        try:
            with device.running(), undisturbed():
                step = Step(model, 1, model.top_k, device)
                device.compute.launch(step.states.normal_)
                device.synchronize()
                for threads in (most, most - 1, most - 2, most * 3 // 4, most // 2):
                    if threads > 0 and threads not in times:
                        hosted = HostedExperts(device, store, model, threads)
                        times[threads] = _times(machine, device, hosted, step)
                        hosted.close()
        finally:
            device.synchronize()
            store.close()
    return HostedTimes(store.size, most, times)


def _times(machine: Machine, device: Device, hosted: HostedExperts, step: Step) -> dict[bool, Timing]:
    traffic = Traffic(machine, device, 32 * 2**20 if machine.cuda else 2**16)
    calls = [list(range(first, first + step.top_k)) for first in range(0, STORED - step.top_k + 1, step.top_k)]
    samples: dict[bool, list[float]] = {False: [], True: []}
    rest()
    for runs in bursts(max(3, machine.repeats // 2)):
        for busy, found in samples.items():
            for run in range(1 + runs):  # the first one warms up
                experts = calls[run % len(calls)]
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
    return {busy: Timing.of(found) for busy, found in samples.items()}
