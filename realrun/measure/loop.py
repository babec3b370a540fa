"""The decode loop's own time a layer: what the engine of real runs takes beyond its kernels, every expert resident.

A few layers of a model's size, experts at random, replayed by the engine itself. What is left of the run after the
kernels (the host's wait for the router's answer, its look-up, its launches) is what the simulator charges a layer
as ``route_wait_us``.
"""

from dataclasses import dataclass, replace

import numpy as np

from realrun.measure.machine import Machine
from realrun.replay import open_rig, run
from sim.bounds import bounds
from sim.hardware import Hardware
from sim.metrics import Report
from sim.model import ModelSpec
from sim.plan import Plan
from sim.replay import Scene
from sim.software import Software
from sim.workload import batched, workload
from traces.trace import DECODE, PREFILL, Trace


@dataclass(frozen=True)
class Loop:
    """Microseconds a routed layer, and the report that they are from."""

    overhead_us: float
    report: Report


def loop_overhead(machine: Machine, model: ModelSpec, hardware: Hardware, layers: int = 8, steps: int = 64) -> Loop:
    """Decode ``steps`` tokens through ``layers`` layers of ``model`` with every expert resident.

    Host memory holds two experts that stand for all. Raises InputError if the experts do not fit the device.
    """
    few = shrunk(model, layers)
    here = random_scene(few, hardware, steps)
    with open_rig(few, str(machine.device), shared=2) as rig:
        report = run(here, Plan(everything_resident=True), rig, policy="all-in-gpu")
    calls = report.decode.tokens * layers
    return Loop(max(0.0, report.decode.time_ms["other"] * 1e3 / calls), report)


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


def random_scene(model: ModelSpec, hardware: Hardware, steps: int, seed: int = 0) -> Scene:
    """One sequence: a prompt of 4 tokens, then ``steps`` decode steps, experts drawn at random."""
    draw = np.random.default_rng(seed)
    rows, shape = 4 + steps, (4 + steps, model.routed_layers, model.experts)
    routes = draw.random(shape).argsort(2)[:, :, : model.top_k]
    trace = Trace(
        meta={"schema": 1, "model": {"name": model.name, "experts": model.experts, "top_k": model.top_k}},
        layers=np.array(model.moe_layers, np.int32),
        experts=routes.astype(np.int16),
        token=np.full(rows, -1, np.int32),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.where(np.arange(rows) < 4, PREFILL, DECODE).astype(np.uint8),
        domain=np.array(["random"]),
        split=np.array(["eval"]),
        sequence_id=np.array(["random"]),
    )
    budget = model.all_expert_bytes
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
