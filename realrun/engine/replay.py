"""Replay a trace on a real device: from names and files to the simulator's report, with clock "measured"."""

import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.text import amount
from realrun.device.copy_link import chunks_of
from realrun.device.devices import Device, open_device
from realrun.device.faults import RunError, SlotFault
from realrun.device.host_store import HostStore, host_bytes
from realrun.device.slots import Room
from realrun.engine.experts import expert_size
from realrun.engine.layers import Layers
from realrun.engine.predicting import Predictions
from realrun.engine.replay_loop import Outcome, RealRun, Stage
from sim.bounds import bounds
from sim.log import DECODE, PREFILL
from sim.model.spec import ModelSpec
from sim.plan import Discipline, Plan
from sim.policies import blaming
from sim.report.metrics import Report
from sim.run.cache_size import parse_capacity
from sim.run.engines import Execution
from sim.run.scene import Scene, describe, scene
from sim.run.terms import Terms, settle
from sim.workload import Schedule, Workload, cached_tokens, workload

WIDTHS = ", widths / "
"""What the name of a model whose widths were divided says."""


@dataclass
class Rig:
    """One model's experts and layers on one device, made once for all runs of a comparison; see ``open_rig``."""

    device: Device
    store: HostStore
    model: ModelSpec
    seed: int = 0
    layers: Layers | None = None
    room: Room | None = None
    slot_bytes: int = 0
    """What the room has been made for."""

    def stage(self, scene: Scene) -> Stage:
        """What a run of ``scene`` needs; the model's resident part is made anew if its contexts are longer."""
        schedule = scene.work.schedule
        context = int(cached_tokens(scene.trace, schedule).max(initial=1))
        prompt = int(np.diff(schedule.offsets)[schedule.phase == PREFILL].max(initial=1))
        if self.layers is None or self.layers.context < context or self.layers.prompt < prompt:
            self.layers = None
            self.layers = Layers(self.device, self.model, context, prompt, self.seed)
        return Stage(self.device, self.store, self.layers, self.model)


@contextmanager
def open_rig(
    model: ModelSpec, device: str = "cuda", *, shared: int | None = None, limit: int | None = None, seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Rig]:  # fmt: skip
    """Put the experts of ``model`` into pinned host memory for runs on ``device``.

    Args:
        model: experts of one size, in bf16.
        device: cuda, cuda:N or cpu.
        shared: store only so many experts, each standing for several.
        limit: bytes of host memory that may be used.
        seed: of the random weights.
        say: told in a line what takes long.

    Raises InputError for a device that is not there, too little memory of either kind, or memory that cannot be pinned.
    """
    size, experts = expert_size(model), model.routed_layers * model.experts
    if shared is not None and shared < 1:
        raise InputError(f"--shared {shared}; expected at least 1 expert in host memory")
    with open_device(device) as opened:
        stored = min(experts, shared or experts)
        say(f"host memory: {amount(host_bytes(stored, size))} for {stored} experts of {amount(size)}")
        store = HostStore(opened, experts, size, shared=shared, limit=limit, scale=model.hidden**-0.5, seed=seed)
        say(f"{store.describe()}, in {store.seconds:.1f} s")
        rig = Rig(opened, store, model, seed)
        try:
            yield rig
        finally:
            opened.synchronize()
            rig.layers, rig.room = None, None
            store.close()


def run(
    scene: Scene,
    plan: Plan,
    rig: Rig,
    *,
    policy: str = "",
    parameters: dict[str, Any] | None = None,
    given: Mapping[str, object] | None = None,
    discipline: Discipline | None = None,
    chunks: int | None = None,
    check: bool = False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda steps: None,
) -> Report:
    """Execute ``plan``, made for ``scene`` by ``sim.run.scene.plan_for``, on the rig of the scene's model.

    The report is the simulator's with clock "measured": compute is device time between events around the kernels,
    stalls are the computing stream's waits for copies, prediction is host time until its answer, and what is left of
    the run is "other", the loop's own overhead. ``settings.link_busy_ms`` is how long copies were under way in decode,
    ``settings.kernels_ms`` what of decode's compute each kind of kernel took.
    A run that ``stop`` ended early says so in ``settings.complete`` and in a note, and reports the steps that were
    finished.

    Raises KeyboardInterrupt if that was before the first step was over, InputError for what the device cannot hold,
    SlotFault where a check finds a wrong, stale or half-copied expert, RunError where the device does not go on.
    """
    how: dict[str, Any] = {"check": check, "stop": stop, "progress": progress}
    # An eviction rule of the policy's own is as much other people's code as the policy.
    own = not isinstance(plan.eviction, str)
    with blaming(f"policy {policy}: eviction", (RunError, SlotFault)) if own else nullcontext():
        outcome = execute(scene, plan, rig, discipline=discipline, chunks=chunks, **how)
    terms = terms_of(scene, plan, discipline, chunks)
    if not outcome.steps:
        raise KeyboardInterrupt("before the first step was over: there is nothing to report")
    done = scene if outcome.complete else cut(scene, outcome.steps)
    measured = _rescheduled(done, outcome.measured(done.work))
    execution = Execution(outcome.log, "simpy", _notes(rig, scene, outcome))
    report = describe(measured, plan, policy, parameters or {}, given or {}, execution, terms)
    settings = {**report.settings, "engine": "streams", "complete": outcome.complete, "checked": outcome.checked}
    settings["link_busy_ms"] = outcome.link_busy_ns / 1e6
    settings["kernels_ms"] = _kernels_ms(outcome, done.work)
    return replace(
        report, clock="measured", settings=settings, provenance={**report.provenance, **_machine(rig)},
    )  # fmt: skip


def _kernels_ms(outcome: Outcome, work: Workload) -> dict[str, float]:
    """Decode's device time in layers (attention and router), shared experts, routed experts and heads."""
    decode = work.schedule.phase == DECODE
    calls = np.repeat(decode, work.n_layers)
    of_calls = {"layers": outcome.layer_ns, "shared": outcome.shared_ns, "experts": outcome.experts_ns}
    parts = {name: ns[calls] for name, ns in of_calls.items()} | {"heads": outcome.head_ns[decode]}
    return {name: float(ns.sum()) / 1e6 for name, ns in parts.items()}


def execute(
    scene: Scene, plan: Plan, rig: Rig, *, discipline: Discipline | None = None, chunks: int | None = None,
    **options: Any,
) -> Outcome:  # fmt: skip
    """As ``run``, but everything that was measured instead of a report; ``options`` are those of ``RealRun``."""
    terms = terms_of(scene, plan, discipline, chunks)
    stage = rig.stage(scene)
    predictions = Predictions(rig.device, scene.software, scene.hardware, scene.model.hidden)
    rig.room = rig.room or Room(rig.device)
    slots = rig.store.refuse_slots(terms.slots, "give a smaller --cache, --shared N or --scale N", rig.slot_bytes)
    rig.slot_bytes = max(rig.slot_bytes, slots)
    one = RealRun(stage, scene.work, scene.trace.experts, plan, terms, predictions, room=rig.room, **options)
    return one.execute()


def terms_of(scene: Scene, plan: Plan, discipline: Discipline | None = None, chunks: int | None = None) -> Terms:
    """As ``sim.run.terms.settle``, in the chunks that a run copies in: the simulator is told of them where they compare."""
    terms = settle(scene.work, plan, scene.budget, discipline, chunks)
    return replace(terms, chunks=chunks_of(max(scene.work.expert_bytes), terms.chunks))


def small_scene(trace: str | Path, cache: str, scale: int, steps: int | None, **options: Any) -> Scene:
    """What ``sim.run.scene.scene`` makes of ``trace`` and ``options``, its model ``scaled``, up to a decode step if given.

    What ``cache`` means is known once the model is. Raises InputError as those do.
    """
    here = scene(trace, cache_size=cache if scale == 1 else "100%", **options)
    if scale != 1:
        here = with_model(here, scaled(here.model, scale), cache)
    return here if steps is None else first_steps(here, steps)


def first_steps(scene: Scene, decode_steps: int) -> Scene:
    """``scene`` up to its so-manyth decode step. Raises InputError unless that is at least 1."""
    if decode_steps < 1:
        raise InputError(f"--steps {decode_steps}; expected at least 1")
    decode = np.flatnonzero(scene.work.schedule.phase == DECODE)
    return scene if len(decode) <= decode_steps else cut(scene, int(decode[decode_steps - 1]) + 1)


def cut(scene: Scene, steps: int) -> Scene:
    """``scene`` up to its so-manyth step, prefills counted."""
    whole = scene.work.schedule
    schedule = Schedule(whole.phase[:steps], whole.offsets[: steps + 1], whole.rows[: whole.offsets[steps]])
    return _rescheduled(scene, workload(scene.trace, scene.model, scene.hardware, schedule))


def _rescheduled(scene: Scene, work: Workload) -> Scene:
    return replace(scene, work=work, bound=bounds(work, scene.budget, scene.hardware.link_bytes_per_s))


def scaled(model: ModelSpec, divisor: int) -> ModelSpec:
    """``model`` with widths and vocabulary divided: the same layers, experts and routes, to try things out.

    Raises InputError if the divisor is below 1 or leaves no width.
    """
    if divisor < 1 or divisor > min(model.hidden, model.expert_ffn, model.vocab) // 4:
        raise InputError(f"--scale {divisor}; expected 1 to {min(model.hidden, model.expert_ffn, model.vocab) // 4}")
    if divisor == 1:
        return model

    def part(width: int) -> int:
        return max(2, width // divisor // 2 * 2) if width else 0

    hidden, inner, attention = part(model.hidden), part(model.expert_ffn), model.attention
    return replace(
        model,
        name=f"{model.name}{WIDTHS}{divisor}",
        hidden=hidden,
        expert_ffn=inner,
        expert_bytes=(2 * model.expert_matrices * hidden * inner,) * model.routed_layers,
        attention=replace(
            attention,
            parameters=max(2 * hidden, attention.parameters // divisor**2),
            kv_width=part(attention.kv_width),
            prefill_width=part(attention.prefill_width),
            decode_width=part(attention.decode_width),
        ),
        vocab=part(model.vocab),
        shared_ffn=part(model.shared_ffn),
        dense_ffn=part(model.dense_ffn),
    )


def with_model(scene: Scene, model: ModelSpec, cache_size: str) -> Scene:
    """``scene`` with another model of the same shape, and the cache that ``cache_size`` means for it."""
    changed = replace(scene, model=model, budget=parse_capacity(cache_size, model.expert_bytes, model.experts))
    return _rescheduled(changed, workload(scene.trace, model, scene.hardware, scene.work.schedule))


def _notes(rig: Rig, scene: Scene, outcome: Outcome) -> tuple[str, ...]:
    notes = ["measured; before the first step libraries, kernels and graphs were warmed up, which counts nowhere"]
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


def _machine(rig: Rig) -> dict[str, Any]:
    return {"device": rig.device.name, "python": platform.python_version(), "host_experts": rig.store.stored}


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
