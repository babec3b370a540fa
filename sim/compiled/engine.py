"""Run a plan on the compiled engine."""

from ground.errors import InputError
from sim.compiled.availability import no_numba
from sim.log import Log
from sim.plan import MOST_CHUNKS, Plan
from sim.run.faults import SimulationError
from sim.run.terms import RunTerms
from sim.workload import Workload


def declined(work: Workload, plan: Plan) -> str | None:
    """Why this run cannot be compiled, in a line; None if it can."""
    if not isinstance(plan.eviction, str):
        return f"the eviction rule {getattr(plan.eviction, '__name__', plan.eviction)} is only Python"
    if reason := no_numba():
        return reason
    from sim.compiled.order import COMPILED

    if plan.eviction not in COMPILED:
        return f"the eviction rule {plan.eviction} is only Python"
    # Products of bytes and nanoseconds must fit 64 bits; Python's own integers have no such limit.
    largest, longest = max(work.expert_bytes), max(work.copy_ns)
    if max(largest, MOST_CHUNKS) * longest >= 2**63:
        return f"experts of {largest} bytes that take {longest} ns to copy overflow 64-bit integers"
    return None


def run_compiled(work: Workload, plan: Plan, terms: RunTerms) -> Log:
    """Run ``work`` under ``plan`` on these terms (``sim.run.terms.settle``).

    Leaves the log that ``sim.run.simpy_engine.Run(...).log()`` does.
    Raises InputError as the reference does, and if ``declined`` has a reason.
    """
    reason = declined(work, plan)
    if reason:
        raise InputError(f"engine compiled: {reason}")
    from sim.compiled.gpu import run
    from sim.compiled.machine import build

    machine = build(work, plan, terms)
    if not run(machine.record):
        raise SimulationError(f"deadlock at {machine.record['now']} ns: the GPU waits and nothing moves")
    return machine.log()
