"""How fast a sweep is: designs a second, beside the same designs as replays of their own.

The sweep makes every plan anew, in a folder of its own for plans; compiled code is there beforehand. A replay of its
own loads its traces, finds its plan on disk and replays, in a process that is already there. A few of them, evenly
spread, stand for all.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from ground.errors import InputError
from sim.compiled.folder import compiler_cache
from sim.sweep.design import Design
from sim.sweep.execute import forget, run_design
from sim.sweep.identity import identity
from sim.sweep.log import Log
from sim.sweep.run import carry_out
from sim.sweep.spec import MOST_DESIGNS, Spec, with_axes
from sim.sweep.table import check, write_table
from sim.sweep.workers import local_workers

POLICIES = (
    "on-demand", "lru,scope=layer", "lru", "lfu", "previous-token", "popularity,by=domain", "pregated-moe", "cache-moe",
    "fmoe", "domoe",
)  # fmt: skip
SIZES, LINKS = 10, 10
SINGLES = 20


@dataclass(frozen=True)
class SweepSpeed:
    """One measurement: designs, processes, and seconds of the sweep and of as many replays by themselves.

    ``processor_seconds`` are those that the processes worked: on a machine that others use too they say more.
    """

    designs: int
    workers: int
    seconds: float
    processor_seconds: float
    designs_per_s: float
    singles_seconds: float
    ratio: float


def measure_sweep(trace: Path, workers: int) -> SweepSpeed:
    """Sweep policy x cache x link, 1,000 designs. Raises InputError, and ModuleNotFoundError without pyarrow."""
    check()
    if workers < 1:
        raise InputError(f"--workers: {workers}; give at least 1")
    axes = [f"policy={';'.join(POLICIES)}", f"cache=15%:{10 + 5 * SIZES}%:5%", f"hardware.link.gbps=20:{20 * LINKS}:20"]
    designs = list(with_axes(Spec(), str(trace), axes).space.grid(MOST_DESIGNS))
    _alone(designs[0])  # compiles, where that was not done
    with _plans_made_anew(), tempfile.TemporaryDirectory() as folder:
        begin, worked = time.perf_counter(), _worked()
        with Log(Path(folder)) as log:
            with local_workers(workers) as runner:
                every = carry_out(designs, log, runner)
            write_table(log, every)
            seconds, worked = time.perf_counter() - begin, _worked() - worked
            if wrong := next((row.reason for row in log.in_order(key for key, _ in every) if row.status != "ok"), None):
                raise InputError(f"a design of the benchmark was not run: {wrong}")
        single = [_alone(designs[len(designs) * one // SINGLES]) for one in range(SINGLES)]
    singles = len(designs) * sum(single) / len(single)
    return SweepSpeed(len(designs), workers, seconds, worked, len(designs) / seconds, singles, singles / seconds)


def _worked() -> float:
    """Processor seconds of this process and of those that it has ended."""
    return sum(os.times()[:4])


def _alone(design: Design) -> float:
    """Seconds of a replay that shares nothing but its plan on disk."""
    run_design(design, key := identity(design))
    forget()
    begin = time.perf_counter()
    row = run_design(design, key)
    if row.status != "ok":
        raise InputError(f"the benchmark's own design cannot be run: {row.reason}")
    return time.perf_counter() - begin


@contextmanager
def _plans_made_anew() -> Iterator[None]:
    """A cache folder with compiled code and nothing else."""
    before, compiled = os.environ.get("MOE_REPLAY_CACHE"), compiler_cache()
    with tempfile.TemporaryDirectory() as folder:
        if compiled is not None:
            shutil.copytree(compiled, Path(folder) / compiled.name)
        os.environ["MOE_REPLAY_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("MOE_REPLAY_CACHE")
            if before is not None:
                os.environ["MOE_REPLAY_CACHE"] = before


def sweep_view(speed: SweepSpeed) -> Table:
    """The measurement as a table."""
    table = Table(title="speed of a sweep", title_justify="left")
    for heading in (
        "designs",
        "processes",
        "seconds",
        "processor s",
        "designs/s",
        f"as single replays, s (from {SINGLES})",
        "ratio",
    ):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{speed.designs:,}", str(speed.workers), f"{speed.seconds:.1f}", f"{speed.processor_seconds:.1f}",
        f"{speed.designs_per_s:.1f}", f"{speed.singles_seconds:,.0f}", f"{speed.ratio:.1f}",
    )  # fmt: skip
    return table


def sweep_json(speed: SweepSpeed) -> dict[str, object]:
    """The measurement as data."""
    return {"sweep": asdict(speed)}
