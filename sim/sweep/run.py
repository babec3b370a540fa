"""A sweep carried out: what is still to be run is run, each row goes to the log, and the table is made of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ground.errors import InputError
from sim.sweep.design import Design
from sim.sweep.estimate import seconds
from sim.sweep.identity import identity, refused_identity
from sim.sweep.log import LOG, Log, kept
from sim.sweep.row import Row
from sim.sweep.tasks import Runner, Task, batches


def identified(designs: Iterable[Design]) -> Iterator[tuple[str, Design, Row | None]]:
    """Each design with its identity, and a row if it is plain at once that it cannot be run."""
    for design in designs:
        try:
            yield identity(design), design, None
        except (InputError, OSError) as wrong:
            reason = " ".join(str(wrong).split())
            key = refused_identity(design, reason)
            yield key, design, Row(key, "refused", reason)


def carry_out(
    designs: Iterable[Design], log: Log, runner: Runner, progress: Callable[[int, int], None] = lambda done, all: None
) -> list[tuple[str, Design]]:
    """Run the designs that the log has no row for, or one that failed; return all of them with their identities.

    ``progress`` is told how many of those that are to be run are done, and how many these are. Raises OSError if the
    log cannot be written; all rows before that stay.
    """
    every: list[tuple[str, Design]] = []
    todo: dict[str, Task] = {}
    for key, design, refusal in identified(designs):
        every.append((key, design))
        if key in log.rows and log.rows[key].settled:
            continue
        if refusal is None:
            todo.setdefault(key, Task(key, design))
        else:
            log.append(refusal)
    if todo:
        for count, row in enumerate(runner(batches(todo.values())), 1):
            log.append(row)
            progress(count, len(todo))
    return every


@dataclass(frozen=True)
class Outlook:
    """What a sweep would do: how many designs it has, how many are to be run, and about how long that takes."""

    designs: int
    to_run: int
    cannot: int
    seconds: float


def outlook(designs: Iterable[Design], folder: Path | None, workers: int) -> Outlook:
    """Look ahead; ``folder`` may hold rows of earlier runs. Runs a few designs, writes nothing."""
    there = kept(folder)[0] if folder is not None and (folder / LOG).exists() else {}
    count = cannot = 0
    todo: dict[str, Task] = {}
    for key, design, refusal in identified(designs):
        count += 1
        cannot += refusal is not None
        if refusal is None and not (key in there and there[key].settled):
            todo.setdefault(key, Task(key, design))
    return Outlook(count, len(todo), cannot, seconds(batches(todo.values()), workers))
