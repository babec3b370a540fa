"""Simulate a validation's pairs again, with another profile or newer code, against what was measured then.

No GPU is needed: measured figures are those of the file. A pair's plan is made anew, so it is the one that was measured
only where neither the policy nor, for one that weighs costs, the profile has changed since.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from realrun.agreement import compare
from realrun.record import Record
from realrun.replay import first_steps
from realrun.validate import link_shares, named, simulate
from sim.metrics import Report
from sim.policies import policy_class
from sim.replay import Scene, code_version, plan_for, scene
from traces.errors import InputError


def resimulate_command(source: Path, trace: Path, folder: Path, hardware: str, command: str) -> None:
    """Write ``source`` with what ``hardware`` simulates now into ``folder``; print it. Raises InputError."""
    if folder.resolve() == source.resolve().parent:
        raise InputError(f"-o {folder}: holds {source.name} itself; expected another folder")
    record = resimulate(source, trace, hardware, command)
    folder.mkdir(parents=True, exist_ok=True)
    record.write(folder, plot=True)
    console = Console()
    console.print(record.table())
    for line in record.verdict():
        console.print(line, markup=False)


def resimulate(source: Path, trace: Path, hardware: str, command: str) -> Record:
    """The record of a ``validation.json`` whose simulated half is made anew.

    Raises InputError for another file, another trace than it was made of, or a model whose widths were divided.
    """
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
        was, reports, components = data["provenance"], data["reports"], data["components"]
        measured = {(row["policy"], row["cache"], row["component"]): row["measured"] for row in components}
        steps = None if was["decode_steps"] in (None, "None") else int(was["decode_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{source}: expected the validation.json that validate writes") from None
    learns = any(policy_class(named(report["policy"])[0]).learns for report in reports)
    first = {"measured with": was["code"], "measured by": data["command"]}  # not if it has been simulated again before
    provenance = {**first, **was, "code": code_version()}
    record = Record(command, provenance, complete=data["complete"], left_out=data["left_out"])
    for report in reports:
        label, cache = report["policy"], report["cache"]
        here = scene(
            trace, model=was["model"], hardware=hardware, software="measured", cache_size=cache, learns=learns
        )  # fmt: skip
        if here.trace.sha256 != was["trace_sha256"]:
            raise InputError(f"{trace}: not the trace of {source}, {was['trace']} of sha256 {was['trace_sha256']}")
        if steps is not None:
            here = first_steps(here, steps)
        name, _, values = named(label)
        plan, parameters = plan_for(here, name, values)
        simulated = simulate(here, plan, name, parameters, values)
        _add(record, here, label, cache, simulated, report["measured"], measured)
    provenance["hardware"] = here.hardware.name
    return record


def _add(
    record: Record, here: Scene, label: str, cache: str, simulated: Report, then: dict[str, Any], measured: Any
) -> None:
    rows = compare(simulated, simulated, cache, label)
    record.rows += [replace(row, measured=measured[label, cache, row.component]) for row in rows]
    record.reports.append({"policy": label, "cache": cache, "simulated": simulated.to_json(), "measured": then})
    busy = then["settings"]["link_busy_ms"]
    record.link_used[label, cache], record.link_rate[label, cache] = link_shares(
        sum(then["link_bytes"][kind] for kind in ("demand", "prefetch")), sum(then["time_ms"].values()), busy, here
    )
