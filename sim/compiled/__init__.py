"""The compiled engine: the same integers as ``sim.engine``, hundreds of times as fast.

It executes the same workloads and plans and leaves the same log; a timeline, and a policy with an eviction rule that is
only Python, are the reference's alone. numba is imported when a run first asks for this engine.
"""

from importlib.util import find_spec

import numpy as np

from sim.engine import SimulationError, split_slots
from sim.eviction import foresees
from sim.log import Counters, Log
from sim.plan import Discipline, Plan
from sim.workload import Workload
from traces.errors import InputError

__all__ = ["declined", "run_compiled"]


def declined(work: Workload, plan: Plan) -> str | None:
    """Why this run cannot be compiled, in a line; None if it can."""
    if not isinstance(plan.eviction, str):
        return f"the eviction rule {plan.eviction.__name__} is only Python"
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'moe-replay[fast]')"
    # Products of bytes and nanoseconds must fit 64 bits; Python's own integers have no such limit.
    if max(work.expert_bytes) * max(work.copy_ns) >= 2**63 or max(work.copy_ns) * work.chunks >= 2**63:
        return "experts this large over a link this slow overflow 64-bit integers"
    return None


def run_compiled(
    work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None, chunks: int | None = None
) -> Log:
    """Run ``work`` under ``plan`` with ``budget`` bytes of GPU memory; as ``sim.engine.Run(...).log()``.

    Raises InputError as the reference does, and if ``declined`` has a reason.
    """
    reason = declined(work, plan)
    if reason:
        raise InputError(f"engine compiled: {reason}")
    from sim.compiled.gpu import run
    from sim.compiled.machine import build

    chunks = next(given for given in (chunks, plan.chunks or None, work.chunks) if given is not None)
    every = sum(work.expert_bytes) * work.n_experts
    budget = every if plan.everything_resident else budget - plan.gpu_bytes
    if plan.requests is not None:
        plan.requests.check(work.n_layers, work.n_experts, work.schedule.n_steps)
    slots = split_slots(budget, work.expert_bytes, plan.per_layer)
    machine = build(work, plan, slots, discipline or plan.discipline, chunks)
    if not run(machine.record):
        raise SimulationError(f"deadlock at {machine.record['now']} ns: the GPU waits and nothing moves")
    return machine.log()
