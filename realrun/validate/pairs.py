"""Policies x cache sizes, simulated and measured on one machine: how far the simulator is off, part by part."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ground.errors import InputError
from ground.files import keep_apart
from ground.plots import import_matplotlib
from ground.progress import say
from realrun.calibrate.machine import Machine
from realrun.calibrate.machine_profile import calibrate
from realrun.calibrate.thoroughness import FULL, QUICK, TINY
from realrun.engine.replay import for_device, interruptible, run
from realrun.engine.rig import Rig, open_rig
from realrun.engine.small_scene import small_scene
from realrun.options import ValidateOptions, host_bytes_of
from realrun.validate.agreement import compare
from realrun.validate.baselines import baselines
from realrun.validate.record import FILES, PROFILE, Record, made_by
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, MEASURED
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report
from sim.run.prepared import PreparedRun, prepare
from sim.run.scene import Scene, bundled_traces, lacking
from traces.models.known import model_spec
from traces.trace import Trace

MOST_RUNS = 5
"""Of a pair on the device: whatever disturbs only ever adds, so the fastest counts, and all are kept in the record."""


def validate_command(options: ValidateOptions, command: str) -> None:
    """Validate, print the table and the verdict. Raises InputError, KeyboardInterrupt if it was stopped half-way."""
    record = validate(options, command)
    record.show()
    if not record.complete:
        raise KeyboardInterrupt


def validate(options: ValidateOptions, command: str) -> Record:
    """Run every policy at every cache size both ways; the record, complete unless it was interrupted.

    Files of the folder are brought up to date after every pair; before the first they stay as they are. Raises
    InputError for what cannot be; a policy that this trace or this machine cannot run is left out by name, and it is an
    error only if that goes for all.
    """
    wanted = _refuse(options)
    machine = Machine(options.device)
    limit = host_bytes_of(options.host_memory)
    if options.hardware is None:  # what is wrong is found before a minute of measuring
        software = DEFAULT_SOFTWARE if options.software.lower() in MEASURED else options.software
        _scenes(replace(options, software=software), DEFAULT_HARDWARE, wanted)
    profile, scenes = _measured(options, machine, wanted)
    first = next(iter(scenes.values()))
    reasons = {one.name: lacking(first, one.kind) for one in wanted}
    if all(reasons.values()):  # found before experts are pinned
        raise InputError(f"nothing can be run: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}")
    provenance = {
        "trace": Path(first.trace.source).name, "trace_sha256": first.trace.sha256, "model": first.model.name,
        "hardware": first.hardware.name, "software": first.software.name, "decode_steps": options.steps,
    }  # fmt: skip
    record = Record(command, provenance | made_by(machine), profile=profile)
    with open_rig(
        first.model, options.device, shared=options.shared, limit=limit, say=say
    ) as rig, interruptible() as stop:  # fmt: skip
        _run_pairs(record, scenes, wanted, rig, options, stop)
    if record.complete and not record.rows:
        raise InputError(f"nothing could be run: {'; '.join(record.left_out)}")
    try:
        if options.baseline and record.complete:
            record.baselines = baselines(machine, first.model, record.reports)
    finally:  # also if a person does not wait for them
        record.write(options.folder, plot=True)
    return record


def _refuse(options: ValidateOptions) -> list[NamedPolicy]:
    """Refuse what can be seen to be wrong before anything is read; else the policies. Raises InputError."""
    if not 0 <= options.seconds < float("inf"):
        raise InputError(f"--seconds {options.seconds}; expected a time of 0 or more")
    read = [*options.traces, *(options.profile or bundled_traces()), options.model, options.hardware, options.software]
    files = [*FILES, PROFILE] if options.hardware is None else FILES
    keep_apart(read, {}, folders={"-o": (options.folder, files)})
    import_matplotlib()  # where it is not installed, that is said now
    for option, given in (("--policies", options.policies), ("--cache", options.cache)):
        if not given:
            raise InputError(f"{option}: expected at least one")
    return [NamedPolicy.of(label, "--policies") for label in dict.fromkeys(options.policies)]


def _measured(
    options: ValidateOptions, machine: Machine, wanted: Sequence[NamedPolicy]
) -> tuple[str, dict[str, Scene]]:
    """What is replayed at each cache size, and the profile that was measured for it, empty where one was named."""
    if options.hardware is not None:
        return "", _scenes(options, options.hardware, wanted)
    name = options.model or Trace.load(options.traces[0]).meta["model"].get("name", "")
    effort = TINY if not machine.cuda else QUICK if options.quick else FULL
    text = calibrate(machine, [model_spec(name)], effort, "measured")
    with tempfile.TemporaryDirectory() as apart:  # what lies in the folder is of earlier runs until there is a pair
        path = Path(apart) / PROFILE
        path.write_text(text, encoding="utf-8")
        return text, _scenes(options, str(path), wanted)


def _scenes(options: ValidateOptions, hardware: str, wanted: Sequence[NamedPolicy]) -> dict[str, Scene]:
    """What is replayed at each cache size."""
    learns = any(one.kind.learns for one in wanted)
    return {
        cache: small_scene(options.scene(hardware, cache), options.scale, options.steps, learns=learns)
        for cache in options.cache
    }


def _run_pairs(
    record: Record, scenes: dict[str, Scene], wanted: Sequence[NamedPolicy], rig: Rig, options: ValidateOptions,
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Add every policy at every cache size to the record, and write it after each; it is complete if none stops it."""
    pairs = [(cache, one) for one in wanted for cache in scenes]
    for number, (cache, one) in enumerate(pairs, 1):
        begin = time.monotonic()
        try:
            pair = None if stop() else _both(prepare(scenes[cache], one.name, one.values), rig, options, stop)
        except InputError as reason:
            record.left_out.append(f"{one.label} at {cache}: {reason}")
            continue
        if pair is None:  # half a run is no pair
            return
        simulated, measured = pair
        record.add(compare(simulated, measured, cache, one.label), simulated, measured.to_json(), scenes[cache])
        record.write(options.folder)
        line = record.lines()[-1]
        say(
            f"{number}/{len(pairs)} {line[0]} at {line[1]}: {line[2]} tokens/s simulated, {line[3]} measured, "
            f"{line[4]} ({time.monotonic() - begin:.1f} s)"
        )
    record.complete = True


def _both(
    prepared: PreparedRun, rig: Rig, options: ValidateOptions, stop: Callable[[], bool]
) -> tuple[Report, Report] | None:
    """One run in simulated time and on the device; None if that was interrupted."""
    simulated = for_device(prepared).simulate()
    runs: list[Report] = []
    while not runs or (len(runs) < MOST_RUNS and sum(map(_decode_s, runs)) < options.seconds):
        try:
            one = run(prepared, rig, check=options.check, stop=stop)
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
