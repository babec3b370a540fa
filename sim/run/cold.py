"""Runs in which every sequence begins with an empty cache, as published replays of routing traces do.

Each sequence is a run of its own: it is planned alone, so that whatever a policy learns on the way is forgotten too,
and begins with all slots free and nothing on the link. Their logs are joined, one after another, into one report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.bounds import Bounds
from sim.log import Counters, Log
from sim.plan import Discipline
from sim.report.metrics import Report
from sim.run.engines import Engine
from sim.run.prepared import PreparedRun, prepare, report
from sim.run.scene import Scene
from sim.workload import batched, workload
from traces.schema import DECODE

NOTE = "each sequence begins with an empty cache (--cold)"


def replay_cold(
    scene: Scene, policy: str, values: Mapping[str, object] | None = None, *, discipline: Discipline | None = None,
    chunks: int | None = None, engine: Engine = "auto", progress: Callable[[int], None] = lambda steps: None,
) -> Report:  # fmt: skip
    """As ``sim.run.prepared.replay``, the cache being empty where a sequence begins.

    Raises InputError, also for sequences that decode together: they share a cache.
    """
    if scene.regroup is not None:
        raise InputError("--cold: sequences run one by one; expected no --regroup")
    if scene.batch != 1:
        raise InputError(f"--cold: {scene.batch} sequences decode together and share a cache; expected --batch 1")
    runs: list[PreparedRun] = []
    done = []
    before = 0
    for one in _sequences(scene):
        runs.append(prepare(one, policy, values, discipline=discipline, chunks=chunks))

        def told(count: int, before: int = before) -> None:
            progress(before + count)

        done.append(runs[-1].execute(engine=engine, progress=told))
        before += one.work.schedule.n_steps
    most = max(run.plan.gpu_bytes for run in runs)
    whole = replace(runs[0], scene=scene, plan=replace(runs[0].plan, gpu_bytes=most))
    bound = _joined_bounds([run.scene for run in runs])
    own = [run.plan.note for run in runs[1:] if run.plan.note not in ("", runs[0].plan.note)]
    notes = dict.fromkeys([NOTE, *own, *(note for execution in done for note in execution.notes)])
    engines = " and ".join(dict.fromkeys(execution.engine for execution in done))
    log = joined([execution.log for execution in done])
    cold = report(whole, log, engine=engines, clock="simulated", notes=list(notes), bound=bound)
    return replace(cold, settings=cold.settings | {"cold": True})


def _sequences(scene: Scene) -> list[Scene]:
    """A scene of each sequence, in the order in which they run."""
    traces = (scene.trace.take(np.array([number])) for number in range(scene.trace.n_sequences))
    return [
        replace(scene, trace=trace, work=workload(trace, scene.model, scene.hardware, batched(trace, 1, scene.ubatch)))
        for trace in traces
    ]


def _joined_bounds(scenes: Sequence[Scene]) -> Bounds:
    """Bounds of runs one after another: what is to be computed and moved adds up."""
    size = np.array([one.work.lookup_bytes[one.work.lookup_phase == DECODE].sum() for one in scenes])
    hits = [one.bound.decode_hit_ratio or 0.0 for one in scenes]
    sums = ("compute_ns", "link_bytes", "decode_compute_ns", "decode_link_bytes", "decode_bare_ns")
    return replace(
        scenes[0].bound,
        **{name: sum(getattr(one.bound, name) for one in scenes) for name in sums},
        decode_hit_ratio=float(np.dot(hits, size) / size.sum()) if size.sum() else None,
    )


def joined(logs: Sequence[Log]) -> Log:
    """The log of runs one after another, each of which begins with an empty cache when the one before has ended."""
    counters = Counters()
    for log in logs:
        for field in fields(Counters):
            if field.name != "landed_unused":
                total, part = getattr(counters, field.name), getattr(log.counters, field.name)
                total[:] = [a + b for a, b in zip(total, part, strict=True)]
    ends = np.cumsum([log.finish[-1] for log in logs])
    begins = np.concatenate([[0], ends[:-1]])
    arrays: dict[str, Any] = {
        field.name: np.concatenate([getattr(log, field.name) for log in logs])
        for field in fields(Log)
        if field.name not in ("counters", "finish", "cold")
    }
    finish = np.concatenate([log.finish + begin for log, begin in zip(logs, begins.tolist(), strict=True)])
    cold = np.cumsum([0, *(len(log.finish) for log in logs[:-1])])
    return Log(finish=finish, counters=counters, cold=cold, **arrays)
