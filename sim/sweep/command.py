"""``python -m sim sweep``: one replay for each of many designs."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.output import show, written
from ground.progress import Watch, say
from ground.text import printable
from ground.whole_number import WholeNumber
from sim.sweep.design import Design
from sim.sweep.space import Space
from sim.sweep.spec import MOST_DESIGNS, Spec, load_spec, with_axes
from sim.sweep.tasks import Runner

if TYPE_CHECKING:
    from sim.sweep.log import Log
    from sim.sweep.sensitivity import Effect

_Json = Annotated[str | None, Help("write the answer as JSON here, - is standard output", allow_leading_hyphen=True)]


def sweep(
    what: Annotated[Path | None, Help("a sweep file, .toml, or the trace to replay, .npz")] = None,
    /,
    *,
    output: Annotated[
        Path | None, Help("the folder of log and table; a sweep that is there goes on", "--output", "-o")
    ] = None,
    vary: Annotated[
        list[str] | None, Help("axes, each field=values: cache=10%:90%:10% policy=lru,domoe batch=1:8:x2")
    ] = None,
    workers: Annotated[WholeNumber | None, Help("processes; default: as many as there are processors")] = None,
    scheduler: Annotated[
        str | None, Help("run on the workers of the dask scheduler at this address instead, tcp://HOST:PORT")
    ] = None,
    draw: Annotated[bool, Help("show the speeds as bars too")] = False,
    sensitivity: Annotated[
        bool, Help("replay again with each figure that hardware profiles assume at both ends of its range")
    ] = False,
    dry_run: Annotated[bool, Help("say how many designs there are and about how long they take; run none")] = False,
    json: _Json = None,
) -> None:
    r"""Replay many designs, each a row of a table: which policy, how many slots, which card.

    A design is one value for each axis. Rows are kept as they come, so a sweep that was interrupted goes on where it
    ended. How sweep files are written: docs/sweep.md. For example:

    ```
    python -m sim sweep traces/mixtral_law.npz -o out \
        --vary cache=10%:90%:10% policy=lru,domoe
    python -m sim sweep analysis/regimes.toml -o regimes --dry-run
    ```
    """
    from sim.sweep.answer import answer, answer_view
    from sim.sweep.draw import drawing
    from sim.sweep.log import Log
    from sim.sweep.sensitivity import effects_json, effects_view
    from sim.sweep.table import CSV, PARQUET, check, records, write_table

    spec = _spec(what, vary or [])
    space = spec.space
    processes = _processors() if workers is None else workers
    if processes < 1:
        raise InputError(f"--workers: {processes}; give at least 1")
    if dry_run:
        return _look_ahead(_with_varied(_designs(spec, space), sensitivity), output, processes, json)
    if output is None:
        raise InputError("-o: expected the folder for log and table")
    keep_apart([what], {"--json": json}, folders={"-o": (output, [PARQUET, CSV])})
    check()
    with Log(output) as log, written(json) as write, _workers(scheduler, processes) as runner:
        if log.torn:
            say(f"{printable(log.path)}: {log.torn} damaged lines set aside; their designs run again")
        every = _carried_out(spec, space, log, runner)
        write_table(log, every)
        found = answer(records(log, every), spec.limits.columns)
        names = [name for axis in space.axes for name in axis.names]
        turning = _sensitivity(log, every, runner) if sensitivity else []
        show(answer_view(found, names, str(spec.limits)), json)
        if draw:
            show(drawing(records(log, every), names), json)
        if sensitivity:
            show(effects_view(turning), json)
        write(found.to_json() | ({"sensitivity": effects_json(turning)} if sensitivity else {}))
    say(f"{printable(output / PARQUET)} and {CSV}: a row a design")
    if failed := found.counts["failed"]:
        raise InputError(f"{failed:,} of {found.designs:,} designs failed; the same command tries them again")


def _designs(spec: Spec, space: Space) -> Iterator[Design]:
    """The designs of a grid, or some drawn at random; a search asks for others, about as many."""
    return space.grid(MOST_DESIGNS) if spec.method == "grid" else space.random(spec.designs or 0, spec.seed)


def _carried_out(spec: Spec, space: Space, log: "Log", runner: Runner) -> list[tuple[str, Design]]:
    """Run the designs of a sweep file, showing progress."""
    from sim.sweep import search
    from sim.sweep.run import carry_out

    if spec.method == "search":
        search.check()
    with Watch("sweep") as watch:
        told = _telling(watch)
        if spec.method == "search":
            limits = spec.limits.columns
            return search.search(space, spec.goals, limits, spec.designs or 0, spec.seed, log, runner, told)
        return carry_out(_designs(spec, space), log, runner, told)


def _sensitivity(log: "Log", every: list[tuple[str, Design]], runner: Runner) -> "list[Effect]":
    """Run the designs with other figures, write their table, and say what became of the sweep's conclusions."""
    from sim.sweep.run import carry_out
    from sim.sweep.sensitivity import effects, varied
    from sim.sweep.table import SENSITIVITY, write_table

    others = list(varied(every))
    with Watch("sensitivity") as watch:
        rows = carry_out((one.design for one in others), log, runner, _telling(watch))
    write_table(log, rows, SENSITIVITY)
    return effects(log, every, [(key, one) for (key, _), one in zip(rows, others, strict=True)])


def _telling(watch: Watch) -> Callable[[int, int], None]:
    return lambda done, every: watch.at(done / every, f"{done:,} of {every:,} designs")


def _with_varied(designs: Iterable[Design], sensitivity: bool) -> Iterator[Design]:
    """The designs, and those of a look at sensitivity after each."""
    from sim.sweep.sensitivity import varied

    for design in designs:
        yield design
        if sensitivity:
            yield from (one.design for one in varied([("", design)]))


def _workers(scheduler: str | None, processes: int) -> AbstractContextManager[Runner]:
    """What runs batches: processes of this machine, or a cluster's."""
    if scheduler is None:
        from sim.sweep.workers import local_workers

        return local_workers(processes)
    from sim.sweep.cluster import cluster_workers

    return cluster_workers(scheduler)


def _look_ahead(designs: Iterable[Design], output: Path | None, processes: int, json: str | None) -> None:
    """Say how many designs there are, and about how long they take."""
    from sim.sweep.estimate import spoken
    from sim.sweep.run import outlook

    keep_apart([], {"--json": json})
    ahead = outlook(designs, output, processes)
    there = ahead.designs - ahead.to_run - ahead.cannot
    takes = f"about {spoken(ahead.seconds)} with {processes} processes"
    parts = [f"{ahead.designs:,} designs: {ahead.to_run:,} to run, {takes}"]
    parts += [f"{there:,} are there already or the same as another"] if there else []
    parts += [f"{ahead.cannot:,} cannot be run"] if ahead.cannot else []
    with written(json) as write:
        write(asdict(ahead) | {"workers": processes})
    show(Text("; ".join(parts)), json)


def _spec(what: Path | None, vary: list[str]) -> Spec:
    """The sweep file, or an empty one for a trace; with the axes that were typed."""
    named = what is not None and what.suffix == ".toml"
    spec = load_spec(what) if named and what is not None else Spec()
    return with_axes(spec, None if named or what is None else str(what), vary)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
