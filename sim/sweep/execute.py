"""One design executed, as a row. What designs share (traces, costs of steps, bounds) is kept from one to the next."""

import time
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.bounds import Bounds
from sim.machine.prediction_costs import DEFAULT_SOFTWARE
from sim.report.metrics import Report
from sim.report.shares import shares
from sim.run.faults import SimulationError
from sim.run.replay_options import ReplayOptions
from sim.run.scene import LoadedTraces, Scene, load_traces, scene_of
from sim.sweep.design import Changes, Design, file_state, hardware_of, machine_state, software_of
from sim.sweep.identity import identity, inputs
from sim.sweep.intervals import interval
from sim.sweep.row import Row, figures


@lru_cache(maxsize=4)
def _load(content: object, *about: Any) -> LoadedTraces:
    """The traces as long as their ``content`` is the same."""
    return load_traces(*about)


def run_design(design: Design, key: str) -> Row:
    """Replay ``design``, which is called ``key``. Never raises: whatever goes wrong is in the row."""
    begin = time.perf_counter()
    try:
        row = _replayed(design, key)
    except InputError as wrong:
        # A policy that runs out of memory is told of as one that is wrong; with more memory it may not be.
        row = Row(key, "failed" if "out of memory" in str(wrong) else "refused", _line(wrong))
    except MemoryError as wrong:
        row = Row(key, "failed", _line(f"out of memory {wrong}"))
    except (SimulationError, OSError) as wrong:
        row = Row(key, "failed", _line(wrong))
    except Exception as wrong:  # a defect, which is no reason to lose the other designs
        row = Row(key, "failed", _line(f"{type(wrong).__name__}: {wrong}"))
    return replace(row, seconds=round(time.perf_counter() - begin, 4))


def _line(wrong: object) -> str:
    return " ".join(str(wrong).split())


def _replayed(design: Design, key: str) -> Row:
    if not _is_called(design, key):
        return Row(key, "failed", "a file or the code has changed since the sweep began, or differs on this machine")
    here = scene_at(design)
    report, parts = _report(design, here)
    low, high = interval(parts)
    speed = {"tokens_per_s": report.tokens_per_s, "tokens_per_s_low": low, "tokens_per_s_high": high}
    return Row(key, "ok", values=speed | figures(report, here), sequences=parts)


def _is_called(design: Design, key: str) -> bool:
    try:
        return identity(design) == key
    except (InputError, OSError):  # it had an identity where the sweep began
        return False


def _report(design: Design, here: Scene) -> tuple[Report, dict[str, list[int]] | None]:
    """The report of a design, and what each sequence had of it."""
    options, policy = design.options, design.policy
    if options.cold:
        return options.replay(here, policy), None
    run = options.prepare(here, policy)
    done = run.execute(engine=options.engine)
    one_at_a_time = bool((np.diff(here.work.schedule.offsets)[here.work.schedule.phase == 1] == 1).all())
    found = shares(here.trace, here.work, done.log) if one_at_a_time else None
    parts = None if found is None else {"tokens": found.tokens.tolist(), "ns": found.ns.tolist()}
    return run.simulated(done), parts


def scene_at(design: Design) -> Scene:
    """The scene of a design. Raises as `sim.run.scene.scene_of` does."""
    options, hardware, software = design.options, design.changes("hardware"), design.changes("software")
    content = (*inputs(options), machine_state(options.machine), file_state(options.software))
    seed = options.seed if options.regroup else min(options.seed, 0)  # regrouping may draw
    alike = replace(options, cache="100%", seed=seed, **_of_the_run)
    place = _place(alike, design.learns, hardware, software, content)
    here = replace(place.with_cache(options.cache), seed=options.seed)
    key = (replace(alike, software=DEFAULT_SOFTWARE), hardware, content, here.budget)
    if key in _bounds:
        vars(here)["bound"] = _bounds[key]  # where a cached property keeps it
    else:
        if len(_bounds) == _MOST_BOUNDS:
            _bounds.clear()
        _bounds[key] = here.bound
    return here


_bounds: dict[object, Bounds] = {}
"""Bounds of scenes: policies and what predictions cost are not in them."""
_MOST_BOUNDS = 10_000

_of_the_run = {name: getattr(ReplayOptions(), name) for name in ("mix", "discipline", "chunks", "engine", "cold")}
"""Options of a run rather than of its scene, as they are by default."""


@lru_cache(maxsize=6)
def _place(options: ReplayOptions, learns: bool, hardware: Changes, software: Changes, content: object) -> Scene:
    machine = hardware_of(options.machine, hardware)
    costs = software_of(options.software, software, options.machine, hardware)
    return scene_of(options, learns=learns, load=partial(_load, content), hardware=machine, software=costs)


def forget() -> None:
    """Forget what designs share, as a new process has it."""
    _load.cache_clear()
    _place.cache_clear()
    _bounds.clear()
