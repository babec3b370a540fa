"""Runs of a plan with so many bytes of GPU memory, whose terms are settled on the way."""

from typing import Any

from sim.compiled.engine import run_compiled
from sim.log import Log
from sim.plan import Discipline, Plan
from sim.run.engines import Execution, execute
from sim.run.simpy_engine import Run
from sim.run.terms import settle
from sim.workload import Workload


def simpy_run(
    work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None, chunks: int | None = None,
    observer: Any = None,
) -> Run:  # fmt: skip
    """A run of the reference engine, not begun yet."""
    return Run(work, plan, settle(work, plan, budget, discipline, chunks), observer)


def compiled_log(
    work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None, chunks: int | None = None
) -> Log:
    """What the compiled engine leaves."""
    return run_compiled(work, plan, settle(work, plan, budget, discipline, chunks))


def executed(work: Workload, plan: Plan, budget: int, **more: Any) -> Execution:
    """A run of whichever engine; ``more`` as ``execute`` has it."""
    return execute(work, plan, settle(work, plan, budget), **more)
