"""Policies x cache sizes, simulated and measured on one machine: how far the simulator is off, part by part."""

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.files import keep_apart
from ground.output import values_of
from ground.plots import import_matplotlib
from realrun.calibrate.machine import Machine
from realrun.calibrate.machine_profile import FULL, QUICK, TINY, calibrate
from realrun.engine.replay import Rig, interruptible, open_rig, run, small_scene, terms_of
from realrun.validate.agreement import compare
from realrun.validate.baselines import baselines
from realrun.validate.record import FILES, PROFILE, Record, made_by
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, MEASURED
from sim.model.spec import ModelSpec, load_model
from sim.plan import Plan
from sim.policies import parameters_of, policy_class
from sim.report.metrics import Report
from sim.run.engines import execute
from sim.run.scene import Scene, bundled_traces, describe, lacking, plan_for
from traces.trace import Trace

MOST_RUNS = 5
"""Of a pair on the device: whatever disturbs only ever adds, so the fastest counts, and all are kept in the record."""


@dataclass(frozen=True)
class Asked:
    """What to validate.

    Attributes:
        trace: the trace that both replay.
        policies: names, or ``name,key=value,...``.
        caches: sizes as ``sim.run.cache_size`` reads them.
        folder: where the table goes.
        hardware: the profile; None measures one on the spot.
        software: what predictions cost; ``measured`` is the profile's own.
        model: whose size; None is the trace's own.
        profile: traces that policies learn from, as for ``sim``.
        steps: decode steps of each run; None is all.
        scale: divides the model's widths, to try things out.
        shared, host_memory: as ``open_rig`` has them.
        device: cuda, cuda:N or cpu.
        check: compare every slot with its stamp as well.
        baseline: measure what people use today as well.
        quick: measure the profile in less time.
        seconds: of decode to measure for each pair; what takes less is run again, up to `MOST_RUNS` times.
    """

    trace: Path
    policies: Sequence[str]
    caches: Sequence[str]
    folder: Path
    hardware: str | None = None
    software: str = "measured"
    model: str | None = None
    profile: Sequence[Path] | None = None
    split: str = "eval"
    steps: int | None = None
    scale: int = 1
    shared: int | None = None
    host_memory: int | None = None
    device: str = "cuda"
    check: bool = False
    baseline: bool = True
    quick: bool = False
    seconds: float = 2.0


def validate_command(asked: Asked, command: str) -> None:
    """Validate, print the table and the verdict. Raises InputError, KeyboardInterrupt if it was stopped half-way."""
    record = validate(asked, command)
    record.show()
    if not record.complete:
        raise KeyboardInterrupt


def validate(asked: Asked, command: str) -> Record:
    """Run every policy at every cache size both ways; the record, complete unless it was interrupted.

    Files of ``asked.folder`` are brought up to date after every pair; before the first they stay as they are. Raises
    InputError for what cannot be; a policy that this trace or this machine cannot run is left out by name, and it is an
    error only if that goes for all.
    """
    if not 0 <= asked.seconds < float("inf"):
        raise InputError(f"--seconds {asked.seconds}; expected a time of 0 or more")
    read = [asked.trace, *(asked.profile or bundled_traces()), asked.model, asked.hardware, asked.software]
    files = [*FILES, PROFILE] if asked.hardware is None else FILES
    keep_apart(read, {}, folders={"-o": (asked.folder, files)})
    import_matplotlib()  # where it is not installed, that is said now

    for option, given in (("--policies", asked.policies), ("--cache", asked.caches)):
        if not given:
            raise InputError(f"{option}: expected at least one")
    wanted = [named(entry) for entry in dict.fromkeys(asked.policies)]
    names = [name for name, _, _ in wanted]
    machine = Machine(asked.device)
    if asked.hardware is None:  # what is wrong is found before a minute of measuring
        software = DEFAULT_SOFTWARE if asked.software.lower() in MEASURED else asked.software
        _scenes(replace(asked, software=software), DEFAULT_HARDWARE, names)
    profile, scenes = _measured(asked, machine, names)
    first = next(iter(scenes.values()))
    reasons = {name: lacking(first, policy_class(name)) for name in names}
    if all(reasons.values()):  # found before experts are pinned
        raise InputError(f"nothing can be run: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}")
    record = Record(command, _provenance(first, machine, asked), profile=profile)
    with _rig(first.model, asked) as rig, interruptible() as stop:
        pairs = [(cache, entry) for entry in wanted for cache in scenes]
        for number, (cache, (name, label, values)) in enumerate(pairs, 1):
            begin = time.monotonic()
            try:
                pair = None if stop() else _both(scenes[cache], name, values, rig, asked, stop)
            except InputError as reason:
                record.left_out.append(f"{label} at {cache}: {reason}")
                continue
            if pair is None:  # half a run is no pair
                break
            _add(record, cache, label, *pair, scenes[cache])
            record.write(asked.folder)
            _say(record, number, len(pairs), time.monotonic() - begin)
        else:
            record.complete = True
    if record.complete and not record.rows:
        raise InputError(f"nothing could be run: {'; '.join(record.left_out)}")
    try:
        if asked.baseline and record.complete:
            record.baselines = baselines(machine, first.model, record.reports)
    finally:  # also if a person does not wait for them
        record.write(asked.folder, plot=True)
    return record


def named(entry: str) -> tuple[str, str, dict[str, object]]:
    """A policy's name, how it is shown, its parameters. Raises InputError for a policy or parameters that are not."""
    name, *settings = entry.split(",")
    values = values_of(settings, f"--policies {name}:")
    parameters_of(name, dict(values))
    return policy_class(name).name, entry, values


def _measured(asked: Asked, machine: Machine, policies: Sequence[str]) -> tuple[str, dict[str, Scene]]:
    """What is replayed at each cache size, and the profile that was measured for it, empty where one was named."""
    if asked.hardware is not None:
        return "", _scenes(asked, asked.hardware, policies)
    name = asked.model or Trace.load(asked.trace).meta["model"].get("name", "")
    effort = TINY if not machine.cuda else QUICK if asked.quick else FULL
    text = calibrate(machine, [load_model(name)], effort, "measured")
    with tempfile.TemporaryDirectory() as apart:  # what lies in the folder is of earlier runs until there is a pair
        path = Path(apart) / PROFILE
        path.write_text(text, encoding="utf-8")
        return text, _scenes(asked, str(path), policies)


def _scenes(asked: Asked, hardware: str, policies: Sequence[str]) -> dict[str, Scene]:
    """What is replayed at each cache size."""
    learns = any(policy_class(name).learns for name in policies)
    return {
        cache: small_scene(
            asked.trace, cache, asked.scale, asked.steps, model=asked.model, hardware=hardware,
            software=asked.software, profile=asked.profile, split=asked.split, learns=learns,
        )
        for cache in asked.caches
    }  # fmt: skip


def _rig(model: ModelSpec, asked: Asked) -> AbstractContextManager[Rig]:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return open_rig(model, asked.device, shared=asked.shared, limit=asked.host_memory, say=say)


def _both(
    here: Scene, name: str, values: dict[str, object], rig: Rig, asked: Asked, stop: Any
) -> tuple[Report, Report] | None:
    """One plan, executed in simulated time and on the device; None if that was interrupted."""
    plan, parameters = plan_for(here, name, values)
    simulated = simulate(here, plan, name, parameters, values)
    runs: list[Report] = []
    while not runs or (len(runs) < MOST_RUNS and sum(map(_decode_s, runs)) < asked.seconds):
        try:
            one = run(here, plan, rig, policy=name, parameters=parameters, given=values, check=asked.check, stop=stop)
        except KeyboardInterrupt:  # before its first step was over
            if not stop():
                raise
            return None
        if not one.settings["complete"]:
            return None
        runs.append(one)
    fastest = min(runs, key=_decode_s)
    settings = fastest.settings | {"runs_tokens_per_s": [one.tokens_per_s for one in runs]}
    return simulated, replace(fastest, settings=settings)


def _decode_s(report: Report) -> float:
    return sum(report.decode.time_ms.values()) / 1e3


def simulate(here: Scene, plan: Plan, name: str, parameters: dict[str, Any], given: dict[str, object]) -> Report:
    """The report of a plan that is already made, in simulated time, experts copied in the chunks of a run."""
    terms = terms_of(here, plan)
    done = execute(here.work, plan, here.budget, chunks=terms.chunks)
    return describe(here, plan, name, parameters, given, done, terms)


def _add(record: Record, cache: str, label: str, simulated: Report, measured: Report, here: Scene) -> None:
    record.rows += compare(simulated, measured, cache, label)
    record.reports.append(
        {"policy": label, "cache": cache, "simulated": simulated.to_json(), "measured": measured.to_json()}
    )
    decode = measured.decode
    moved = decode.link_bytes["demand"] + decode.link_bytes["prefetch"]
    busy = measured.settings["link_busy_ms"]
    record.link_used[label, cache], record.link_rate[label, cache] = link_shares(
        moved, sum(decode.time_ms.values()), busy, here
    )


def link_shares(moved: int, whole_ms: float, busy_ms: float, here: Scene) -> tuple[float | None, float | None]:
    """Bytes over decode's time and over the time in which copies were under way, as shares of copies in a row."""
    size = here.model.expert_bytes[0]
    in_a_row = size / max(1, here.hardware.copy_ns(size) - here.hardware.startup_ns(size)) * 1e9
    used, busy = (moved / (ms / 1e3) / in_a_row if ms else None for ms in (whole_ms, busy_ms))
    return used, busy


def _provenance(here: Scene, machine: Machine, asked: Asked) -> dict[str, Any]:
    return {
        "trace": Path(here.trace.source).name,
        "trace_sha256": here.trace.sha256,
        "model": here.model.name,
        "hardware": here.hardware.name,
        "software": here.software.name,
        "decode_steps": asked.steps,
        **made_by(machine),
    }


def _say(record: Record, number: int, of: int, seconds: float) -> None:
    line = record.lines()[-1]
    print(
        f"{number}/{of} {line[0]} at {line[1]}: {line[2]} tokens/s simulated, {line[3]} measured, {line[4]} "
        f"({seconds:.1f} s)",
        file=sys.stderr,
        flush=True,
    )
