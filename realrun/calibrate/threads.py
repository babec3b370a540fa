"""Work of the host's libraries, one library after another, each with a settled number of threads.

Threads that have done their part look for more before they sleep: those of NumPy's BLAS for 0.1 s. If there are as many
as processors, the threads of the library that comes next share processors with them, and a product that waits for the
last of its threads takes a time slice of the operating system, some 8 ms, whatever its size. So each library begins
when this process is at rest. Where others keep processors busy, one thread is quicker than several for the same
reason.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from realrun.calibrate.machine import Machine
from realrun.calibrate.timing import Key, Timing, Work, bursts, host_ns

REST_SECONDS = 0.02
"""Longer than the system takes to count a thread's time: two ticks of its slowest clock."""
IDLE = 0.05
"""Share of one processor that this process takes at most while it is at rest."""


@dataclass(frozen=True)
class Way(Generic[Key]):
    """One library's way of doing something, by size: the same on several inputs, which are used in turn."""

    name: str
    work: Mapping[Key, Work]
    settle: Callable[[], Any] = lambda: None
    """Tells the library how many threads it has."""


def by_threads(library: str, settle: Callable[[int], Any], most: int, work: Mapping[Key, Work]) -> list[Way[Key]]:
    """``work`` of a library that takes ``settle(n)``, with one thread, half of ``most`` and all."""
    counts = sorted({1, max(1, most // 2), most})
    return [Way(f"{library}, threads: {n}", work, partial(settle, n)) for n in counts]


def torch_ways(machine: Machine, work: Mapping[Key, Work]) -> list[Way[Key]]:
    """``work`` of torch's; `host_times` gives torch its threads back."""
    return by_threads("torch", machine.torch.set_num_threads, machine.torch.get_num_threads(), work)


def host_times(machine: Machine, ways: Sequence[Way[Key]]) -> dict[str, dict[Key, Timing]]:
    """Time of each of ``ways`` at each size by the host's clock; all have their turn several times, each by itself."""
    samples: dict[str, dict[Key, list[float]]] = {way.name: {key: [] for key in way.work} for way in ways}
    before = machine.torch.get_num_threads()
    try:
        for runs in bursts(machine.repeats):
            for way in ways:
                rest()
                way.settle()
                for key, inputs in way.work.items():
                    _burst(inputs, samples[way.name][key], runs)
    finally:
        machine.torch.set_num_threads(before)
    return {name: {key: Timing.of(each) for key, each in found.items()} for name, found in samples.items()}


def _burst(inputs: Work, samples: list[float], runs: int) -> None:
    first = len(samples)
    inputs[(first - 1) % len(inputs)]()  # threads wake up; whose input the next runs do not read
    samples += [host_ns(inputs[run % len(inputs)]) for run in range(first, first + runs)]


def rest(most: float = 1.0) -> bool:
    """Wait until no thread of this process is busy, for at most about so many seconds; whether that came to be."""
    for _ in range(round(most / REST_SECONDS)):
        begin, used = time.perf_counter_ns(), time.process_time_ns()
        time.sleep(REST_SECONDS)
        if time.process_time_ns() - used <= IDLE * (time.perf_counter_ns() - begin):
            return True
    return False
