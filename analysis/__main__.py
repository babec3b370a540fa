"""Command line of the analysis: ``python -m analysis``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.interrupts import ends_quietly

    ends_quietly()

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from analysis.experiment import Data, Experiment, Setup
from analysis.experiments import EXPERIMENTS, experiment
from ground.command_line import run
from ground.errors import InputError
from ground.files import keep_apart
from ground.whole_number import Whole
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.run.scene import DEFAULT_CACHE, bundled_traces, code_version
from sim.run.simpy_engine import SimulationError

app = App(
    name="python -m analysis",
    version=code_version,
    help="Tables and figures of the field: what papers report, beside what a replay on equal terms gives.",
    help_format="markdown",
    help_on_error=False,
)

_Name = Annotated[str, Parameter(help="an experiment of `python -m analysis experiments`")]
_Json = Annotated[
    str | None,
    Parameter(name=["--json"], allow_leading_hyphen=True, help="write the data as JSON here, - is standard output"),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Terms:
    """Options that all experiments share."""

    traces: Annotated[
        list[Path] | None,
        Parameter(
            consume_multiple=True,
            negative=(),
            help="traces, or folders of them, to run on and to learn from; default: the bundled ones",
        ),
    ] = None
    hardware: Annotated[str, Parameter(help="a built-in name or a profile, .toml")] = DEFAULT_HARDWARE
    cache: Annotated[
        str, Parameter(help="GPU memory for experts: 64 (slots), 25% (of all experts), 4000MiB, 16GiB")
    ] = DEFAULT_CACHE
    software: Annotated[
        list[str] | None,
        Parameter(
            consume_multiple=True,
            negative=(),
            help="what predictions cost, several to compare: paper, fast, implied or a profile, .toml; default: these",
        ),
    ] = None
    seed: Annotated[Whole, Parameter(help="of the bootstrap, and for policies that draw at random")] = 0
    entries: Annotated[
        list[int] | None,
        Parameter(consume_multiple=True, negative=(), help="table sizes of domoe-table-size; default: 100 to 3000"),
    ] = None
    workers: Annotated[
        Whole | None, Parameter(help="processes; the result is the same for any number; default: one a core")
    ] = None
    data: Annotated[
        Path | None, Parameter(help="show what --json wrote earlier instead of measuring; other options are unused")
    ] = None

    def keep_apart(self, outputs: dict[str, Path | str | None], more: Sequence[Path] = (), **folders: Any) -> None:
        """Refuse outputs that are one of the files read here, or of ``more``. Raises InputError."""
        read = [*(self.traces or bundled_traces()), self.hardware, *(self.software or []), self.data, *more]
        keep_apart(read, outputs, **folders)

    def setup(self) -> Setup:
        """What an experiment is run with. Raises InputError for a number of processes below 1."""
        given: dict[str, Any] = {"software": tuple(self.software)} if self.software else {}
        given |= {"entries": tuple(self.entries)} if self.entries else {}
        if self.workers is not None:
            if self.workers < 1:
                raise InputError(f"--workers {self.workers}; expected at least 1")
            given["workers"] = self.workers
        return Setup(traces=self.traces, hardware=self.hardware, cache=self.cache, seed=self.seed, **given)

    def measured(self, what: Experiment) -> Data:
        """The data of an experiment, measured now or read from a file. Raises InputError."""
        from analysis.pages.text import read

        return what.measure(self.setup()) if self.data is None else read(self.data, what)


@app.command
def table(
    name: _Name,
    /,
    *,
    terms: Terms = Terms(),
    json: _Json = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="write the tables as Markdown here")] = None,
) -> None:
    """Measure an experiment and print its tables, published numbers beside simulated ones.

    For example:

    ```
    python -m analysis table domoe-overall
    python -m analysis table predictors --traces full/*.npz --json predictors.json
    ```
    """
    from analysis.pages.text import markdown, show, write_data, write_text

    what = experiment(name)
    terms.keep_apart({"--json": json, "-o": output})
    data = terms.measured(what)
    write_data(json, what, data)
    if output is not None:
        write_text(output, markdown(what, data))
    show(what, data, json)


@app.command
def figure(
    name: _Name,
    /,
    *,
    terms: Terms = Terms(),
    json: _Json = None,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="the figure: .png, .svg or .pdf; default: NAME.png")
    ] = None,
) -> None:
    r"""Measure an experiment, draw its figure and print its tables.

    For example:

    ```
    python -m analysis figure domoe-neighbours -o neighbours.svg
    python -m analysis figure domoe-table-size --traces full/law.npz \
        --json table-size.json
    ```
    """
    from analysis.pages.figures import check, draw
    from analysis.pages.text import read_from, show, write_data

    what = experiment(name)
    target = Path(f"{name}.png") if output is None else output
    check(what, target)
    terms.keep_apart({"--json": json, "-o": target})
    data = terms.measured(what)
    write_data(json, what, data)
    with read_from(terms.data, what):
        draw(what, data, target)
    show(what, data, json)


@app.command
def report(
    name: Annotated[str, Parameter(help="domoe")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="the folder of page, figures and data")],
    other_seed: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="traces of a second training seed: headline ratios again"),
    ] = None,
    large: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="traces with longer profiles, for the table sizes"),
    ] = None,
    routes: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative=(), help="published routes of real models, or a folder of them"),
    ] = None,
    only: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative=(), help="parts to measure again; the others keep their data"),
    ] = None,
    show: Annotated[
        bool, Parameter(negative=(), help="measure nothing: write the page from the data that is there")
    ] = (False),
    terms: Terms = Terms(),
) -> None:
    r"""Run every experiment of a paper and write one page with its tables, its figures and the data beside it.

    Text outside the marks of a page that is there stays. A part whose traces are not given keeps its data. For example:

    ```
    python -m analysis report domoe -o docs/results --other-seed seed1/*.npz \
        --large full/*.npz --routes routes
    python -m analysis report domoe -o docs/results --only domoe-ablation
    python -m analysis report domoe -o docs/results --show
    ```
    """
    from analysis.pages.report import Inputs, files_of
    from analysis.pages.report import report as write_report

    own = [*(other_seed or []), *(large or []), *(routes or [])]
    terms.keep_apart({}, more=own, folders={"-o": (output, files_of(name))})
    inputs = Inputs(terms.setup(), other_seed, large, routes)
    print(write_report(name, output, inputs, [] if show else only))


@app.command
def experiments(*, json: _Json = None) -> None:
    """List the experiments: tables, and figures, which are tables too.

    For example:

    ```
    python -m analysis experiments
    python -m analysis experiments --json -
    ```
    """
    from ground.output import written

    keep_apart([], {"--json": json})
    with written(json) as write:
        write(
            [{"name": name, "title": what.title, "figure": what.draw is not None} for name, what in EXPERIMENTS.items()]
        )
    if json != "-":
        for name, what in EXPERIMENTS.items():
            print(f"{name:16} {'figure' if what.draw else 'table':6} {what.title}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments, failures=(SimulationError,))


if __name__ == "__main__":
    sys.exit(main())
