"""Simulate a validation's pairs again, with another profile or newer code, against what was measured then.

No GPU is needed: measured figures are those of the file. A pair's plan is made anew, so it is the one that was measured
only where neither the policy nor, for one that weighs costs, the profile has changed since.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.files import keep_apart
from realrun.engine.replay import for_device
from realrun.engine.small_scene import WIDTHS, first_steps
from realrun.validate.agreement import compare
from realrun.validate.record import FILES, Record, as_written
from sim.policies.named import NamedPolicy
from sim.run.prepared import prepare
from sim.run.scene import bundled_traces, code_version, scene

_KEPT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (lambda value: isinstance(value, str), "a text"),
    "complete": (lambda value: isinstance(value, bool), "true or false"),
    "left_out": (lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value), "a list of texts"),
}
"""What the new record says as the old one did: whether a value is of the right type, and which that is."""


def resimulate_command(source: Path, trace: Path, folder: Path, hardware: str, command: str) -> None:
    """Write ``source`` with what ``hardware`` simulates now into ``folder``; print it. Raises InputError."""
    if folder.resolve() == source.resolve().parent:
        raise InputError(f"-o {folder}: holds {source.name} itself; expected another folder")
    keep_apart([source, trace, *bundled_traces(), hardware], {}, folders={"-o": (folder, FILES)})
    record = resimulate(source, trace, hardware, command)
    record.write(folder, plot=True)
    record.show()


def resimulate(source: Path, trace: Path, hardware: str, command: str) -> Record:
    """The record of a ``validation.json`` whose simulated half is made anew.

    Raises InputError for another file, another trace than it was made of, or a model whose widths were divided.
    """
    with as_written(source):
        data = json.loads(source.read_text(encoding="utf-8"))
        json.dumps(data, allow_nan=False)  # what is no number cannot be written again
        was, reports, components = dict(data["provenance"]), data["reports"], data["components"]
        measured = {(row["policy"], row["cache"], row["component"]): _number(row["measured"]) for row in components}
        steps = None if was["decode_steps"] in (None, "None") else int(was["decode_steps"])
        model, of_trace, sha256 = str(was["model"]), was["trace"], was["trace_sha256"]
        pairs = [(str(report["policy"]), str(report["cache"]), dict(report["measured"])) for report in reports]
        first = {"measured with": was["code"], "measured by": data["command"]}  # not if it has been simulated again
        provenance = {**first, **was, "code": code_version()}
        kept = {field: data[field] for field in _KEPT}
    for field, (fits, right) in _KEPT.items():
        if not fits(kept[field]):
            raise InputError(f"{source}: {field} is {json.dumps(kept[field]):.60}; expected {right}")
    record = Record(command, provenance, complete=kept["complete"], left_out=kept["left_out"])
    if WIDTHS in model:
        raise InputError(f"{source}: of {model}; expected runs at true size, without --scale")
    if not pairs:
        raise InputError(f"{source}: holds no pair of runs; expected one at least")
    wanted = [NamedPolicy.of(label, "--policies") for label, _, _ in pairs]
    learns = any(one.kind.learns for one in wanted)
    for one, (label, cache, then) in zip(wanted, pairs, strict=True):
        here = scene(trace, model=model, hardware=hardware, software="measured", cache=cache, learns=learns)
        if here.trace.sha256 != sha256:
            raise InputError(f"{trace}: not the trace of {source}, {of_trace} of sha256 {sha256}")
        if steps is not None:
            here = first_steps(here, steps)
        with as_written(source):
            pieces = int(then["settings"]["chunks"])  # those that it was measured in, whatever the default is now
        simulated = for_device(prepare(here, one.name, one.values, chunks=pieces)).simulate()
        with as_written(source):
            # What this code compares and that of then did not is without a measured figure.
            rows = compare(simulated, simulated, cache, label)
            rows = [replace(row, measured=measured.get((label, cache, row.component))) for row in rows]
            record.add(rows, simulated, then, here)
            record.lines(), record.verdict()  # what the files need of it is there
    provenance["hardware"] = here.hardware.name
    return record


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
