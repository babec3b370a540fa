"""Command line of the real runs: ``python -m realrun``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.interrupts import ends_quietly

    ends_quietly()

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, Token

from ground.command_line import run
from ground.whole_number import WholeNumber
from realrun.device.faults import RunError, SlotFault
from sim.machine.prediction_costs import DEFAULT_SOFTWARE
from sim.run.scene import DEFAULT_CACHE, code_version

app = App(
    name="python -m realrun",
    version=code_version,
    help="Run the simulator's policies on a real GPU, and say how far the simulator is from it.",
    help_format="markdown",
    help_on_error=False,
)


def _named(kind: object, tokens: Sequence[Token]) -> Path:
    """A path as written; the name of nothing, which a shell makes of an unset variable, is not this folder."""
    if not tokens[0].value:
        raise ValueError("''; expected a name")
    return Path(tokens[0].value)


Output = Annotated[Path, Parameter(converter=_named)]
Device = Annotated[str, Parameter(help="where to run: cuda, cuda:1, or cpu (slow, to try things out)")]
Scale = Annotated[WholeNumber, Parameter(help="divide the model's widths by this, to try things out")]
Shared = Annotated[
    WholeNumber | None, Parameter(help="experts to hold in host memory, each standing for several; default: all")
]
HostMemory = Annotated[
    str | None, Parameter(help="host memory that may be used, such as 120GiB; default: what the system says is free")
]


@app.command
def calibrate(
    *,
    out: Annotated[Output, Parameter(help="the profile to write, .toml")],
    model: Annotated[
        list[str] | None,
        Parameter(
            consume_multiple=True, negative=(), help="whose experts and attention to time; default: all built in"
        ),
    ] = None,
    quick: Annotated[bool, Parameter(negative=(), help="fewer sizes and repetitions: half a minute")] = False,
    device: Device = "cuda",
) -> None:
    """Measure this machine and write a profile that ``--hardware`` of the simulator loads.

    For example:

    ```
    python -m realrun calibrate --out h200.toml
    python -m realrun calibrate --out h200.toml --model mixtral-8x7b --quick
    python -m sim replay traces/mixtral_law.npz --hardware h200.toml
    ```
    """
    from realrun.calibrate.machine_profile import calibrate_command

    calibrate_command(out, model, quick=quick, device=device)


@app.command
def lookup(
    *,
    json: Annotated[Output | None, Parameter(help="write all times here as well")] = None,
    device: Device = "cuda",
) -> None:
    """Look up in DoMoE's two tables in every way there is, check each against float64 and print how long it takes.

    For example:

    ```
    python -m realrun lookup
    ```
    """
    from realrun.commands import lookup_command

    lookup_command(json, device, _typed())


@app.command
def replay(
    trace: Annotated[Path, Parameter(help="a trace, .npz")],
    /,
    *,
    policy: Annotated[
        list[str],
        Parameter(
            consume_multiple=True,
            negative=(),
            show_default=" ".join,
            help="names of `python -m sim policies`, or module:Class; with parameters: name,key=value,...",
        ),
    ] = ["lru"],  # noqa: B006 (never changed)
    set_: Annotated[
        list[str] | None,
        Parameter(name=["--set"], consume_multiple=True, negative=(), help="policy parameters, key=value"),
    ] = None,
    model: Annotated[str | None, Parameter(help="whose dimensions; default: the trace's own model")] = None,
    cache: Annotated[str, Parameter(help="GPU memory for experts: 64 (slots), 25%, 4000MiB, 16GiB")] = DEFAULT_CACHE,
    steps: Annotated[WholeNumber | None, Parameter(help="decode steps to run; default: all")] = None,
    check: Annotated[
        bool, Parameter(negative=(), help="compare every expert with its stamp before and after its kernels")
    ] = False,
    device: Device = "cuda",
    scale: Scale = 1,
    shared: Shared = None,
    host_memory: HostMemory = None,
    hardware: Annotated[str, Parameter(help="the profile that bounds and policies go by")] = "h200",
    software: Annotated[
        str, Parameter(help="where predictions run: fast, paper or a profile, .toml")
    ] = DEFAULT_SOFTWARE,
    profile: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="traces whose profile split policies learn from"),
    ] = None,
    split: Annotated[str, Parameter(help="which sequences to replay: eval, profile or all")] = "eval",
    batch: Annotated[WholeNumber, Parameter(help="sequences that decode together")] = 1,
    seed: Annotated[WholeNumber, Parameter(help="of random weights, and of policies that draw")] = 0,
    json: Annotated[
        str | None,
        Parameter(name=["--json"], allow_leading_hyphen=True, help="write the report here, - is standard output"),
    ] = None,
) -> None:
    r"""Replay a trace on the GPU with experts of the model's true size: real transfers, real kernels, forced routes.

    Weights are random; the router is run and waited for, and then the trace's route takes its place. Several policies
    run one after another on one store of pinned experts.

    For example:

    ```
    python -m realrun replay traces/mixtral_law.npz --policy lru --steps 200
    python -m realrun replay traces/mixtral_law.npz --policy lru clairvoyant \
        --cache 16GiB --shared 32
    python -m realrun replay traces/mixtral_law.npz --policy lru \
        --device cpu --scale 64 --steps 5 --check
    ```
    """
    from realrun.commands import Asked, replay_command

    replay_command(
        Asked(
            trace, policy, set_ or [], model, hardware, software, cache, profile, split, batch, seed, steps, scale,
            check, shared, host_memory, device, json,
        )
    )  # fmt: skip


@app.command
def validate(
    trace: Annotated[Path, Parameter(help="a trace, .npz")],
    /,
    *,
    policies: Annotated[
        list[str],
        Parameter(consume_multiple=True, negative=(), help="as --policy of replay, each with its parameters"),
    ],
    cache: Annotated[
        list[str],
        Parameter(
            consume_multiple=True, negative=(), show_default=" ".join, help="cache sizes: 25%, 64 (slots), 16GiB"
        ),
    ] = [DEFAULT_CACHE],  # noqa: B006 (never changed)
    folder: Annotated[Output, Parameter(name=["--folder", "-o"], help="where the table, its data and the plot go")],
    hardware: Annotated[
        str | None, Parameter(help="the profile to simulate with; default: this machine is measured first")
    ] = None,
    software: Annotated[str, Parameter(help="what predictions cost; measured: as the profile has it")] = "measured",
    model: Annotated[str | None, Parameter(help="whose dimensions; default: the trace's own model")] = None,
    profile: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="traces whose profile split policies learn from"),
    ] = None,
    split: Annotated[str, Parameter(help="which sequences to replay: eval, profile or all")] = "eval",
    steps: Annotated[WholeNumber | None, Parameter(help="decode steps of each run; default: all")] = None,
    check: Annotated[bool, Parameter(negative=(), help="compare every expert with its stamp as well")] = False,
    baseline: Annotated[bool, Parameter(help="also time accelerate's CPU offload and plain pageable copies")] = True,
    quick: Annotated[bool, Parameter(negative=(), help="measure this machine in less time")] = False,
    seconds: Annotated[
        float, Parameter(help="decode time to measure of each pair; shorter runs are repeated, the fastest counts")
    ] = 2.0,
    device: Device = "cuda",
    scale: Scale = 1,
    shared: Shared = None,
    host_memory: HostMemory = None,
) -> None:
    r"""Run policies at several cache sizes in simulated time and on this machine, and say how far they are apart.

    Both execute the same plans. All runs share one store of pinned experts. The folder gets validation.md, .csv and
    .json, brought up to date after every pair of runs, and at the end .png; before the first pair it stays as it is.

    For example:

    ```
    python -m realrun validate traces/mixtral_law.npz -o out --cache 25% 50% \
        --policies on-demand lru clairvoyant
    python -m realrun validate traces/mixtral_law.npz -o out --policies lru \
        --device cpu --scale 64 --steps 5
    ```
    """
    from realrun.commands import host_bytes_of
    from realrun.validate.validate import Asked, validate_command

    asked = Asked(
        trace, policies, cache, folder, hardware, software, model, profile, split, steps, scale, shared,
        host_bytes_of(host_memory), device, check, baseline, quick, seconds,
    )  # fmt: skip
    validate_command(asked, _typed())


@app.command
def resimulate(
    validation: Annotated[Path, Parameter(help="a validation.json that validate has written")],
    trace: Annotated[Path, Parameter(help="the trace that it was made of, .npz")],
    /,
    *,
    folder: Annotated[Output, Parameter(name=["--folder", "-o"], help="where the table, its data and the plot go")],
    hardware: Annotated[str, Parameter(help="the profile to simulate with: a built-in name or .toml")] = "h200",
) -> None:
    r"""Simulate the pairs of a validation again, with another profile or newer code, against what was measured then.

    For example:

    ```
    python -m realrun resimulate out/validation.json traces/mixtral_law.npz \
        --hardware h200 -o again
    ```
    """
    from realrun.validate.resimulate import resimulate_command

    resimulate_command(validation, trace, folder, hardware, _typed())


@app.command
def baseline(
    *,
    model: Annotated[str, Parameter(help="whose dimensions")] = "mixtral-8x7b",
    against: Annotated[
        Path | None, Parameter(help="validation.json of this machine: its measured runs are what ratios are taken to")
    ] = None,
    json: Annotated[Output | None, Parameter(help="write all figures here")] = None,
    device: Device = "cuda",
) -> None:
    """Time a layer of a decoded token as people run it today: accelerate's CPU offload, plain pageable copies.

    For example:

    ```
    python -m realrun baseline --model mixtral-8x7b
    python -m realrun baseline --against out/validation.json --json baseline.json
    ```
    """
    from realrun.validate.baselines import baseline_command

    baseline_command(model, device, against, json, _typed())


@app.command
def generate(
    *,
    model: Annotated[str, Parameter(help="a checkpoint's folder, or its name on the Hugging Face hub")],
    prompt: Annotated[str, Parameter(help="what the model goes on from")],
    policy: Annotated[
        str, Parameter(help="a policy that needs no future; with parameters: name,key=value,...")
    ] = "lru",
    set_: Annotated[
        list[str] | None,
        Parameter(name=["--set"], consume_multiple=True, negative=(), help="policy parameters, key=value"),
    ] = None,
    tokens: Annotated[WholeNumber, Parameter(help="how many tokens to generate at most")] = 32,
    cache: Annotated[str, Parameter(help="GPU memory for experts: 64 (slots), 25%, 4000MiB, 16GiB")] = DEFAULT_CACHE,
    profile: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="traces whose profile split the policy learns from"),
    ] = None,
    check: Annotated[
        bool, Parameter(negative=(), help="compare every expert with its stamp before and after it runs")
    ] = False,
    compare: Annotated[
        bool, Parameter(negative=(), help="run the resident model first, which must fit, and compare the tokens")
    ] = False,
    device: Device = "cuda",
    host_memory: Annotated[
        str | None, Parameter(help="host memory that may be used, such as 120GiB; default: what is available")
    ] = None,
    seed: Annotated[WholeNumber, Parameter(help="for policies that draw at random")] = 0,
    json: Annotated[
        str | None,
        Parameter(name=["--json"], allow_leading_hyphen=True, help="write what came of it here, - is standard output"),
    ] = None,
) -> None:
    r"""Generate text with a real model whose experts wait in host memory, under any policy that needs no future.

    For example:

    ```
    python -m realrun generate --model ./olmoe --prompt "The court finds"
    python -m realrun generate --model ./mini --prompt "def main" \
        --policy previous-token --cache 50% --check --compare
    ```
    """
    from realrun.commands import Wanted, generate_command

    generate_command(
        Wanted(
            model, prompt, policy, set_ or [], tokens, cache, profile or [], seed, check, compare, host_memory, device,
            json,
        )
    )  # fmt: skip


def _typed() -> str:
    """The command line, for records of what it measured."""
    return shlex.join(["python", "-m", "realrun", *sys.argv[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments, failures=(RunError, SlotFault))


if __name__ == "__main__":
    sys.exit(main())
