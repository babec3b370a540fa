"""A whole sweep, from its file to its answer::

    from pathlib import Path
    from sim.sweep.log import Log
    from sim.sweep.spec import load_spec
    from sim.sweep.whole import sweep
    from sim.sweep.workers import local_workers

    with Log(Path("cards")) as log, local_workers(2) as runner:
        found = sweep(load_spec(Path("cards.toml")), log, runner)
    print(found.answer.fastest[0])

Processes are spawned, so a script that does this keeps it below ``if __name__ == "__main__":``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ground.progress import Watch
from sim.sweep import search
from sim.sweep.answer import GOALS, Answer, answer
from sim.sweep.design import Design
from sim.sweep.log import Log
from sim.sweep.run import carry_out
from sim.sweep.sensitivity import Effect, effects, varied
from sim.sweep.spec import MOST_DESIGNS, Spec
from sim.sweep.table import SENSITIVITY, check, records, write_table
from sim.sweep.tasks import Runner


@dataclass(frozen=True)
class Swept:
    """A sweep that is over.

    Attributes:
        every: its designs with their identities, in the order of the table.
        answer: what stands out.
        effects: what other figures of hardware profiles did; None where that was not asked.
    """

    every: list[tuple[str, Design]]
    answer: Answer
    effects: list[Effect] | None = None


def sweep(spec: Spec, log: Log, runner: Runner, *, sensitivity: bool = False) -> Swept:
    """Run what the log has no row for, write the table to its folder, and judge; progress goes to standard error.

    Raises InputError for what is wrong with the sweep file (a design that cannot be run is a row), OSError if the
    folder cannot be written, ModuleNotFoundError where pyarrow, or for a search optuna, is not installed.
    """
    check()
    earlier = {key for key, kept in log.rows.items() if kept.settled}
    with Watch("sweep") as watch:
        every = _run(spec, log, runner, _telling(watch))
    write_table(log, every)
    goals = tuple(GOALS) if len(spec.goals) == 1 else tuple(spec.goals)
    found = answer(records(log, every), spec.limits.columns, goals, earlier)
    return Swept(every, found, _effects(log, every, runner) if sensitivity else None)


def designs(spec: Spec) -> Iterator[Design]:
    """The designs of a grid, or those drawn at random; a search asks for others, about as many. Raises InputError."""
    space = spec.space
    return space.grid(MOST_DESIGNS) if spec.method == "grid" else space.random(spec.designs or 0, spec.seed)


def _run(
    spec: Spec, log: Log, runner: Runner, progress: Callable[[int, int], None]
) -> list[tuple[str, Design]]:  # fmt: skip
    if spec.method != "search":
        return carry_out(designs(spec), log, runner, progress)
    search.check()
    limits = spec.limits.columns
    return search.search(spec.space, spec.goals, limits, spec.designs or 0, spec.seed, log, runner, progress)


def _effects(log: Log, every: list[tuple[str, Design]], runner: Runner) -> list[Effect]:
    """Run the designs with other figures, write their table, and judge what that does to conclusions."""
    others = list(varied(every))
    with Watch("sensitivity") as watch:
        rows = carry_out((one.design for one in others), log, runner, _telling(watch))
    write_table(log, rows, SENSITIVITY)
    return effects(log, every, [(key, one) for (key, _), one in zip(rows, others, strict=True)])


def _telling(watch: Watch) -> Callable[[int, int], None]:
    return lambda done, every: watch.at(done / every, f"{done:,} of {every:,} designs")
