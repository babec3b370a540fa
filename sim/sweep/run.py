"""A sweep carried out: what is still to be run is run, each row goes to the log, and the table is made of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ground.errors import InputError
from ground.progress import Watch
from sim.sweep.design import Design
from sim.sweep.identity import identity, refused_identity
from sim.sweep.log import Log
from sim.sweep.row import Row
from sim.sweep.tasks import Batch, Task, batches

Runner = Callable[[Sequence[Batch]], Iterator[Row]]
"""Runs batches somewhere and gives the rows as they come, in any order."""


def identified(designs: Iterable[Design]) -> Iterator[tuple[str, Design, Row | None]]:
    """Each design with its identity, and a row if it is plain at once that it cannot be run."""
    for design in designs:
        try:
            yield identity(design), design, None
        except (InputError, OSError) as wrong:
            reason = " ".join(str(wrong).split())
            key = refused_identity(design, reason)
            yield key, design, Row(key, "refused", reason)


def carry_out(designs: Iterable[Design], log: Log, runner: Runner) -> list[tuple[str, Design]]:
    """Run the designs that the log has no row for, or one that failed; return all of them with their identities.

    Raises OSError if the log cannot be written; all rows before that stay.
    """
    every: list[tuple[str, Design]] = []
    todo: dict[str, Task] = {}
    for key, design, refusal in identified(designs):
        every.append((key, design))
        if refusal is None and not done(log, key):
            todo.setdefault(key, Task(key, design))
        elif refusal is not None and key not in log.rows:
            log.append(refusal)
    if todo:
        with Watch("sweep") as watch:
            for count, row in enumerate(runner(batches(todo.values())), 1):
                log.append(row)
                watch.at(count / len(todo), f"{count:,} of {len(todo):,} designs")
    return every


def done(log: Log, key: str) -> bool:
    """Whether the log has what a design gave, once and for all."""
    return key in log.rows and log.rows[key].status != "failed"
