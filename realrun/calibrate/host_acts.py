"""What the host's thread takes for a request: fitted to whole runs of the engine, by least squares.

A model of full depth whose experts, drawn at random, stay resident. As each token begins, while the GPU has nothing to
do, so many requests are made for experts that are there and so many for others; from token to token the numbers
differ. What a token takes beyond its kernels and waits then rises with both: that is the time of a request that issues
no copy, and of one that does. No trace is used, so none is spoiled for validation.

What the host does on demand is fitted by ``realrun.calibrate.demand_acts``. Looking up cannot be told from what every
layer takes: ``route_wait_us`` and ``launch_us`` hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np

from ground.errors import InputError
from realrun.calibrate.loop_times import (
    SPARE_SLOTS,
    executed,
    experts_that_fit,
    random_scene,
    shrunk,
    staying,
    without_loop,
)
from realrun.calibrate.machine import Machine
from realrun.engine.experts import expert_size
from realrun.engine.replay_loop import Outcome
from realrun.engine.rig import open_rig
from sim.machine.hardware import Hardware
from sim.plan import Requests
from sim.run.scene import Scene
from traces.models.spec import ModelSpec
from traces.schema import DECODE

MOST_REQUESTS = 4000
"""Of either kind as one token begins: moe-infinity makes 5,235 on Qwen3-30B-A3B."""
LEAST_REQUESTS = 1000
"""With fewer, what they take is less than what tokens differ by anyway."""
SHARES_DROPPED = (0.0, 0.5, 1.0)
SHARES_ISSUED = (0.4, 0.7, 1.0)
"""Of the most: never so few that the link rests, since a copy beside a layer takes time of its own."""
TURNS = 3
"""Tokens of a run for each pair of numbers."""


@dataclass(frozen=True)
class HostActs:
    """Nanoseconds of a request that issues a copy and of one that does not, and lowest and highest of several fits."""

    request_ns: float
    drop_ns: float
    request_spread: tuple[float, float]
    drop_spread: tuple[float, float]
    missed_us: float
    """The median of what the fits miss, a token."""


def host_acts(
    machine: Machine, model: ModelSpec, hardware: Hardware, most_bytes: int = 2**33, rounds: int = 3,
    least: int = LEAST_REQUESTS,
) -> HostActs:  # fmt: skip
    """Time requests in runs of the engine with experts of ``model``, of which ``most_bytes`` are resident.

    ``hardware`` says what kernels are charged. Each of ``rounds`` runs is fitted by itself; the median counts. Raises
    InputError for a model of too few experts, or one that the device cannot hold.
    """
    bare, deep = without_loop(hardware), replace(shrunk(model), vocab=model.vocab)
    with open_rig(deep, str(machine.device), shared=2) as rig:
        there = min(2 * deep.top_k, experts_that_fit(deep, most_bytes, rig.device.free_bytes()))
        others = (deep.experts - there) * deep.routed_layers
        if others < least:
            raise InputError(f"{others} experts that are not resident; expected {least} at least to time requests")
        slots = there * deep.routed_layers + SPARE_SLOTS
        steps = len(SHARES_DROPPED) * len(SHARES_ISSUED) * TURNS
        here = random_scene(deep, bare, steps, there, slots * expert_size(deep))
        dropped, issued = numbers(steps, min(others, MOST_REQUESTS))
        plan = replace(staying(here, there), requests=asked(here, there, dropped, issued))
        fits = [fitted(left_ns(executed(here, plan, rig), here), dropped, issued) for _ in range(rounds)]
    return summed(fits)


def numbers(steps: int, most: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """How many requests of each kind are made as each decode step begins (S,), in an order drawn at random."""
    pairs = [(dropped, issued) for dropped in SHARES_DROPPED for issued in SHARES_ISSUED]
    order = np.random.default_rng(seed).permutation(np.arange(steps) % len(pairs))
    shares = np.array(pairs)[order]
    dropped, issued = np.round(shares * most).astype(np.int64).T
    return dropped, issued


def asked(here: Scene, there: int, dropped: np.ndarray, issued: np.ndarray) -> Requests:
    """As each decode step begins so many requests for residents, in turn again and again, and for distinct others."""
    work = here.work
    layer = np.arange(work.n_layers)[:, None] * work.n_experts
    residents = (layer + np.arange(there)).T.ravel()
    others = (layer + np.arange(there, work.n_experts)).T.ravel()
    wanted = [
        np.concatenate([np.resize(residents, some), others[:more]])
        for some, more in zip(dropped.tolist(), issued.tolist(), strict=True)
    ]
    expert = np.concatenate(wanted)
    steps = np.repeat(np.flatnonzero(work.schedule.phase == DECODE), [len(one) for one in wanted])
    call = steps * work.n_layers + expert // work.n_experts
    return Requests.build(steps * (work.n_layers + 1), call, expert, call)


def left_ns(outcome: Outcome, here: Scene) -> np.ndarray:
    """What each decode step takes beyond kernels and waits (S,)."""
    stalls = (outcome.log.stall_demand + outcome.log.stall_late).reshape(-1, here.work.n_layers).sum(1)
    left = np.diff(outcome.log.finish, prepend=0) - stalls - here.work.compute_ns()
    return np.asarray(left[here.work.schedule.phase == DECODE], float)


def fitted(left: np.ndarray, dropped: np.ndarray, issued: np.ndarray) -> tuple[float, float, float]:
    """Nanoseconds of a request that issues a copy, of one that does not, and the median miss.

    Least squares without negative times, over the medians of the steps with the same numbers, since a host that is
    shared with others has slow moments.
    """
    alike: dict[tuple[int, int], list[float]] = {}
    for key, ns in zip(zip(issued.tolist(), dropped.tolist(), strict=True), left.tolist(), strict=True):
        alike.setdefault(key, []).append(ns)
    acts = np.array([[1.0, *key] for key in alike])
    ns = np.array([median(each) for each in alike.values()])
    scale = acts.max(axis=0, initial=1.0)  # columns of one size: rounding does not matter then
    found = _nonnegative(acts / scale, ns) / scale
    return float(found[1]), float(found[2]), float(np.median(np.abs(acts @ found - ns)))


def _nonnegative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The factors of ``columns`` (N, K), none below 0, whose sum misses ``values`` (N,) least: the best of all subsets.

    Some factors are 0 in the solution, and the others are those of plain least squares over their columns.
    """
    best, least = np.zeros(columns.shape[1]), float(values @ values)
    for size in range(1, len(best) + 1):
        for some in combinations(range(len(best)), size):
            factors, *_ = np.linalg.lstsq(columns[:, some], values, rcond=None)
            missed = float(np.sum((columns[:, some] @ factors - values) ** 2))
            if factors.min() >= 0 and missed < least:
                best, least = np.zeros(len(best)), missed
                best[list(some)] = factors
    return best


def summed(fits: Sequence[tuple[float, float, float]]) -> HostActs:
    """The medians of several fits."""
    requests, drops, misses = zip(*fits, strict=True)
    spreads = (min(requests), max(requests)), (min(drops), max(drops))
    return HostActs(median(requests), median(drops), *spreads, median(misses) / 1e3)
