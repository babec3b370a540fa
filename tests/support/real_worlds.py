"""Small worlds whose experts are real matrices, and runs of them on the CPU as a device."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import strategies as st

from realrun.device.devices import Device
from realrun.device.host_store import HostStore
from realrun.device.open_device import open_device
from realrun.engine.compiled_run import CompiledRun
from realrun.engine.experts import expert_size
from realrun.engine.layers import Layers
from realrun.engine.predicting import Predictions
from realrun.engine.replay_loop import Outcome, RealRun
from realrun.engine.rig import Rig
from sim.plan import Plan
from sim.run.terms import settle
from sim.workload import batched, workload
from tests.support.strategies import make_trace, traces
from tests.support.worlds import World, arbitrary_plan, toy_machine, toy_model
from traces.models.known import model_spec

SIZE = 2 * 3 * 64 * 128
"""Bytes of the toy model's expert in bf16."""
ALL_RESIDENT = Plan(everything_resident=True)
TINY_MOE = dataclasses.replace(
    model_spec("qwen1.5-moe-a2.7b"), hidden=64, expert_ffn=32, shared_ffn=48, dense_ffn=0, vocab=100, layers=3,
    moe_layers=(0, 1, 2), windows=(0, 0, 0), expert_bytes=(64 * 32 * 3 * 2,) * 3,
)  # fmt: skip


def chain(experts: list[int], n_experts: int = 4, **more: Any) -> Any:
    """One layer, one expert a token."""
    return make_trace([[[expert]] for expert in experts], n_experts=n_experts, **more)


def real_world(trace: Any, slots: int, batch: int = 1, **model: Any) -> World:
    """A trace on a toy model of true dimensions, with so many slots."""
    matrices = model.get("expert_matrices", 3)
    size = SIZE * matrices // 3
    spec = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (size,) * trace.n_layers, **model)
    machine = toy_machine()
    work = workload(trace, spec, machine, batched(trace, batch))
    return World(trace, spec, machine, batch, work, slots * size)


@st.composite
def real_worlds(draw: st.DrawFn, *, prefill: bool | None = None, ragged: bool | None = None) -> World:
    """Random ones, of up to 9 experts a layer."""
    drawn = traces(max_layers=3, max_rows=4, max_sequences=3, prefill=prefill, ragged=ragged)
    trace = draw(drawn.filter(lambda trace: trace.n_experts <= 9))
    model: dict[str, Any] = {"shared_ffn": draw(st.sampled_from([0, 32]))}
    if draw(st.booleans()):
        model["expert_matrices"] = 2
    return real_world(trace, draw(st.integers(1, 12)), draw(st.integers(1, 3)), **model)


@st.composite
def real_plans(draw: st.DrawFn) -> tuple[World, Plan]:
    """A world and a plan that asks for anything that may be asked for."""
    world = draw(real_worlds())
    plan = arbitrary_plan(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), world, draw(st.integers(0, 30)))
    if not world.fits(plan):
        plan = dataclasses.replace(plan, host=None)
    if not world.with_room(plan).fits(plan):
        plan = dataclasses.replace(plan, most_bytes=0)
    return world.with_room(plan), plan


@contextmanager
def staged(world: World) -> Iterator[tuple[Rig, Predictions]]:
    """Experts and layers of a world's model on the CPU."""
    with open_device("cpu") as device:
        yield rig_of(world, device)


def rig_of(world: World, device: Device) -> tuple[Rig, Predictions]:
    """The same on a device that is open."""
    size = expert_size(world.model)
    store = HostStore(device, world.work.n_layers * world.work.n_experts, size)
    layers = Layers(device, world.model, context=8, prompt=8)
    predictions = Predictions(device, world.software, world.hardware, world.model.hidden)
    return Rig(device, store, world.model, layers=layers), predictions


def real_run(
    world: World, plan: Plan, rig: Rig, predictions: Predictions, kind: type[RealRun] = CompiledRun, **options: Any
) -> RealRun:
    """The run of a plan, not begun yet."""
    terms = settle(world.work, plan, world.budget, world.discipline, world.chunks)
    return kind(rig, rig.layers, world.work, world.trace.experts, plan, terms, predictions, **options)


def run_on_cpu(world: World, plan: Plan, **options: Any) -> Outcome:
    """Run a plan from beginning to end."""
    with staged(world) as (rig, predictions):
        return real_run(world, plan, rig, predictions, **options).execute()


KINDS: tuple[type[RealRun], ...] = (CompiledRun, RealRun)
"""The compiled loop, and the one for rules of eviction that are only Python."""


def slots_of(run: RealRun, resident: bool = False) -> dict[int, int]:
    """The slot of each expert that holds one, or that is there."""
    if not isinstance(run, CompiledRun):
        state, slot = np.frombuffer(bytes(run.cache.state), np.uint8), run.cache.slot
    else:
        state, slot = run.link.arrays["slots"]["state"], run.link.arrays["slots"]["place"]
    return {expert: int(slot[expert]) for expert in np.flatnonzero(state > resident).tolist()}


def free_slots(run: RealRun) -> list[int]:
    """The slots that hold no expert."""
    if not isinstance(run, CompiledRun):
        return [slot for pool in run.cache._free for slot in pool]
    count = run.link.arrays["pools"]["n_places"]
    return [int(slot) for places, n in zip(run.link._places, count, strict=True) for slot in places[:n]]
