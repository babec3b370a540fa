"""Replays of many designs, over as many processes as wanted: the results do not depend on how many."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from analysis.bootstrap import Shares, shares
from ground.progress import Watch
from sim.report.metrics import Report
from sim.run.prepared import prepare
from sim.run.scene import Scene, SceneOptions, scene_of

_THREADS = "OMP_NUM_THREADS"
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Design:
    """One replay: a policy with its parameters, and everything else that it takes."""

    scene: SceneOptions
    policy: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a replay gave: its report, and what each sequence had of it."""

    design: Design
    report: Report
    shares: Shares

    @property
    def tokens_per_s(self) -> float:
        """Decode throughput."""
        return self.report.tokens_per_s or 0.0

    def to_json(self) -> dict[str, Any]:
        """What tables and figures show of it."""
        r = self.report
        d = r.decode
        moved = d.link_bytes["demand"] + d.link_bytes["prefetch"]
        return {
            "policy": self.design.policy,
            "set": self.design.values,
            "software": Path(self.design.scene.software).stem,
            "tokens": d.tokens,
            "tokens_per_s": _rounded(r.tokens_per_s),
            "hit_ratio": _rounded(d.hit_ratio),
            "prefetch_hit_ratio": _rounded(d.prefetch_hits / d.lookups if d.lookups else None),
            "late_ratio": _rounded(d.late_ratio),
            "miss_ratio": _rounded(d.miss_ratio),
            "gib_per_token": _rounded(moved / d.tokens / 2**30 if d.tokens else None),
            "wasted": _rounded(d.link_bytes["wasted"] / moved if moved else 0.0),
            "predict_ms_per_token": _rounded(d.time_ms["predict"] / d.tokens if d.tokens else None),
            "tables_mib": _rounded(r.gpu_bytes["policy"] / 2**20),
            "ttft_ms": _rounded(r.ttft_ms.mean),
            "compute_bound": _rounded(r.bounds["compute_tokens_per_s"]),
            "link_bound": _rounded(r.bounds["link_tokens_per_s"]),
            "efficiency": _rounded(r.efficiency),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def run(designs: Sequence[Design], workers: int = 1, what: str = "replaying") -> list[Outcome]:
    """Replay all designs and return their outcomes in the same order.

    ``workers`` processes share them; progress goes to standard error. Raises InputError for what a person got wrong.
    """
    return spread(replayed_design, designs, workers, what)


def spread(task: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int, what: str) -> list[_Result]:
    """``[task(job) for job in jobs]`` over ``workers`` processes, with progress; ``task`` is a module's function."""
    results: dict[int, _Result] = {}
    with Watch(what) as watch:
        if min(workers, len(jobs)) <= 1:
            for index, job in enumerate(jobs):
                results[index] = task(job)
                watch.at(len(results) / len(jobs), f"{len(results)} of {len(jobs)}")
            return list(results.values())
        # Spawned: a fork would copy the threads' locks of BLAS and of the progress bar as they happen to stand.
        context = multiprocessing.get_context("spawn")
        with _one_thread_each(), ProcessPoolExecutor(min(workers, len(jobs)), context) as pool:
            waiting = {pool.submit(task, job): index for index, job in enumerate(jobs)}
            try:
                for future in as_completed(waiting):
                    results[waiting[future]] = future.result()
                    watch.at(len(results) / len(jobs), f"{len(results)} of {len(jobs)}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[index] for index in range(len(jobs))]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """New processes use one thread: the processes are the parallelism."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


def replayed_design(design: Design) -> Outcome:
    """Replay one design. Raises InputError."""
    here = scene_at(design.scene)
    run = prepare(here, design.policy, design.values)
    done = run.execute()
    return Outcome(design, run.simulated(done), shares(here.trace, here.work, done.log))


@lru_cache(maxsize=4)
def scene_at(options: SceneOptions) -> Scene:
    """The scene of these options; the last few are kept, so designs of one scene should follow each other."""
    return scene_of(options)
