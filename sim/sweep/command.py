"""``python -m sim sweep``: one replay for each of many designs."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.text import Text

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.output import show, written
from ground.progress import say
from ground.text import printable
from ground.whole_number import WholeNumber
from sim.sweep.design import Design
from sim.sweep.spec import Spec, load_spec, with_axes
from sim.sweep.tasks import Runner

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
    from sim.sweep.answer import answer_view
    from sim.sweep.draw import drawing
    from sim.sweep.log import Log
    from sim.sweep.sensitivity import effects_json, effects_view
    from sim.sweep.table import CSV, PARQUET, check, records
    from sim.sweep.whole import designs
    from sim.sweep.whole import sweep as run_sweep

    spec = _spec(what, vary or [])
    names = [name for axis in spec.space.axes for name in axis.names]
    processes = _processors() if workers is None else workers
    if processes < 1:
        raise InputError(f"--workers: {processes}; give at least 1")
    if dry_run:
        return _look_ahead(_with_varied(designs(spec), sensitivity), output, processes, json)
    if output is None:
        raise InputError("-o: expected the folder for log and table")
    _check_output(what, output, json)
    check()
    with Log(output) as log, written(json) as write, _workers(scheduler, processes) as runner:
        if log.torn:
            lines = "1 damaged line" if log.torn == 1 else f"{log.torn} damaged lines"
            say(f"{printable(log.path)}: {lines} set aside; what they were about runs again")
        found = run_sweep(spec, log, runner, sensitivity=sensitivity)
        if spec.title:
            show(Text(spec.title, style="bold"), json)
        show(answer_view(found.answer, names, str(spec.limits)), json)
        if draw:
            show(drawing(records(log, found.every), names), json)
        if found.effects is not None:
            show(effects_view(found.effects), json)
        turning = {} if found.effects is None else {"sensitivity": effects_json(found.effects)}
        write(found.answer.to_json() | turning)
    say(f"{printable(output / PARQUET)} and {CSV}: a row a design")
    if failed := found.answer.counts["failed"]:
        raise InputError(f"{failed:,} of {found.answer.designs:,} designs failed; the same command tries them again")


def _check_output(what: Path | None, output: Path, json: str | None) -> None:
    """Refuse a folder that cannot be written, or that has tables of somebody else's."""
    from sim.sweep.log import LOG
    from sim.sweep.table import CSV, PARQUET, SENSITIVITY

    names = [PARQUET, CSV, f"{SENSITIVITY}.parquet", f"{SENSITIVITY}.csv", LOG]
    keep_apart([what], {"--json": json}, folders={"-o": (output, names)})
    if not (output / LOG).exists() and (there := next((name for name in names if (output / name).exists()), None)):
        raise InputError(f"-o {output}: has a {there} and no log of a sweep, so it would be lost; name another folder")


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
