"""Simulate a validation's pairs again, with another profile or newer code, against what was measured then.

No GPU is needed: measured figures are those of the file. A pair's plan is made anew, so it is the one that was measured
only where neither the policy nor, for one that weighs costs, the profile has changed since.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.files import keep_apart
from realrun.engine.replay import for_device
from realrun.engine.small_scene import WIDTHS, first_steps
from realrun.validate.agreement import compare
from realrun.validate.draw import refuse_calibrated_on
from realrun.validate.record import FILES, Record, as_written
from sim.policies.named import NamedPolicy
from sim.run.prepared import prepare
from sim.run.scene import Scene, bundled_traces, code_version, scene
from traces.trace import Trace

_KEPT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (lambda value: isinstance(value, str), "a text"),
    "complete": (lambda value: isinstance(value, bool), "true or false"),
    "left_out": (lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value), "a list of texts"),
}
"""What the new record says as the old one did: whether a value is of the right type, and which that is."""


def resimulate_command(source: Path, traces: Sequence[Path], folder: Path, hardware: str, command: str) -> None:
    """Write ``source`` with what ``hardware`` simulates now into ``folder``; print it. Raises InputError."""
    if folder.resolve() == source.resolve().parent:
        raise InputError(f"-o {folder}: holds {source.name} itself; expected another folder")
    keep_apart([source, *traces, *bundled_traces(), hardware], {}, folders={"-o": (folder, FILES)})
    record = resimulate(source, traces, hardware, command)
    record.write(folder, plot=True)
    record.show()


def resimulate(source: Path, traces: Sequence[Path], hardware: str, command: str) -> Record:
    """The record of a ``validation.json`` whose simulated half is made anew.

    Raises InputError for another file, other traces than it was made of, or a model whose widths were divided.
    """
    with as_written(source):
        data = json.loads(source.read_text(encoding="utf-8"))
        json.dumps(data, allow_nan=False)  # what is no number cannot be written again
        was, reports, components = dict(data["provenance"]), data["reports"], data["components"]
        measured = {_place(row, row["component"]): _measured(row) for row in components}
        steps = None if was["decode_steps"] in (None, "None") else int(was["decode_steps"])
        model, of_trace = str(was["model"]), was["trace"]
        pairs = [
            (str(report["policy"]), str(report["cache"]), str(report.get("trace", "")), dict(report["measured"]))
            for report in reports
        ]
        rounds = any(len(runs) > 1 for _, runs in measured.values()) and "summary_of_medians" in data
        first = {"measured with": was["code"], "measured by": data["command"]}  # not if it has been simulated again
        provenance = {**first, **was, "code": code_version()}
        kept = {field: data[field] for field in _KEPT}
    for field, (fits, right) in _KEPT.items():
        if not fits(kept[field]):
            raise InputError(f"{source}: {field} is {json.dumps(kept[field]):.60}; expected {right}")
    record = Record(command, provenance, complete=kept["complete"], left_out=kept["left_out"], interleaved=rounds)
    if WIDTHS in model:
        raise InputError(f"{source}: of {model}; expected runs at true size, without --scale")
    if not pairs:
        raise InputError(f"{source}: holds no pair of runs; expected one at least")
    wanted = [NamedPolicy.of(label, "--policies") for label, *_ in pairs]
    learns = any(one.kind.learns for one in wanted)
    scenes: dict[tuple[str, str, int], Scene] = {}
    for one, (label, cache, name, then) in zip(wanted, pairs, strict=True):
        with as_written(source):
            hashed, batch = str(then["provenance"]["trace_sha256"]), int(then["settings"]["batch"])
            pieces = int(then["settings"]["chunks"])  # those that it was measured in, whatever the default is now
        if (whole := scenes.get((hashed, then["settings"]["split"], batch))) is None:
            path = _trace_of(hashed, traces)
            if path is None:
                raise InputError(f"{traces[-1]}: not the trace of {source}, {name or of_trace} of sha256 {hashed}")
            whole = scene(
                path, model=model, hardware=hardware, software="measured", batch=batch, learns=learns,
                split=then["settings"]["split"],
            )  # fmt: skip
            refuse_calibrated_on(whole)
            whole = whole if steps is None else first_steps(whole, steps)
            scenes[hashed, then["settings"]["split"], batch] = whole
        here = whole.with_cache(cache)
        simulated = for_device(prepare(here, one.name, one.values, chunks=pieces)).simulate()
        with as_written(source):
            # What this code compares and that of then did not is without a measured figure.
            rows = compare(simulated, simulated, cache, label, name)
            found = [measured.get((label, cache, name, row.component), (None, ())) for row in rows]
            rows = [replace(row, measured=one, runs=runs) for row, (one, runs) in zip(rows, found, strict=True)]
            record.add(rows, simulated, then, here)
            record.lines(), record.verdict()  # what the files need of it is there
    provenance["hardware"] = here.hardware.name
    return record


def _trace_of(sha256: str, traces: Sequence[Path]) -> Path | None:
    """The first of ``traces`` that has this hash."""
    return next((path for path in traces if Trace.load(path).sha256 == sha256), None)


def _place(row: dict[str, Any], component: str) -> tuple[str, str, str, str]:
    return row["policy"], row["cache"], row.get("trace", ""), component


def _measured(row: dict[str, Any]) -> tuple[float | None, tuple[float | None, ...]]:
    """What a component was measured to be, in the run that counts and in all of them."""
    return _number(row["measured"]), tuple(map(_number, row.get("runs", ())))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
