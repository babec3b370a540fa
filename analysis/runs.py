"""Replays of many designs, over as many processes as wanted: the results do not depend on how many."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ground.progress import Watch
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report, ratio
from sim.report.shares import Shares, shares
from sim.run.prepared import prepare
from sim.run.scene import Scene, SceneOptions, scene_of
from sim.run.terms import TooSmallError

_THREADS = "OMP_NUM_THREADS"
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Design:
    """One replay: a policy with its parameters, and everything else that it takes."""

    scene: SceneOptions
    policy: NamedPolicy


@dataclass(frozen=True)
class Replayed:
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
        return shown(self.design, self.report)


def shown(design: Design, r: Report) -> dict[str, Any]:
    """What tables and figures show of the report ``r`` of a design."""
    d = r.decode
    numbers = {
        "tokens_per_s": r.tokens_per_s,
        "hit_ratio": d.hit_ratio,
        "late_ratio": d.late_ratio,
        "miss_ratio": d.miss_ratio,
        "lookups_per_token": ratio(d.lookups, d.tokens),
        "gib_per_token": ratio(d.moved, d.tokens * 2**30),
        "wasted": ratio(d.link_bytes["wasted"], d.moved) or 0.0,
        "predict_ms_per_token": ratio(d.time_ms["predict"], d.tokens),
        "tables_mib": r.gpu_bytes["policy"] / 2**20,
        "ttft_ms": r.ttft_ms.mean,
        "compute_bound": r.bounds["compute_tokens_per_s"],
        "link_bound": r.bounds["link_tokens_per_s"],
        "efficiency": r.efficiency,
    }
    return {
        "policy": design.policy.name,
        "set": design.policy.values,
        "software": Path(design.scene.software).stem,
        "tokens": d.tokens,
        **{name: None if value is None else float(f"{value:.5g}") for name, value in numbers.items()},
    }


def run(designs: Sequence[Design], workers: int = 1, what: str = "replaying") -> list[Replayed]:
    """Replay all designs and return their outcomes in the same order.

    ``workers`` processes share them; progress goes to standard error. Raises InputError for what a person got wrong.
    """
    return spread(replayed_design, designs, workers, what)


def spread(task: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int, what: str) -> list[_Result]:
    """``[task(job) for job in jobs]`` over ``workers`` processes, with progress; ``task`` is a module's function."""
    results: dict[int, _Result] = {}
    with Watch(what) as watch, closing(_as_completed(task, jobs, min(workers, len(jobs)))) as done:
        for index, result in done:
            results[index] = result
            watch.at(len(results) / len(jobs), f"{len(results)} of {len(jobs)}")
    return [results[index] for index in range(len(jobs))]


def _as_completed(
    task: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int
) -> Generator[tuple[int, _Result], None, None]:
    """The number of each job and its result, as they come."""
    if workers <= 1:
        yield from enumerate(map(task, jobs))
        return
    # Spawned: a fork would copy the threads' locks of BLAS and of the progress bar as they happen to stand.
    context = multiprocessing.get_context("spawn")
    with _one_thread_each(), ProcessPoolExecutor(workers, context, _end_with_the_parent) as pool:
        waiting = {pool.submit(task, job): index for index, job in enumerate(jobs)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_the_parent() -> None:
    """Have this worker end once who began it is gone: a pool's workers would run on what waits, with nobody to ask."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


def replayed_design(design: Design) -> Replayed:
    """Replay one design. Raises InputError."""
    here = scene_at(design.scene)
    run = prepare(here, design.policy.name, design.policy.values)
    done = run.execute()
    return Replayed(design, run.simulated(done), shares(here.trace, here.work, done.log))


def unless_too_small(design: Design) -> Replayed | None:
    """The outcome, or None where the cache is too small for the policy. Raises InputError."""
    try:
        return replayed_design(design)
    except TooSmallError:
        return None


@lru_cache(maxsize=4)
def scene_at(options: SceneOptions) -> Scene:
    """The scene of these options; the last few are kept, so designs of one scene should follow each other."""
    return scene_of(options)
