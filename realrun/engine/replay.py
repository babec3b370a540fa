"""Replay a trace on a real device: from names and files to the simulator's report, with clock "measured"."""

import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ground.errors import InputError
from realrun.device.cuda_device import CudaDevice
from realrun.device.faults import RunError, SlotFault
from realrun.engine.predicting import Predictions
from realrun.engine.replay_loop import Outcome, RealRun
from realrun.engine.rig import Rig
from realrun.engine.small_scene import cut
from sim.compiled.engine import declined
from sim.machine.pieces import goes_whole
from sim.plan import Plan
from sim.report.metrics import Report
from sim.run.prepared import PreparedRun, report
from sim.run.scene import Scene
from sim.run.terms import RunTerms
from sim.workload import Workload
from traces.schema import DECODE


def run(
    prepared: PreparedRun, rig: Rig, *, check: bool = False, stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda steps: None,
) -> Report:  # fmt: skip
    """Execute a run that ``sim.run.prepared.prepare`` made, on the rig of its scene's model.

    The report is the simulator's with clock "measured": compute is device time between events around the kernels,
    stalls are the computing stream's waits for copies, prediction is host time until its answer, and what is left of
    the run is "other", the loop's own overhead. ``settings.link_busy_ms`` is how long copies were under way in decode,
    ``settings.kernels_ms`` what of decode's compute each kind of kernel took.
    A run that ``stop`` ended early says so in ``settings.complete`` and in a note, and reports the steps that were
    finished.

    Raises KeyboardInterrupt if that was before the first step was over, InputError for what the device cannot hold,
    SlotFault where a check finds a wrong, stale or half-copied expert, RunError where the device does not go on.
    """
    prepared = for_device(prepared)
    scene = prepared.scene
    with prepared.naming_eviction((RunError, SlotFault)):
        outcome = execute(scene, prepared.plan, prepared.terms, rig, check=check, stop=stop, progress=progress)
    if not outcome.steps:
        raise KeyboardInterrupt("before the first step was over: there is nothing to report")
    done = scene if outcome.complete else cut(scene, outcome.steps)
    measured = replace(prepared, scene=replace(done, work=outcome.measured(done.work)))
    one = report(measured, outcome.log, engine="streams", clock="measured", notes=_notes(rig, prepared, outcome))
    settings = {
        "complete": outcome.complete, "checked": outcome.checked, "link_busy_ms": outcome.link_busy_ns / 1e6,
        "kernels_ms": _kernels_ms(outcome, done.work),
    }  # fmt: skip
    machine = {"device": rig.device.name, "python": platform.python_version(), "host_experts": rig.store.stored}
    return replace(one, settings=one.settings | settings, provenance=one.provenance | machine)


def _kernels_ms(outcome: Outcome, work: Workload) -> dict[str, float]:
    """Decode's device time in layers (attention and router), shared experts, routed experts and heads."""
    decode = work.schedule.phase == DECODE
    calls = np.repeat(decode, work.n_layers)
    of_calls = {"layers": outcome.layer_ns, "shared": outcome.shared_ns, "experts": outcome.experts_ns}
    parts = {name: ns[calls] for name, ns in of_calls.items()} | {"heads": outcome.head_ns[decode]}
    return {name: float(ns.sum()) / 1e6 for name, ns in parts.items()}


def execute(
    scene: Scene, plan: Plan, terms: RunTerms, rig: Rig, *, check: bool = False, keep_outputs: bool = False,
    stop: Callable[[], bool] = lambda: False, progress: Callable[[int], None] = lambda steps: None,
) -> Outcome:  # fmt: skip
    """As ``run``, but everything that was measured instead of a report; ``keep_outputs``: each step's logits too."""
    kind = RealRun
    reason = not_compiled(rig, scene.work, plan)
    if reason is not None and plan.scorer is not None:
        raise InputError(f"a plan with a scorer runs in a compiled loop alone: {reason}")
    if reason is None:
        from realrun.engine.compiled_run import CompiledRun as kind  # it imports numba

    layers = rig.layers_for(scene)
    predictions = Predictions(rig.device, scene.software, scene.hardware, scene.model.hidden)
    one = kind(
        rig, layers, scene.work, scene.trace.experts, plan, terms, predictions, room=rig.room_for(terms.slots),
        check=check, keep_outputs=keep_outputs, stop=stop, progress=progress,
    )  # fmt: skip
    return one.execute()


def not_compiled(rig: Rig, work: Workload, plan: Plan) -> str | None:
    """Why a run of ``plan`` on ``rig`` has its loop in Python, in a line; None if it is compiled."""
    if isinstance(rig.device, CudaDevice) and not rig.device.copies_by_driver:
        return "the driver's own functions cannot be called"
    return declined(work, plan)


def for_device(run: PreparedRun) -> PreparedRun:
    """``run`` in the pieces that a device copies in: a simulation that is compared with a device is told of them."""
    return replace(run, terms=device_terms(run.terms, run.scene.work))


def device_terms(terms: RunTerms, work: Workload) -> RunTerms:
    """``terms`` in the pieces that a device copies in."""
    return replace(terms, chunks=1) if goes_whole(max(work.expert_bytes)) else terms


def _notes(rig: Rig, prepared: PreparedRun, outcome: Outcome) -> tuple[str, ...]:
    notes = ["measured; before the first step libraries, kernels and graphs were warmed up, which counts nowhere"]
    scene = prepared.scene
    if reason := not_compiled(rig, scene.work, prepared.plan):
        notes.append(f"the host's loop was Python: {reason}")
    if rig.store.stored < rig.store.experts:
        notes.append(rig.store.describe())
    if outcome.checked:
        notes.append(f"{outcome.checked:,} experts were compared with their stamps before and after their kernels")
    if not outcome.complete:
        notes.append(
            f"INCOMPLETE: interrupted after {outcome.steps} of {scene.work.schedule.n_steps} steps; counters of "
            f"prefetches and bytes include the step under way"
        )
    return tuple(notes)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """What tells whether the person has asked to stop (SIGINT), within; a second time ends the process as usual."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)
        print("stopping; what was measured so far is reported", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
