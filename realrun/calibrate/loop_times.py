"""The decode loop's own time a layer: what a real run takes beyond its kernels and the copies that it waits for.

A model of full depth, its experts drawn at random, run by the engine itself: with every expert that is needed resident,
with every expert copied on demand, and with every expert resident while experts that nobody needs are prefetched as
fast as the link can. What is left of a step beyond the kernels as they are charged, and beyond the waits for copies
that were measured in it, is the loop: the host sees the router's answer, looks up, launches. Each figure of
`LoopFigures` comes of the three runs:

- ``route_wait_us``: what the first two have in common;
- ``launch_us``: what the resident run takes more;
- ``awaited_extra_us``: by how much each expert that was waited for took longer than it is charged;
- ``beside_copy_us``: what a layer takes more while copies go on;
- ``handover_us``: by how much longer the second run waited for each copy than the link's own times have it.
"""

from dataclasses import dataclass, replace
from math import ceil
from statistics import median

import numpy as np

from ground.errors import InputError
from realrun.calibrate.machine import Machine
from realrun.engine.experts import expert_size
from realrun.engine.replay import device_terms, execute
from realrun.engine.replay_loop import Outcome
from realrun.engine.rig import Rig, open_rig
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import LoopFigures
from sim.machine.prediction_costs import PredictionCosts
from sim.plan import Plan, Requests, Values
from sim.run.engines import execute as simulate
from sim.run.scene import Scene
from sim.run.terms import settle
from sim.workload import Workload, batched, workload
from traces.models.spec import ModelSpec
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

MOST_BYTES = 28 * 2**30
"""Of experts that are resident at once: room for the 8 of a token in each of the 94 layers of Qwen3-235B (26.4 GiB),
the most that a built-in model needs whose loop can be timed."""
SPARE_BYTES = 2**30
"""Of the device, for graphs, kernels' workspaces and tables."""
SPARE_SLOTS = 8
"""For prefetches, beside the experts that are needed: about twice as many as are under way or wait for their call."""
LOAD = 1.15
"""Bytes that are asked for, as a share of what the link moves meanwhile: it must never be idle."""
LOOP_NS = 80_000
"""About what a layer takes beyond its kernels, with copies beside it: for how much is asked for."""
CALLS = 1024
"""Layer calls of a run, about: deep models decode fewer tokens."""
COPIES_AHEAD = 3
"""How many copies' time before its call an expert is asked for."""


@dataclass(frozen=True)
class LoopTimes:
    """Microseconds a routed layer: what is left of the three runs, and what of it is charged."""

    resident_us: float
    """Beyond kernels, every expert there."""
    waiting_us: float
    """Beyond kernels and waits for copies, every expert on its way."""
    awaited_extra_us: float
    """By how much an expert that was waited for took longer than charged."""
    handover_us: float
    """By how much longer than charged the waits were, an expert."""
    prefetching_us: float
    """Beyond kernels, every expert there, while copies go on."""
    link_busy: float
    """The share of that run's decode in which they did."""
    top_k: int

    def or_quieter(self, other: "LoopTimes") -> "LoopTimes":
        """Of each run the one that took less, this one's or that of ``other``: whatever disturbs only ever adds."""
        fetched = min(self, other, key=lambda loop: loop.waiting_us + loop.top_k * loop.handover_us)
        loaded = min(self, other, key=lambda loop: loop.prefetching_us)
        resident = min(self.resident_us, other.resident_us)
        return replace(fetched, resident_us=resident, prefetching_us=loaded.prefetching_us, link_busy=loaded.link_busy)

    @property
    def route_wait_us(self) -> float:
        """Of any layer; experts that ran alone are charged for that by themselves."""
        return min(self.resident_us, max(0.0, self.waiting_us - self.top_k * self.awaited_extra_us))

    @property
    def launch_us(self) -> float:
        """Of a layer whose experts are there."""
        return self.resident_us - self.route_wait_us

    @property
    def beside_copy_us(self) -> float:
        """Of a layer beside which copies go on."""
        return max(0.0, self.prefetching_us - self.resident_us)


def loop_times(
    machine: Machine, model: ModelSpec, hardware: Hardware, calls: int = CALLS, rounds: int = 2,
    most_bytes: int = MOST_BYTES,
) -> LoopTimes:  # fmt: skip
    """Decode tokens in the three ways, with as many experts of each layer of ``model`` as ``most_bytes`` hold.

    On a device with less free memory, as many as fit beside everything else of the model. ``hardware`` says what
    kernels are charged; what it says of the loop is left out. Host memory holds two experts that stand for all. Of
    ``rounds`` the one that took least counts: whatever disturbs only ever adds. Raises InputError for experts that the
    engine cannot run or the device cannot hold.
    """
    bare, deep = without_loop(hardware), replace(shrunk(model), vocab=model.vocab)
    size, steps = expert_size(deep), max(3, calls // deep.routed_layers)
    with open_rig(deep, str(machine.device), shared=2) as rig:
        there = experts_that_fit(deep, most_bytes, rig.device.free_bytes())
        slots = there * deep.routed_layers + SPARE_SLOTS
        here = random_scene(deep, bare, steps, there, slots * size)
        stay = staying(here, there)
        loaded = replace(stay, requests=useless(here, there))
        fetched = random_scene(deep, bare, max(2, steps // 8), deep.experts, 2 * deep.top_k * size, prompt=1)
        three = ((here, stay), (here, loaded), (fetched, Plan(keep=False)))
        runs = [[executed(scene, plan, rig) for scene, plan in three] for _ in range(rounds)]
    resident = min(_left_us(outcome, here.work) for outcome, _, _ in runs)
    decode = here.work.schedule.phase == DECODE
    prefetching, busy = min(
        (_left_us(outcome, here.work), outcome.link_busy_ns / int(_took(outcome)[decode].sum()))
        for _, outcome, _ in runs
    )
    waiting = min((outcome for _, _, outcome in runs), key=lambda outcome: outcome.log.finish[-1])
    left, extra = _left_us(waiting, fetched.work), _awaited_extra_us(waiting, fetched.work)
    return LoopTimes(resident, left, extra, _handover_us(waiting, fetched, extra), prefetching, busy, deep.top_k)


def experts_that_fit(model: ModelSpec, most_bytes: int, free: int | None) -> int:
    """How many experts of each layer of ``model`` fit ``most_bytes``, and ``free`` bytes beside the rest of it.

    One is left out at least, to be prefetched. Raises InputError if a token's do not fit, or experts are not in bf16.
    """
    size, have = expert_size(model), most_bytes
    if free is not None:
        have = min(have, free - model.resident_bytes - SPARE_BYTES - SPARE_SLOTS * size)
    there = min(model.experts - 1, have // (size * model.routed_layers))
    if there < model.top_k:
        need = model.top_k * model.routed_layers * size
        raise InputError(
            f"{model.top_k} experts of each of {model.routed_layers} layers, {need / 2**30:.1f} GiB, are too much to "
            f"time: {max(0, have) / 2**30:.1f} GiB may be used"
        )
    return there


def staying(here: Scene, there: int) -> Plan:
    """Once they have been there, the first ``there`` experts of each layer stay."""
    work, zero = here.work, np.zeros(1, np.int64)
    worth = np.tile(np.arange(work.n_experts) < there, work.n_layers).astype(np.int64)
    return Plan(eviction="score", values=Values(zero, zero, worth[None]))


def useless(here: Scene, there: int) -> Requests:
    """In decode, requests for the other experts, a little more than the link can move."""
    work, steps = here.work, np.flatnonzero(here.work.schedule.phase == DECODE)
    calls = (steps[:, None] * work.n_layers + np.arange(work.n_layers)).ravel()
    layer_ns = float(work.compute_ns()[steps].sum()) / max(1, len(calls))
    asked = np.floor(np.arange(1, len(calls) + 1) * LOAD * (layer_ns + LOOP_NS) / work.copy_ns[0]).astype(np.int64)
    times = np.diff(asked, prepend=0)
    made = np.repeat(calls, times)
    made = made[made < work.n_calls - 1]
    call = np.minimum(made + max(2, ceil(COPIES_AHEAD * work.copy_ns[0] / layer_ns)), work.n_calls - 1)
    other = there + np.arange(len(made)) % (work.n_experts - there)
    expert = call % work.n_layers * work.n_experts + other
    return Requests.build(made + made // work.n_layers + 1, call, expert, call)


def _left_us(outcome: Outcome, work: Workload) -> float:
    """The median over decode's steps of microseconds a layer beyond kernels and waits."""
    stalls = (outcome.log.stall_demand + outcome.log.stall_late).reshape(-1, work.n_layers).sum(1)
    left = (_took(outcome) - stalls - work.compute_ns())[work.schedule.phase == DECODE] / work.n_layers
    return max(0.0, median(left.tolist()) / 1e3)


def _took(outcome: Outcome) -> np.ndarray:
    """Nanoseconds of each step (S,)."""
    return np.diff(outcome.log.finish, prepend=0)


def _decode_calls(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Decode's calls, and how many experts each needs."""
    calls = np.flatnonzero(np.repeat(work.schedule.phase == DECODE, work.n_layers))
    return calls, np.diff(work.offsets)[calls]


def _awaited_extra_us(outcome: Outcome, work: Workload) -> float:
    """The median over decode's calls of what one expert takes beyond what it is charged."""
    calls, count = _decode_calls(work)
    charged = np.add.reduceat(work.expert_ns, work.offsets[:-1])[calls]
    return max(0.0, float(np.median((outcome.experts_ns[calls] - charged) / count)) / 1e3)


def executed(here: Scene, plan: Plan, rig: Rig, *, keep_outputs: bool = False) -> Outcome:
    """What a plan of no policy's takes on the device; ``keep_outputs`` as in ``RealRun``."""
    terms = device_terms(settle(here.work, plan, here.budget), here.work)
    return execute(here, plan, terms, rig, keep_outputs=keep_outputs)


def _handover_us(outcome: Outcome, here: Scene, awaited_extra_us: float) -> float:
    """The median over decode's calls of how much longer than simulated they waited, an expert."""
    calls, count = _decode_calls(here.work)
    work = replace(here.work, awaited_ns=here.work.expert_ns + round(awaited_extra_us * 1e3))
    plan = Plan(keep=False)
    simulated = simulate(work, plan, settle(work, plan, here.budget)).log
    longer = outcome.log.stall_demand + outcome.log.stall_late - simulated.stall_demand - simulated.stall_late
    return max(0.0, float(np.median(longer[calls] / count)) / 1e3)


def without_loop(hardware: Hardware) -> Hardware:
    """``hardware`` whose loop takes no time."""
    none = dict.fromkeys(LoopFigures.model_fields)
    no_wait = hardware.software.route_wait_us.model_copy(update={"value": 0.0})
    software = hardware.software.model_copy(update={**none, "route_wait_us": no_wait})
    layers = [layer.model_copy(update=none) for layer in hardware.layer]
    return hardware.model_copy(update={"software": software, "layer": layers})


def shrunk(model: ModelSpec, layers: int | None = None) -> ModelSpec:
    """So many routed layers of ``model``, by default all, no dense ones, and a vocabulary of no weight."""
    layers = model.routed_layers if layers is None else layers
    return replace(
        model, name=f"{layers} layers of {model.name}", layers=layers, moe_layers=tuple(range(layers)),
        expert_bytes=model.expert_bytes[:1] * layers, windows=(0,) * layers, vocab=1024, dense_ffn=0, encoder_layers=0,
        other_layers=(),
    )  # fmt: skip


def random_scene(
    model: ModelSpec, hardware: Hardware, steps: int, experts: int, budget: int, seed: int = 0,
    prompt: int | None = None,
) -> Scene:  # fmt: skip
    """One sequence: a prompt that takes each of a layer's first ``experts``, then ``steps`` that draw of them.

    ``budget`` bytes are for experts. A ``prompt`` of fewer rows takes fewer of them.
    """
    draw, top_k, layers = np.random.default_rng(seed), model.top_k, model.routed_layers
    prompt = prompt or ceil(experts / top_k)
    rows = prompt + steps
    all_of_them = np.arange(prompt * top_k).reshape(prompt, 1, top_k) % experts
    drawn = draw.random((steps, layers, experts)).argsort(2)[:, :, :top_k]
    trace = Trace(
        meta={"schema": 1, "model": {"name": model.name, "experts": model.experts, "top_k": top_k}},
        layers=np.array(model.moe_layers, np.int32),
        experts=np.concatenate([np.repeat(all_of_them, layers, axis=1), drawn]).astype(np.int16),
        token=np.full(rows, -1, np.int32),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.where(np.arange(rows) < prompt, PREFILL, DECODE).astype(np.uint8),
        domain=np.array(["random"]),
        split=np.array(["eval"]),
        sequence_id=np.array(["random"]),
    )
    work = workload(trace, model, hardware, batched(trace, 1))
    return Scene(
        trace=trace, profile=(), model=model, hardware=hardware, software=PredictionCosts.load("fast"),
        budget=budget, batch=1, split="eval", seed=seed, work=work,
    )  # fmt: skip
