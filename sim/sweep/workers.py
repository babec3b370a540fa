"""Processes of this machine that run designs. One that dies takes the design with it that it ran, and nothing else."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from sim.compiled.availability import compiles_first
from sim.sweep.row import Row
from sim.sweep.tasks import Batch, Runner, Task, singles

ATTEMPTS = 2
"""How often a design is begun that ends its worker: the first time may have been somebody else's doing."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class _Worker:
    """A process, this end of the pipe to it, and what it still has to run, in order."""

    process: SpawnProcess
    pipe: Connection
    left: list[Task] = field(default_factory=list)


@contextmanager
def local_workers(count: int) -> Iterator[Runner]:
    """What runs designs in ``count`` processes, which end with this block, however that ends.

    A design that ends its process twice is a row that failed.
    """
    crew: list[_Worker] = []
    try:
        yield lambda batches: _rows(batches, crew, count)
    finally:
        _end(crew)


def _rows(batches: Sequence[Batch], crew: list[_Worker], count: int) -> Iterator[Row]:
    """The rows of all designs as they end."""
    waiting = list(batches)[::-1]
    died: dict[str, int] = {}
    alone = compiles_first()  # the first worker compiles; others would do the same beside it
    while waiting or any(worker.left for worker in crew):
        wanted = 1 if alone else min(count, len(waiting) + sum(bool(worker.left) for worker in crew))
        crew += [_started() for _ in range(wanted - len(crew))]
        _hand_out(crew, waiting)
        busy = [worker for worker in crew if worker.left]
        for pipe in wait([worker.pipe for worker in busy]):
            worker = next(one for one in busy if one.pipe is pipe)
            row = _received(worker)
            if row is None:
                crew.remove(worker)
                yield from _after_death(worker, waiting, died)
            else:
                alone = False
                worker.left.pop(0)
                yield row


def run_here(batches: Sequence[Batch]) -> Iterator[Row]:
    """The same in this process: a design that ends it ends the sweep."""
    from sim.sweep.execute import run_design

    for batch in batches:
        for task in batch:
            yield run_design(task.design, task.key)


def _hand_out(crew: list[_Worker], waiting: list[Batch]) -> None:
    for worker in crew:
        if not worker.left and waiting:
            worker.left = list(waiting.pop())
            with suppress(OSError):  # it has died: its pipe says so next
                worker.pipe.send(tuple(worker.left))


def _received(worker: _Worker) -> Row | None:
    """The next row of a worker; None if it has died."""
    try:
        return cast(Row, worker.pipe.recv())
    except (EOFError, OSError):
        return None


def _after_death(worker: _Worker, waiting: list[Batch], died: dict[str, int]) -> Iterator[Row]:
    """Put back what a dead worker has not run; a row for the design that has now ended it too often."""
    worker.pipe.close()
    worker.process.join()
    task, *others = worker.left
    if others:
        waiting.append(tuple(others))
    died[task.key] = died.get(task.key, 0) + 1
    if died[task.key] < ATTEMPTS:
        waiting += singles([task])
    else:
        yield Row(task.key, "failed", f"its process died {ATTEMPTS} times, the last time {_ending(worker.process)}")


def _ending(process: SpawnProcess) -> str:
    code = process.exitcode or 0
    if code >= 0:
        return f"with status {code}"
    out_of_memory = ", as a system does that is out of memory" if -code == signal.SIGKILL else ""
    return f"by signal {signal.Signals(-code).name}{out_of_memory}"


def _started() -> _Worker:
    # Spawned: a fork would copy threads' locks as they happen to stand.
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))  # the processes are the parallelism
    try:
        process = context.Process(target=_work, args=(its,), daemon=True)
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    its.close()
    return _Worker(process, mine)


def _end(crew: list[_Worker]) -> None:
    for worker in crew:
        worker.pipe.close()
        worker.process.kill()
    for worker in crew:
        worker.process.join()


def _work(pipe: Connection) -> None:
    """What a worker does: run batches until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began it decides when it ends
    from sim.sweep.execute import run_design

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            for task in pipe.recv():
                pipe.send(run_design(task.design, task.key))
