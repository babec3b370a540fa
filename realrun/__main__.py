"""Command line of the real runs: ``python -m realrun``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sim.replay import code_version
from traces.cli import run

app = App(
    name="python -m realrun",
    version=code_version,
    help="Run the simulator's policies on a real GPU, and say how far the simulator is from it.",
    help_format="markdown",
    help_on_error=False,
)

Device = Annotated[str, Parameter(help="where to run: cuda, cuda:1, or cpu (slow, to try things out)")]


@app.command
def calibrate(
    *,
    out: Annotated[Path, Parameter(help="the profile to write, .toml")],
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
    python -m realrun calibrate --out h200.toml --model mixtral-8x7b qwen3-30b-a3b --quick
    python -m sim replay traces/mixtral_law.npz --hardware h200.toml
    ```
    """
    from realrun.calibrate import calibrate_command

    calibrate_command(out, model, quick=quick, device=device)


@app.command
def lookup(
    *,
    json: Annotated[Path | None, Parameter(help="write all times here as well")] = None,
    device: Device = "cuda",
) -> None:
    """Look up in DoMoE's two tables in every way there is, check each against float64 and print how long it takes.

    For example:

    ```
    python -m realrun lookup
    ```
    """
    from realrun.measure.tables import lookup_command

    lookup_command(json, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status, see :func:`traces.cli.run`."""
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
