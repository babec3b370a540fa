"""Command line of the simulator: ``python -m sim``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.addresses import ends_if_few
    from ground.interrupts import ends_quietly

    ends_quietly()
    ends_if_few()

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ground.command_line import Help, command_line, run
from ground.errors import InputError
from ground.files import keep_apart
from ground.output import show, written
from ground.progress import say
from ground.text import printable
from ground.whole_number import WholeNumber
from sim.advise.command import advise
from sim.listings import Json, hardware, hosts, memory, models, policies, software
from sim.policies.named import NamedPolicy, every_policy
from sim.report.metrics import Report
from sim.run.engines import Engine
from sim.run.faults import SimulationError
from sim.run.replay_options import ReplayOptions
from sim.run.scene import Scene, code_version, lacking, scene_of
from sim.run.terms import TooSmallError
from sim.sweep.command import sweep
from traces.arrays import shown as shown_path

app = command_line(
    "sim",
    "Replay routing traces of Mixture-of-Experts models under any expert-offloading policy, in simulated time.",
    code_version,
)

_TracePath = Annotated[Path | None, Help("the trace to replay, .npz; for several use --mix")]
_USUAL = ReplayOptions()


@app.command(name="replay")
def replay_command(
    trace: _TracePath = None,
    /,
    *,
    policy: Annotated[
        str, Help("a name of `python -m sim policies`, or module:Class; with parameters: name,key=value,...")
    ] = "lru",
    set_: Annotated[list[str] | None, Help("parameters of the policy, each key=value")] = None,
    options: ReplayOptions = _USUAL,
    json: Json = None,
    timeline: Annotated[Path | None, Help("write a Perfetto timeline here, .json or .json.gz")] = None,
) -> None:
    """Replay a trace, or several in turn, under one policy and report throughput, hits, latency and the bounds.

    For example:

    ```
    python -m sim replay traces/mixtral_law.npz --policy lru
    python -m sim replay traces/mixtral_law.npz --policy popularity,by=domain
    python -m sim replay traces/mixtral_law.npz --cache 16GiB --hardware rtx-4090
    python -m sim replay traces/mixtral_law.npz --batch 4 --timeline run.json.gz
    python -m sim replay --mix traces/mixtral_code.npz traces/mixtral_math.npz
    ```
    """
    from sim.report.tables import report_view
    from sim.report.timeline import timeline as open_timeline

    options = options.of(trace, {"--json": json, "--timeline": timeline})
    if options.cold and timeline is not None:
        raise InputError("--timeline: shows one run, and --cold makes one of each sequence; expected one of the two")
    one = NamedPolicy.of(policy, "--set", set_ or ())
    here = scene_of(options, learns=one.kind.learns)
    _announce(here, "simpy" if timeline else options.engine)
    watch = open_timeline(timeline, here.work.n_layers, here.work.n_experts) if timeline else nullcontext()
    with written(json) as write, watch as observer:
        with _progress(here) as advance:
            result = options.replay(here, one, advance(one.name), observer)
        show(report_view(result), json)  # before what a full disk may refuse
        write(result.to_json())
    if timeline is not None:
        say(f"{printable(shown_path(timeline))}: to be opened in https://ui.perfetto.dev")


@app.command
def compare(
    trace: _TracePath = None,
    /,
    *,
    policy: Annotated[
        list[str] | None, Help("policies to compare, name or name,key=value,...; default: all that the trace allows")
    ] = None,
    options: ReplayOptions = _USUAL,
    draw: Annotated[bool, Help("show the speeds as bars too")] = False,
    json: Json = None,
) -> None:
    """Replay a trace under several policies at equal GPU bytes and print one table; a star marks references.

    A policy that cannot be run is a row that says so, with the reason below; the command's status is then 2.

    For example:

    ```
    python -m sim compare traces/mixtral_law.npz
    python -m sim compare traces/mixtral_law.npz --policy lru lfu,counts=always
    python -m sim compare traces/mixtral_law.npz --cache 50% --hardware h200
    python -m sim compare --mix traces/mixtral_code.npz traces/mixtral_math.npz
    ```
    """
    from sim.report.bars import comparison_bars
    from sim.report.tables import Comparison

    options = options.of(trace, {"--json": json})
    wanted = [NamedPolicy.of(label) for label in policy or every_policy()]
    here = scene_of(options, learns=any(one.kind.learns for one in wanted))
    if policy is None:
        unfit = {one.name: why for one in wanted if (why := lacking(here, one.kind))}
        for name, why in unfit.items():
            say(f"left out: {name} ({why if here.ubatch else 'the trace lacks what it learns from or reads'})")
        wanted = [one for one in wanted if one.name not in unfit]
    _announce(here, options.engine)
    results: list[Report] = []
    failed: dict[str, Exception] = {}
    with written(json) as write:
        with _progress(here) as advance:
            for one in wanted:
                try:
                    results.append(options.replay(here, one, advance(one.label)))
                except (InputError, SimulationError) as wrong:
                    if isinstance(wrong, TooSmallError) and here.budget < max(here.model.expert_bytes):
                        raise
                    failed[one.label] = wrong
        if failed and not results:
            raise next(iter(failed.values()))
        small = [label for label, wrong in failed.items() if policy is None and isinstance(wrong, TooSmallError)]
        if small:
            say(f"left out: {'; '.join(small)} (--cache {options.cache} is too small for what they keep)")
        reasons = {label: str(wrong) for label, wrong in failed.items() if label not in small}
        show(Comparison(results, reasons), json)  # before what a full disk may refuse
        if draw:
            show(comparison_bars(results), json)
        write(
            [result.to_json() for result in results]
            + [{"policy": label, "error": reason} for label, reason in reasons.items()]
        )
    if reasons:
        each = "; ".join(f"{label}: {reason}" for label, reason in reasons.items())
        raise InputError(f"{len(reasons)} of {len(wanted)} policies failed: {each}")


for listing in (policies, models, hardware, hosts, software, memory):
    app.command(listing)
app.command(sweep)
app.command(advise)


@app.command
def bench(
    *,
    tokens: Annotated[WholeNumber, Help("decode tokens of the synthetic trace that SimPy runs")] = 2000,
    long: Annotated[WholeNumber, Help("decode tokens of the one that the compiled engine runs")] = 50_000,
    sweep: Annotated[Path | None, Help("measure a sweep of 1,000 designs over this trace, and nothing else")] = None,
    workers: Annotated[WholeNumber, Help("processes of that sweep")] = 2,
    regroup: Annotated[bool, Help("measure how long --regroup kmeans takes for one split, and nothing else")] = False,
    json: Json = None,
) -> None:
    """Measure how fast the engines are, beside a bare SimPy loop and other caches; or a sweep, or regrouping.

    For example:

    ```
    python -m sim bench
    python -m sim bench --sweep traces/mixtral_law.npz
    python -m sim bench --regroup
    ```
    """
    from sim.bench.engines import run_bench
    from sim.bench.speeds import bench_json, bench_view

    keep_apart([sweep], {"--json": json})
    if sweep is not None and regroup:
        raise InputError("--sweep, --regroup: each measures nothing else; expected one of the two")
    if sweep is not None:
        return _bench_sweep(sweep, workers, json)
    if regroup:
        return _bench_regrouping(json)
    rows, caches = run_bench(tokens, long)
    with written(json) as write:
        write(bench_json(rows, caches))
    show(bench_view(rows, caches), json)


def _bench_sweep(trace: Path, workers: int, json: str | None) -> None:
    from sim.bench.sweeps import measure_sweep, sweep_json, sweep_view

    speed = measure_sweep(trace, workers)
    with written(json) as write:
        write(sweep_json(speed))
    show(sweep_view(speed), json)


def _bench_regrouping(json: str | None) -> None:
    from sim.bench.regrouping import measure_regrouping, regrouping_json, regrouping_view

    rows = measure_regrouping()
    with written(json) as write:
        write(regrouping_json(rows))
    show(regrouping_view(rows), json)


def _announce(here: Scene, engine: Engine) -> None:
    """Say why the first run takes longer."""
    from sim.compiled.availability import SHORT, compiles_first

    if (engine == "compiled" or (engine == "auto" and len(here.work.expert) >= SHORT)) and compiles_first():
        say("compiling the engine, once for this version: about ten seconds")


@contextmanager
def _progress(here: Scene) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """Progress bars on standard error, a policy after the other; nothing where that is not a terminal."""
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip

    def advance(name: str) -> Callable[[int], None]:
        task = bar.add_task(name, total=here.work.schedule.n_steps)
        return lambda done: bar.update(task, completed=done)

    with bar:
        yield advance


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments, failures=(SimulationError,))


if __name__ == "__main__":
    sys.exit(main())
