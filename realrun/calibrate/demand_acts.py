"""What handing a copy over and launching take the host's thread: fitted to whole runs, with the simulator as the model.

Experts of random routes are copied on demand into caches of two sizes, from empty on, so that calls find from none to
most of their experts. The more a call lacks, the more the host hands over and launches while it copies: what a step
takes, and what of it is no wait for a copy, tell the two times apart. Those are taken whose simulated runs miss both
least, in least squares of relative errors. No trace is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import median

import numpy as np

from realrun.calibrate.loop_times import MOST_BYTES, executed, experts_that_fit, random_scene, shrunk
from realrun.calibrate.machine import Machine
from realrun.engine.experts import expert_size
from realrun.engine.replay import device_terms
from realrun.engine.rig import open_rig
from sim.log import Log
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import HostTimes
from sim.plan import Plan
from sim.run.engines import execute as simulate
from sim.run.scene import Scene
from sim.run.terms import settle
from traces.models.spec import ModelSpec
from traces.schema import DECODE

SHARES = (0.25, 0.5)
"""Of all experts that the caches hold, where the device has room."""
STEPS = 14
"""Decoded tokens of a run."""
HANDS_NS = (0, 1_000, 4_000, 10_000, 20_000, 40_000, 64_000)
LAUNCHES_NS = (0, 4_000, 12_000, 25_000, 50_000)
"""Times that are tried first. More was never seen, even of a loop in Python."""
STARTS = 2
"""Of these as many as miss least are where nearer ones are looked for, by steps so long at first and at last."""
FIRST_STEP_NS, LAST_STEP_NS = 4_000, 500


@dataclass(frozen=True)
class DemandActs:
    """Nanoseconds of handing a copy over and of a launch, lowest and highest of several fits, and what they miss."""

    hand_over_ns: float
    launch_ns: float
    hand_over_spread: tuple[float, float]
    launch_spread: tuple[float, float]
    missed: float
    """The root of the mean square of the relative errors."""


Taken = tuple[np.ndarray, np.ndarray]
"""What each decode step took, and what of it was no wait for a copy, ns (S,)."""


def demand_acts(
    machine: Machine, model: ModelSpec, hardware: Hardware, most_bytes: int = MOST_BYTES, rounds: int = 3
) -> DemandActs:
    """Run and fit; ``hardware`` has the loop's figures. Raises InputError for what the engine or device cannot run."""
    deep = replace(shrunk(model), vocab=model.vocab)
    with open_rig(deep, str(machine.device), shared=2) as rig:
        most = experts_that_fit(deep, most_bytes, rig.device.free_bytes())
        each = [min(most, max(deep.top_k, round(share * deep.experts))) for share in SHARES]
        slots = [there * deep.routed_layers for there in dict.fromkeys(each)]
        size = expert_size(deep)
        here = [random_scene(deep, hardware, STEPS, deep.experts, count * size, prompt=1) for count in slots]
        runs = [[taken(executed(one, Plan(), rig).log, one) for one in here] for _ in range(rounds)]
    simulated = simulations(here)
    return summed([fitted(measured, simulated) for measured in runs])


def taken(log: Log, here: Scene) -> Taken:
    """Of the decode steps of a run of either clock."""
    steps = here.work.schedule.phase == DECODE
    took = np.diff(log.finish, prepend=0)
    stalls = (log.stall_demand + log.stall_late).reshape(-1, here.work.n_layers).sum(1)
    return took[steps], (took - stalls)[steps]


def simulations(scenes: Sequence[Scene]) -> Callable[[int, int], list[Taken]]:
    """The same runs simulated with a host that takes so many ns to hand over and to launch."""
    prepared = [(here, device_terms(settle(here.work, Plan(), here.budget), here.work)) for here in scenes]

    @cache
    def run(hand_over_ns: int, launch_ns: int) -> list[Taken]:
        times = HostTimes(hand_over_ns=hand_over_ns, launch_ns=launch_ns)
        return [
            taken(simulate(replace(here.work, host_thread=times), Plan(), terms).log, here) for here, terms in prepared
        ]

    return run


def fitted(measured: Sequence[Taken], run: Callable[[int, int], list[Taken]]) -> tuple[int, int, float]:
    """The two times, in ns, whose simulated runs miss ``measured`` least, and by how much: on ever finer grids.

    A step's errors are relative, and the median step counts for its run: a host that is shared has slow moments.
    """

    def miss(pair: tuple[int, int]) -> float:
        errors = [
            float(np.median(ours / theirs)) - 1
            for found, seen in zip(run(*pair), measured, strict=True)
            for ours, theirs in zip(found, seen, strict=True)
        ]
        return float(np.sqrt(np.mean(np.square(errors))))

    found = [_nearest(start, miss) for start in sorted(product(HANDS_NS, LAUNCHES_NS), key=miss)[:STARTS]]
    best = min(found, key=miss)
    return *best, miss(best)


def _nearest(best: tuple[int, int], miss: Callable[[tuple[int, int]], float]) -> tuple[int, int]:
    """From a pair of times on to one around which none misses less, by ever shorter steps."""
    off = FIRST_STEP_NS
    while off >= LAST_STEP_NS:
        hands, launches = ([max(0, at + by * off) for by in (-1, 0, 1)] for at in best)
        near = min(product(hands, launches), key=miss)
        best, off = (near, off) if miss(near) < miss(best) else (best, off // 2)
    return best


def summed(fits: Sequence[tuple[int, int, float]]) -> DemandActs:
    """The medians of several fits."""
    hands, launches, misses = zip(*fits, strict=True)
    return DemandActs(
        median(hands), median(launches), (min(hands), max(hands)), (min(launches), max(launches)), median(misses)
    )
