"""The compiled engine: the same integers as ``sim.run.simpy_engine``, hundreds of times as fast.

It executes the same workloads and plans and leaves the same log; a timeline, and a policy with an eviction rule that is
only Python, are the reference's alone. numba is imported when a run first asks for this engine.
"""

from importlib.util import find_spec

from ground.errors import InputError
from sim.compiled.folder import compiler_cache
from sim.log import Log
from sim.plan import MOST_CHUNKS, Discipline, Plan
from sim.run.simpy_engine import SimulationError
from sim.run.terms import settle
from sim.workload import Workload

__all__ = ["SHORT", "available", "cannot_keep_code", "compiles_first", "declined", "run_compiled"]

SHORT = 20_000
"""Look-ups that Python has done before numba is imported."""


def declined(work: Workload, plan: Plan) -> str | None:
    """Why this run cannot be compiled, in a line; None if it can."""
    if not isinstance(plan.eviction, str):
        return f"the eviction rule {getattr(plan.eviction, '__name__', plan.eviction)} is only Python"
    if reason := _no_numba():
        return reason
    # Products of bytes and nanoseconds must fit 64 bits; Python's own integers have no such limit.
    largest, longest = max(work.expert_bytes), max(work.copy_ns)
    if max(largest, MOST_CHUNKS) * longest >= 2**63:
        return f"experts of {largest} bytes that take {longest} ns to copy overflow 64-bit integers"
    return None


def _no_numba() -> str | None:
    """Why nothing can be compiled, in a line; None if it can. Imports numba."""
    if find_spec("numba") is None:
        return "numba is not installed; pip install 'moe-replay[fast]'"
    try:
        from numba import config
    except Exception as wrong:  # built for another numpy, say
        return f"numba cannot be imported: {' '.join(str(wrong).split())}"
    return "numba is told not to compile, by NUMBA_DISABLE_JIT" if vars(config)["DISABLE_JIT"] else None


def cannot_keep_code() -> str | None:
    """Why compiled code would be made anew in every process, in a line; None if there is a folder for it."""
    if compiler_cache() is None:
        return "no folder to keep compiled code in; set MOE_REPLAY_CACHE to one that can be written"
    return None


def available() -> bool:
    """Whether code can be compiled and kept."""
    return _no_numba() is None and compiler_cache() is not None


def compiles_first() -> bool:
    """Whether the first run in this place will take seconds to compile."""
    folder = compiler_cache()
    return available() and folder is not None and not any(folder.rglob("gpu.run*.nbc"))


def run_compiled(
    work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None, chunks: int | None = None
) -> Log:
    """Run ``work`` under ``plan`` with ``budget`` bytes of GPU memory; as ``sim.run.simpy_engine.Run(...).log()``.

    Raises InputError as the reference does, and if ``declined`` has a reason.
    """
    terms = settle(work, plan, budget, discipline, chunks)
    reason = declined(work, plan)
    if reason:
        raise InputError(f"engine compiled: {reason}")
    from sim.compiled.gpu import run
    from sim.compiled.machine import build

    machine = build(work, plan, terms)
    if not run(machine.record):
        raise SimulationError(f"deadlock at {machine.record['now']} ns: the GPU waits and nothing moves")
    return machine.log()
