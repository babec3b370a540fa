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
    from sim.compiled.gpu import Calls, Record, run
    from sim.compiled.machine import build

    chunks = next(given for given in (chunks, plan.chunks or None, work.chunks) if given is not None)
    every = sum(work.expert_bytes) * work.n_experts
    budget = every if plan.everything_resident else budget - plan.gpu_bytes
    if plan.requests is not None:
        plan.requests.check(work.n_layers, work.n_experts, work.schedule.n_steps)
    machine = build(work, plan, split_slots(budget, work.expert_bytes, plan.per_layer), discipline or plan.discipline, chunks)
    n_steps, n_calls, n_lookups = work.schedule.n_steps, work.n_calls, len(work.expert)
    following = work.next_call() if foresees(plan.eviction) else np.zeros(0, np.int64)
    columns = (work.offsets, work.expert, work.expert_ns, following,
               work.layer_ns, work.shared_ns, work.head_ns, work.schedule.phase)  # fmt: skip
    calls = Calls(*(np.ascontiguousarray(column, np.int64) for column in columns))
    record = Record(
        finish=np.zeros(n_steps, np.int64),
        found=np.zeros(n_lookups, np.uint8),
        stall_demand=np.zeros(n_calls, np.int64),
        stall_late=np.zeros(n_calls, np.int64),
        predict=np.zeros(n_steps, np.int64),
    )
    if not run(machine.record, calls, record, plan.everything_resident):
        raise SimulationError(f"deadlock at {machine.record['now']} ns: the GPU waits and nothing moves")
    counters = Counters(**{name: machine.counts[name].tolist() for name in machine.counts.dtype.names})
    return Log(**record._asdict(), counters=counters)
