"""Command line of the real runs: ``python -m realrun``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.addresses import ends_if_few
    from ground.interrupts import ends_quietly

    ends_quietly()
    ends_if_few()

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ground.command_line import Help, command_line, run
from realrun.device.faults import RunError, SlotFault
from realrun.options import (
    Device,
    Folder,
    GenerateOptions,
    MoreTraces,
    Output,
    ReplayOptions,
    TracePath,
    ValidateOptions,
)
from sim.run.scene import code_version

app = command_line(
    "realrun", "Run the simulator's policies on a real GPU, and say how far the simulator is from it.", code_version
)


@app.command
def calibrate(
    *,
    out: Annotated[Output, Help("the profile to write, .toml")],
    model: Annotated[
        list[str] | None, Help("models whose experts and attention to time; default: all built in")
    ] = None,
    quick: Annotated[bool, Help("fewer sizes and repetitions: half a minute")] = False,
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
    *, json: Annotated[Output | None, Help("write all times here as well")] = None, device: Device = "cuda"
) -> None:
    """Time a search in DoMoE's two tables in every way that it can be done, and check each against float64.

    For example:

    ```
    python -m realrun lookup
    ```
    """
    from realrun.commands import lookup_command

    lookup_command(json, device, _typed())


_REPLAY = ReplayOptions()


@app.command
def replay(trace: TracePath, /, *, options: ReplayOptions = _REPLAY) -> None:
    r"""Replay a trace on the GPU, with real transfers, real kernels and experts of the model's true size.

    Weights are random. The router runs and is waited for; then the trace's route takes the place of its answer. Several
    policies run one after another and share the pinned experts.

    For example:

    ```
    python -m realrun replay traces/mixtral_law.npz --policy lru --steps 200
    python -m realrun replay traces/mixtral_law.npz --policy lru clairvoyant \
        --cache 16GiB --shared 32
    python -m realrun replay traces/mixtral_law.npz --policy lru \
        --device cpu --scale 64 --steps 5 --check
    ```
    """
    from realrun.commands import replay_command

    replay_command(replace(options, traces=(trace,)))


@app.command
def validate(trace: TracePath, /, *more: MoreTraces, options: ValidateOptions) -> None:
    r"""Run policies at several cache sizes in simulated time and on this machine, and say how far the two are apart.

    Both execute the same plans. All runs share the pinned experts. The folder gets validation.md, .csv and .json, which
    are written anew after every pair of runs, and .png at the end. Before the first pair it stays as it is.

    With --draw nobody chooses what is shown, and every error is set against the spread of several runs.

    For example:

    ```
    python -m realrun validate traces/mixtral_law.npz -o out --cache 25% 50% \
        --policies on-demand lru clairvoyant
    python -m realrun validate traces/mixtral_law.npz -o out --policies lru \
        --device cpu --scale 64 --steps 5
    python -m realrun validate traces/qwen3_*.npz -o out --policies all \
        --draw 12 --seed 1
    ```
    """
    from realrun.validate.pairs import validate_command

    validate_command(replace(options, traces=(trace, *more)), _typed())


@app.command
def resimulate(
    validation: Annotated[Path, Help("a validation.json that validate has written")],
    trace: Annotated[Path, Help("the trace that it was made of, .npz")],
    /,
    *more: MoreTraces,
    folder: Folder,
    hardware: Annotated[str, Help("the profile to simulate with: a built-in name or .toml")] = "h200",
) -> None:
    r"""Simulate the runs of a validation again, by another profile or newer code, and compare with what was measured.

    For example:

    ```
    python -m realrun resimulate out/validation.json traces/mixtral_law.npz \
        --hardware h200 -o again
    ```
    """
    from realrun.validate.resimulate import resimulate_command

    resimulate_command(validation, (trace, *more), folder, hardware, _typed())


@app.command
def baseline(
    *,
    model: Annotated[str, Help("the model whose dimensions are used")] = "mixtral-8x7b",
    against: Annotated[
        Path | None, Help("a validation.json of this machine, with whose measured runs to compare")
    ] = None,
    json: Annotated[Output | None, Help("write all figures here")] = None,
    device: Device = "cuda",
) -> None:
    """Time a layer of a decoded token without this project: accelerate's CPU offload, copies from pageable memory.

    For example:

    ```
    python -m realrun baseline --model mixtral-8x7b
    python -m realrun baseline --against out/validation.json --json baseline.json
    ```
    """
    from realrun.validate.baselines import baseline_command

    baseline_command(model, device, against, json, _typed())


@app.command
def generate(*, options: GenerateOptions) -> None:
    r"""Generate text with a real model whose experts wait in host memory, under any policy that is not told the future.

    For example:

    ```
    python -m realrun generate --model ./olmoe --prompt "The court finds"
    python -m realrun generate --model ./mini --prompt "def main" \
        --policy previous-token --cache 50% --check --compare
    ```
    """
    from realrun.commands import generate_command

    generate_command(options)


def _typed() -> str:
    """The command line, for records of what it measured."""
    return shlex.join(["python", "-m", "realrun", *sys.argv[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments, failures=(RunError, SlotFault))


if __name__ == "__main__":
    sys.exit(main())
