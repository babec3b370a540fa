"""Which engine executes a plan. All give the same integers; they differ in speed and in what can watch them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ground.errors import InputError
from sim.compiled.availability import SHORT, cannot_keep_code
from sim.compiled.engine import declined, run_compiled
from sim.log import Log
from sim.plan import Plan
from sim.run.observer import Observer
from sim.run.simpy_engine import Run
from sim.run.terms import RunTerms
from sim.schedules.pipeline import without_ahead
from sim.workload import Workload

Engine = Literal["auto", "simpy", "compiled"]


@dataclass(frozen=True)
class Execution:
    """A run that is over: its log, the engine that executed it, and what a person should know of that choice."""

    log: Log
    engine: Literal["simpy", "compiled"]
    notes: tuple[str, ...] = ()


def execute(
    work: Workload, plan: Plan, terms: RunTerms, *, engine: Engine = "auto", observer: Observer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Execution:  # fmt: skip
    """Run ``work`` under ``plan`` on these terms (``sim.run.terms.settle``).

    ``auto`` takes the compiled engine wherever that is possible and pays; a run that is watched is SimPy's.
    Raises InputError as both engines do, if ``engine`` is none of these, and if it is compiled and that cannot be.
    """
    if engine not in get_args(Engine):
        raise InputError(f"engine: {engine!r}; expected one of {', '.join(get_args(Engine))}")
    if terms.preparation is not None:
        plan = without_ahead(plan, work.n_layers)
    watched = observer is not None
    notes: tuple[str, ...] = ()
    if engine == "compiled" and watched:
        raise InputError("engine compiled: a run that is watched, as for a timeline, needs engine simpy")
    if engine == "auto" and not watched and len(work.expert) >= SHORT:
        reason = declined(work, plan) or cannot_keep_code()
        notes = (f"run on the SimPy engine: {reason}",) if reason else ()
        engine = "simpy" if reason else "compiled"
    if engine == "compiled":
        log = run_compiled(work, plan, terms)
        if progress:
            progress(work.schedule.n_steps)
        return Execution(log, "compiled")
    return Execution(Run(work, plan, terms, observer=observer, progress=progress).log(), "simpy", notes)
