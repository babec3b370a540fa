"""Command line of the analysis: ``python -m analysis``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.addresses import ends_if_few
    from ground.interrupts import ends_quietly

    ends_quietly()
    ends_if_few()

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from analysis.experiment import Data, Experiment, ReportInputs
from analysis.experiments import EXPERIMENTS, experiment
from analysis.html.command import page, trace
from analysis.options import ExperimentOptions
from analysis.pages import report as pages
from analysis.pages.figures import check, draw
from analysis.pages.text import markdown, read, read_from, show, write_data, write_text
from ground.command_line import Help, command_line, run
from ground.files import keep_apart
from ground.output import written
from sim.run.faults import SimulationError
from sim.run.scene import code_version

app = command_line(
    "analysis", "Tables and figures: what papers report, beside what a replay on equal terms gives.", code_version
)

_Name = Annotated[str, Help("an experiment of `python -m analysis experiments`")]
_Json = Annotated[str | None, Help("write the data as JSON here, - is standard output", allow_leading_hyphen=True)]
_Data = Annotated[Path | None, Help("show what --json wrote earlier instead of measuring; other options are unused")]
_USUAL = ExperimentOptions()


def _measured(what: Experiment, options: ExperimentOptions, data: Path | None, json: str | None) -> Data:
    """The data of an experiment, measured now or read from a file, and written as JSON. Raises InputError."""
    found = what.measured(options) if data is None else read(data, what)
    write_data(json, what, found)
    return found


@app.command
def table(
    name: _Name,
    /,
    *,
    options: ExperimentOptions = _USUAL,
    data: _Data = None,
    json: _Json = None,
    output: Annotated[Path | None, Help("write the tables as Markdown here", "--output", "-o")] = None,
) -> None:
    """Measure an experiment and print its tables, published numbers beside simulated ones.

    For example:

    ```
    python -m analysis table domoe-overall
    python -m analysis table predictors --traces full/*.npz --json predictors.json
    ```
    """
    what = experiment(name)
    options.keep_apart({"--json": json, "-o": output}, more=[data])
    found = _measured(what, options, data, json)
    if output is not None:
        write_text(output, markdown(what, found))
    show(what, found, json)


@app.command
def figure(
    name: _Name,
    /,
    *,
    options: ExperimentOptions = _USUAL,
    data: _Data = None,
    json: _Json = None,
    output: Annotated[Path | None, Help("the figure: .png, .svg or .pdf; default: NAME.png", "--output", "-o")] = None,
) -> None:
    r"""Measure an experiment, draw its figure and print its tables.

    For example:

    ```
    python -m analysis figure domoe-neighbours -o neighbours.svg
    python -m analysis figure domoe-table-size --traces full/law.npz \
        --json table-size.json
    ```
    """
    what = experiment(name)
    target = Path(f"{name}.png") if output is None else output
    check(what, target)
    options.keep_apart({"--json": json, "-o": target}, more=[data])
    found = _measured(what, options, data, json)
    with read_from(data, what):
        draw(what, found, target)
    show(what, found, json)


@app.command
def report(
    name: Annotated[str, Help("the paper: domoe or expertflow; or strangers")],
    /,
    *,
    output: Annotated[Path, Help("the folder of pages, figures and data", "--output", "-o")],
    other_seed: Annotated[list[Path] | None, Help("traces of a second training seed: headline ratios again")] = None,
    large: Annotated[list[Path] | None, Help("traces with longer profiles, for the table sizes")] = None,
    routes: Annotated[list[Path] | None, Help("published routes of real models, or a folder of them")] = None,
    trainings: Annotated[
        list[Path] | None, Help("folders of traces, each of one training, for what the separation of domains does")
    ] = None,
    only: Annotated[list[str] | None, Help("experiments to measure again; the others keep their data")] = None,
    show: Annotated[bool, Help("measure nothing: write the pages from the data that is there")] = False,
    options: ExperimentOptions = _USUAL,
) -> None:
    r"""Run every experiment of a paper and write a page for each, with its tables, its figure and the data beside it.

    One more page, such as domoe.md, lists them; what else a person has written on it stays. A part whose traces are not
    given keeps its data. The report `strangers` holds published speeds of many machines. For example:

    ```
    python -m analysis report domoe -o docs/results --other-seed seed1/*.npz \
        --large full/*.npz --routes routes
    python -m analysis report domoe -o docs/results --only domoe-ablation
    python -m analysis report domoe -o docs/results --show
    python -m analysis report expertflow -o docs/results
    python -m analysis report strangers -o docs/results
    ```
    """
    own = [*(other_seed or []), *(large or []), *(routes or []), *(trainings or [])]
    options.keep_apart({}, more=own, folders={"-o": (output, pages.files_of(name))})
    inputs = ReportInputs(options, other_seed, large, routes, trainings)
    print(pages.report(name, output, inputs, [] if show else only))


@app.command
def experiments(*, json: _Json = None) -> None:
    """List the experiments: tables, and figures, which are tables too.

    For example:

    ```
    python -m analysis experiments
    python -m analysis experiments --json -
    ```
    """
    keep_apart([], {"--json": json})
    with written(json) as write:
        write([{"name": one.name, "title": one.title, "figure": one.draw is not None} for one in EXPERIMENTS.values()])
    if json != "-":
        for one in EXPERIMENTS.values():
            print(f"{one.name:16} {'figure' if one.draw else 'table':6} {one.title}")


app.command(page)
app.command(trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments, failures=(SimulationError,))


if __name__ == "__main__":
    sys.exit(main())
