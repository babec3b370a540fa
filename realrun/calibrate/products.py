"""Arithmetic, and what it costs to launch it: large matrix products, single kernels, the host's wait for an answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from realrun.calibrate.machine import Machine
from realrun.calibrate.timing import Timing, host_ns


@dataclass(frozen=True)
class Arithmetic:
    """TFLOP/s of dense bf16 products."""

    square: float
    """A large square product, the most that the device reaches."""
    ffn: float
    """A prompt's rows times a matrix of an expert."""


def arithmetic(
    machine: Machine, square: int = 8192, rows: int = 2048, hidden: int = 4096, width: int = 14336
) -> Arithmetic:
    """Products of random matrices: (square x square) squared, and (rows x hidden) times (hidden x width)."""
    return Arithmetic(_tflops(machine, square, square, square), _tflops(machine, rows, hidden, width))


def _tflops(machine: Machine, rows: int, inner: int, columns: int) -> float:
    a, b = machine.random(rows, inner), machine.random(inner, columns)
    taken = machine.time(lambda: a @ b, repeats=max(5, machine.repeats // 2))
    return 2e-3 * rows * inner * columns / taken.ns


@dataclass(frozen=True)
class Launches:
    """What starting work costs."""

    host: Timing
    """The host's time to launch one small kernel from Python."""
    kernel: Timing
    """One small kernel in a row of launched ones."""
    graphed: Timing
    """One small kernel in a row within a CUDA graph."""
    graph: Timing
    """The host's time to launch a graph of one small kernel."""
    wait: Timing
    """How much longer a layer of two kernels takes if the host waits for the first one's answer before it launches the
    second: copy of a few numbers to pinned memory, event, launch."""


def launches(machine: Machine, row: int = 64) -> Launches:
    """Rows of ``row`` small kernels, launched one by one, as a graph, and with the host waiting for each."""
    numbers = machine.random(1024)
    answer = machine.torch.empty(8, dtype=machine.torch.bfloat16, pin_memory=machine.cuda)

    def kernel() -> None:
        numbers.add_(1e-3)

    def waiting() -> None:
        kernel()
        answer.copy_(numbers[:8], non_blocking=True)
        if machine.cuda:
            machine.torch.cuda.current_stream().synchronize()
        kernel()

    kernels, waits, graphs = _row_of(kernel, row), _row_of(waiting, row // 2), _row_of(machine.graph(kernel), row)
    taken = machine.times({"launched": [kernels], "graph": [machine.graph(kernels)], "waiting": [waits]})
    return Launches(
        host=_launching(machine, kernels).over(row),
        kernel=taken["launched"].over(row),
        graphed=taken["graph"].over(row),
        graph=_launching(machine, graphs).over(row),
        wait=taken["waiting"].over(row // 2, beyond=taken["launched"].ns),
    )


def _row_of(work: Callable[[], Any], count: int) -> Callable[[], None]:
    def row() -> None:
        for _ in range(count):
            work()

    return row


def _launching(machine: Machine, launch: Callable[[], None]) -> Timing:
    """The host's own time of launching what the device's queue takes without blocking."""
    samples = []
    for _ in range(machine.repeats):
        machine.synchronize()
        samples.append(host_ns(launch))
    machine.synchronize()
    return Timing.of(samples)
