"""The decode loop's own time a layer: what a real run takes beyond its kernels and the copies that it waits for.

A few layers of a model's size, experts at random, run by the engine itself: with every expert resident, with every
expert copied on demand, and with every expert resident while copies that nobody needs keep the link busy. What is left
of a step beyond the kernels as they are charged, and beyond the waits for copies that were measured in it, is the loop:
the host sees the router's answer, looks up, launches. How fast copies are does not enter it. Four figures come of the
three runs (``sim.hardware.Software``):

- ``route_wait_us``, what both runs have in common;
- ``launch_us``, what the resident run takes more: the GPU idles until experts that are there have been launched, while
  those that are waited for are launched meanwhile;
- ``alone_us``, by how much each expert that was waited for, and so ran alone, took longer than one of several;
- ``copying_us``, what a layer takes more while copies go on: kernels have less of the device's memory, and the host
  hands the copies over.
"""

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from realrun.engine import Outcome
from realrun.experts import expert_size
from realrun.link import CopyLink
from realrun.measure.machine import Machine, the_torch
from realrun.replay import Rig, execute, open_rig
from sim.bounds import bounds
from sim.hardware import Hardware
from sim.link import Transfer
from sim.model import ModelSpec
from sim.plan import Plan
from sim.replay import Scene
from sim.software import Software
from sim.workload import Workload, batched, workload
from traces.errors import InputError
from traces.trace import DECODE, PREFILL, Trace

MOST_BYTES = 24 * 2**30
"""Of experts that are resident at once."""


class Ballast(CopyLink):
    """A link that is never idle while tokens are decoded: where a run leaves it nothing to move, it copies an expert to
    a place of its own, again and again.

    That goes in pieces as a prefetch does, handed over and seen to arrive at the same moments. It takes no slot, nobody
    waits for it, and counters do not know of it. It ends with the run.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._source = self._store.expert(0)
        self.target = the_torch().zeros_like(self._source, device=self._device.torch_device)
        self._load = Transfer(-1, 0, self._store.size, 0, True, 0, DECODE)

    def _advance(self, some: bool = False) -> None:
        super()._advance(some)
        if self.phase == DECODE and self.idle:
            self._running = self._load
            self._fill()
            self._running = None

    def _hand_over(self, transfer: Transfer, end: int) -> None:
        if transfer is not self._load:
            super()._hand_over(transfer, end)
            return
        if not self._flying:
            self._busy_since = time.perf_counter_ns()
        begin, whole = transfer.moved, end == transfer.body
        self._device.copy(self.target, self._source, begin, end)
        # As with a prefetch, whose last event others may wait for.
        event = self._device.copies.record(self._idle_events.pop() if self._idle_events and not whole else None)
        self._flying.append((event, end - begin, None))
        self._handed += end - begin
        transfer.moved = 0 if whole else end


@dataclass(frozen=True)
class Loop:
    """Microseconds a routed layer: what is left of the three runs, and what of it is charged."""

    resident_us: float
    """Beyond kernels, every expert there."""
    waiting_us: float
    """Beyond kernels and waits for copies, every expert on its way."""
    alone_us: float
    """By how much an expert that was waited for took longer than charged."""
    beside_us: float
    """Beyond kernels, every expert there, while copies go on."""
    link_busy: float
    """The share of that run's decode in which they did."""
    top_k: int

    @property
    def route_wait_us(self) -> float:
        """Of any layer; experts that ran alone are charged for that by themselves."""
        return min(self.resident_us, max(0.0, self.waiting_us - self.top_k * self.alone_us))

    @property
    def launch_us(self) -> float:
        """Of a layer whose experts are there."""
        return self.resident_us - self.route_wait_us

    @property
    def copying_us(self) -> float:
        """Of a layer beside which copies go on."""
        return max(0.0, self.beside_us - self.resident_us)


@dataclass(frozen=True)
class _Left:
    """Of a run: microseconds a layer beyond kernels and waits, an expert's beyond what it is charged, and the share of
    decode in which copies were under way.
    """

    layer_us: float
    alone_us: float
    link_busy: float


def loop_times(
    machine: Machine, model: ModelSpec, hardware: Hardware, steps: int = 32, waiting_steps: int = 6,
    most_bytes: int = MOST_BYTES,
) -> Loop:  # fmt: skip
    """Decode tokens through as many layers of ``model`` as ``most_bytes`` hold, in the three ways.

    ``hardware`` says what kernels are charged; what it says of the loop is left out. Host memory holds two experts that
    stand for all. Raises InputError for experts that the engine cannot run or the device cannot hold.
    """
    layers = min(model.routed_layers, most_bytes // (expert_size(model) * model.experts))
    if layers < 1:
        raise InputError(f"{model.name}: {model.experts} experts of {expert_size(model):,} bytes are too much to time")
    few, bare = replace(shrunk(model, layers), vocab=model.vocab), without_loop(hardware)
    with open_rig(few, str(machine.device), shared=2) as rig:
        here, all_there = random_scene(few, bare, steps), Plan(everything_resident=True)
        resident, beside = _left(rig, here, all_there), _left(rig, here, all_there, link=Ballast)
        slots = 2 * few.top_k * expert_size(few)
        waiting = _left(rig, random_scene(few, bare, waiting_steps, slots), Plan(keep=False))
    return Loop(
        resident.layer_us, waiting.layer_us, waiting.alone_us, beside.layer_us, beside.link_busy, few.top_k
    )  # fmt: skip


def _left(rig: Rig, here: Scene, plan: Plan, **options: Any) -> _Left:
    outcome = execute(here, plan, rig, **options)
    work, decode = here.work, here.work.schedule.phase == DECODE
    took = np.diff(outcome.log.finish, prepend=0)
    stalls = (outcome.log.stall_demand + outcome.log.stall_late).reshape(-1, work.n_layers).sum(1)
    left = (took - stalls - work.compute_ns())[decode] / work.n_layers
    return _Left(
        max(0.0, median(left.tolist()) / 1e3),
        max(0.0, _longer_ns(outcome, work, decode) / 1e3),
        outcome.link_busy_ns / int(took[decode].sum()),
    )


def _longer_ns(outcome: Outcome, work: Workload, decode: np.ndarray) -> float:
    """The median over decode's calls of what one expert takes beyond what it is charged."""
    calls = np.flatnonzero(np.repeat(decode, work.n_layers))
    count = np.diff(work.offsets)[calls]
    charged = np.add.reduceat(work.expert_ns, work.offsets[:-1])[calls]
    return float(np.median((outcome.experts_ns[calls] - charged) / count))


def without_loop(hardware: Hardware) -> Hardware:
    """``hardware`` whose loop takes no time."""
    none = {"launch_us": None, "alone_us": None, "copying_us": None}
    no_wait = hardware.software.route_wait_us.model_copy(update={"value": 0.0})
    software = hardware.software.model_copy(update={**none, "route_wait_us": no_wait})
    layers = [layer.model_copy(update={**none, "route_wait_us": None}) for layer in hardware.layer]
    return hardware.model_copy(update={"software": software, "layer": layers})


def shrunk(model: ModelSpec, layers: int) -> ModelSpec:
    """So many routed layers of ``model``, no dense ones, and a vocabulary of no weight."""
    return replace(
        model,
        name=f"{layers} layers of {model.name}",
        layers=layers,
        moe_layers=tuple(range(layers)),
        expert_bytes=model.expert_bytes[:1] * layers,
        windows=(0,) * layers,
        vocab=1024,
        dense_ffn=0,
        encoder_layers=0,
    )


def random_scene(model: ModelSpec, hardware: Hardware, steps: int, budget: int | None = None, seed: int = 0) -> Scene:
    """One sequence: a prompt of one token, then ``steps`` decode steps, experts drawn at random.

    ``budget`` bytes are for experts, by default enough for all.
    """
    draw = np.random.default_rng(seed)
    rows, shape = 1 + steps, (1 + steps, model.routed_layers, model.experts)
    routes = draw.random(shape).argsort(2)[:, :, : model.top_k]
    trace = Trace(
        meta={"schema": 1, "model": {"name": model.name, "experts": model.experts, "top_k": model.top_k}},
        layers=np.array(model.moe_layers, np.int32),
        experts=routes.astype(np.int16),
        token=np.full(rows, -1, np.int32),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.where(np.arange(rows) < 1, PREFILL, DECODE).astype(np.uint8),
        domain=np.array(["random"]),
        split=np.array(["eval"]),
        sequence_id=np.array(["random"]),
    )
    budget = budget or model.all_expert_bytes
    work = workload(trace, model, hardware, batched(trace, 1))
    return Scene(
        trace=trace,
        profile=(),
        model=model,
        hardware=hardware,
        software=Software.load("fast"),
        budget=budget,
        batch=1,
        split="eval",
        seed=seed,
        work=work,
        bound=bounds(work, budget, hardware.link_bytes_per_s),
    )
