"""Pairs of runs, simulated and measured on one machine: how far the simulator is off, part by part.

A pair is a policy at a cache size on a trace: all that are named, or some that are drawn (``realrun.validate.draw``).
Each is measured again until that took long enough, or all of them in turn, in an order that is drawn anew each time.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

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
from realrun.validate.draw import BOUNDS, Asked, drawn, refuse_calibrated_on
from realrun.validate.record import FILES, PROFILE, Record, made_by
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, MEASURED
from sim.policies.named import NamedPolicy, every_policy
from sim.report.metrics import Report
from sim.report.tables import number
from sim.run.prepared import PreparedRun, prepare
from sim.run.scene import DEFAULT_CACHE, Scene, bundled_traces, lacking
from traces.models.known import model_spec
from traces.trace import Trace

MOST_RUNS = 5
"""Of a pair on the device: whatever disturbs only ever adds, so the fastest counts, and all are kept in the record."""
REPEATS = 3
"""Runs of each pair that is drawn, where a person names no other number."""
ALL = "all"
"""Every policy, as a person names them."""
WRITE_SECONDS = 20.0
"""Between two states of the record on disk while pairs take turns."""


def validate_command(options: ValidateOptions, command: str) -> None:
    """Validate, print the table and the verdict. Raises InputError, KeyboardInterrupt if it was stopped half-way."""
    record = validate(options, command)
    record.show()
    if not record.complete:
        raise KeyboardInterrupt


@dataclass
class Pair:
    """One pair: the run that both clocks execute, and what they gave."""

    asked: Asked
    prepared: PreparedRun
    simulated: Report
    trace: str = ""
    """Its file's name, where there are several."""
    runs: list[Report] = field(default_factory=list)

    @property
    def named(self) -> str:
        """In words."""
        return f"{self.asked.policy.label} at {self.asked.cache}{f' of {self.trace}' if self.trace else ''}"

    @property
    def fastest(self) -> Report:
        """The run that counts, which says of the others how fast they were."""
        one = min(self.runs, key=_decode_s)
        return replace(one, settings=one.settings | {"runs_tokens_per_s": [run.tokens_per_s for run in self.runs]})

    def add_to(self, record: Record) -> None:
        """Bring ``record`` up to date."""
        fastest, label = self.fastest, self.asked.policy.label
        rows = compare(self.simulated, fastest, self.asked.cache, label, self.trace, self.runs)
        record.add(rows, self.simulated, fastest.to_json(), self.prepared.scene)


def validate(options: ValidateOptions, command: str) -> Record:
    """Run every pair both ways; the record, complete unless it was interrupted.

    Files of the folder are brought up to date after every pair; before the first they stay as they are. Raises
    InputError for what cannot be; a policy that this trace or this machine cannot run is left out by name, and it is an
    error only if that goes for all.
    """
    wanted = _refuse(options)
    machine = Machine(options.device)
    limit = host_bytes_of(options.host_memory)
    if options.hardware is None:  # what is wrong is found before a minute of measuring
        software = DEFAULT_SOFTWARE if options.software.lower() in MEASURED else options.software
        early = replace(options, software=software)
        _asked(early, _scenes(early, DEFAULT_HARDWARE, wanted), wanted)
    profile, scenes = _measured(options, machine, wanted)
    first = scenes[0]
    reasons = {one.name: lacking(first, one.kind) for one in wanted}
    if all(reasons.values()):  # found before experts are pinned
        raise InputError(f"nothing can be run: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}")
    able = [one for one in wanted if not reasons[one.name]] if ALL in options.policies else wanted
    asked = _asked(options, scenes, able)
    provenance = {
        "trace": ", ".join(_file(here) for here in scenes), "trace_sha256": ", ".join(t.trace.sha256 for t in scenes),
        "model": first.model.name, "hardware": first.hardware.name, "software": first.software.name,
        "decode_steps": options.steps,
    }  # fmt: skip
    repeats = options.repeat or (REPEATS if options.draw else None)
    record = Record(command, provenance | made_by(machine), interleaved=(repeats or 1) > 1, profile=profile)
    with open_rig(
        first.model, options.device, shared=options.shared, limit=limit, say=say
    ) as rig, interruptible() as stop:  # fmt: skip
        for here in scenes:
            rig.layers_for(here)  # the longest of all traces: every run has the same
        if repeats is None:
            _run_pairs(record, asked, scenes, rig, options, stop)
        else:
            _run_rounds(record, asked, scenes, rig, options, repeats, stop)
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
    for option, given, least in (("draw", options.draw, 1), ("repeat", options.repeat, 1), ("seed", options.seed, 0)):
        if given is not None and given < least:
            raise InputError(f"--{option} {given}; expected at least {least}")
    read = [*options.traces, *(options.profile or bundled_traces()), options.model, options.hardware, options.software]
    files = [*FILES, PROFILE] if options.hardware is None else FILES
    keep_apart(read, {}, folders={"-o": (options.folder, files)})
    import_matplotlib()  # where it is not installed, that is said now
    for option, named in (("--policies", options.policies), ("--cache", options.cache)):
        if named is not None and not named:
            raise InputError(f"{option}: expected at least one")
    labels = [label for one in options.policies for label in (every_policy() if one == ALL else [one])]
    return [NamedPolicy.of(label, "--policies") for label in dict.fromkeys(labels)]


def _measured(options: ValidateOptions, machine: Machine, wanted: Sequence[NamedPolicy]) -> tuple[str, list[Scene]]:
    """What is replayed, a trace each, and the profile that was measured for it, empty where one was named."""
    if options.hardware is not None:
        return "", _scenes(options, options.hardware, wanted)
    name = options.model or Trace.load(options.traces[0]).meta["model"].get("name", "")
    effort = TINY if not machine.cuda else QUICK if options.quick else FULL
    text = calibrate(machine, [model_spec(name)], effort, "measured")
    with tempfile.TemporaryDirectory() as apart:  # what lies in the folder is of earlier runs until there is a pair
        path = Path(apart) / PROFILE
        path.write_text(text, encoding="utf-8")
        return text, _scenes(options, str(path), wanted)


def _scenes(options: ValidateOptions, hardware: str, wanted: Sequence[NamedPolicy]) -> list[Scene]:
    """What is replayed, a trace each, with a cache of any size."""
    learns = any(one.kind.learns for one in wanted)
    size = (options.cache or (DEFAULT_CACHE,))[0]
    scenes: list[Scene] = []
    for trace in dict.fromkeys(options.traces):
        here = small_scene(options.scene(trace, hardware, size), options.scale, options.steps, learns=learns)
        refuse_calibrated_on(here)
        if scenes and here.model != scenes[0].model:
            raise InputError(f"{trace}: of {here.model.name}; expected {scenes[0].model.name}, as the others")
        scenes.append(here)
    return scenes


def _file(here: Scene) -> str:
    """The name of the file that its trace is from."""
    return Path(here.trace.source).name


def _asked(options: ValidateOptions, scenes: Sequence[Scene], wanted: Sequence[NamedPolicy]) -> list[Asked]:
    """The pairs: all that are named, or some that are drawn. Raises InputError for a cache that is none."""
    if options.draw is not None:
        return drawn(scenes, wanted, options.draw, options.seed, options.cache or BOUNDS)
    sizes = dict.fromkeys(options.cache or (DEFAULT_CACHE,))
    for here in scenes:
        for cache in sizes:
            here.with_cache(cache)  # what is no size is refused now
    return [Asked(trace, one, cache) for trace in range(len(scenes)) for one in wanted for cache in sizes]


def _prepared(
    record: Record, asked: Sequence[Asked], scenes: Sequence[Scene], stop: Callable[[], bool]
) -> Iterator[tuple[int, Pair]]:
    """Each pair with its plan and what it is simulated to take, and its number; those that cannot be are left out."""
    for place, one in enumerate(asked, 1):
        trace = _file(scenes[one.trace]) if len(scenes) > 1 else ""
        if stop():
            return
        try:
            here = scenes[one.trace].with_cache(one.cache)
            prepared = prepare(here, one.policy.name, one.policy.values)
            yield place, Pair(one, prepared, for_device(prepared).simulate(), trace)
        except InputError as reason:
            of = f" of {trace}" if trace else ""
            record.left_out.append(f"{one.policy.label} at {one.cache}{of}: {reason}")


def _run_pairs(
    record: Record, asked: Sequence[Asked], scenes: Sequence[Scene], rig: Rig, options: ValidateOptions,
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Add one pair after the other to the record, and write it after each; it is complete if none stops it."""
    begin = time.monotonic()
    for place, pair in _prepared(record, asked, scenes, stop):
        try:
            while not pair.runs or (len(pair.runs) < MOST_RUNS and sum(map(_decode_s, pair.runs)) < options.seconds):
                one = _measure(pair, rig, options, stop)
                if one is None:  # half a run is no pair
                    return
                pair.runs.append(one)
        except InputError as reason:
            record.left_out.append(f"{pair.named}: {reason}")
            continue
        pair.add_to(record)
        record.write(options.folder)
        line = record.lines()[-1]
        say(
            f"{place}/{len(asked)} {pair.named}: {line[2]} tokens/s simulated, {line[3]} measured, {line[4]} "
            f"({time.monotonic() - begin:.1f} s)"
        )
        begin = time.monotonic()
    record.complete = not stop()


def _run_rounds(
    record: Record, asked: Sequence[Asked], scenes: Sequence[Scene], rig: Rig, options: ValidateOptions, repeats: int,
    stop: Callable[[], bool],
) -> None:  # fmt: skip
    """Run all pairs, and all again in another order, so that a slow minute of the machine does not meet one alone."""
    begin = written = time.monotonic()
    pairs = dict(_prepared(record, asked, scenes, stop))
    say(f"{len(pairs)} of {len(asked)} pairs planned ({time.monotonic() - begin:.1f} s)")
    order = np.random.default_rng([options.seed, 1])
    for turn in range(1, repeats + 1):
        for place in order.permutation(list(pairs)).tolist():
            begin, pair = time.monotonic(), pairs[place]
            try:
                one = None if stop() else _measure(pair, rig, options, stop)
            except InputError as reason:
                record.left_out.append(f"{pair.named}: {reason}")
                del pairs[place]
                continue
            if one is None:
                return
            pair.runs.append(one)
            pair.add_to(record)
            say(
                f"run {turn} of {repeats}, {pair.named}: {number(pair.simulated.tokens_per_s, 3)} tokens/s simulated, "
                f"{number(one.tokens_per_s, 3)} measured ({time.monotonic() - begin:.1f} s)"
            )
            if time.monotonic() - written > WRITE_SECONDS:
                record.write(options.folder)
                written = time.monotonic()
    record.complete = True


def _measure(pair: Pair, rig: Rig, options: ValidateOptions, stop: Callable[[], bool]) -> Report | None:
    """One run on the device; None if that was interrupted."""
    try:
        one = run(pair.prepared, rig, check=options.check, stop=stop)
    except KeyboardInterrupt:  # before its first step was over
        if not stop():
            raise
        return None
    return one if one.settings["complete"] else None


def _decode_s(report: Report) -> float:
    return sum(report.decode.time_ms.values()) / 1e3
