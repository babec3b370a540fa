"""A report: a page an experiment with tables, figures and data beside it, and a page that lists them.

The experiments' pages are written anew each time. Of the page that lists them only the list is: whatever stands
outside its marks is a person's and stays.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from analysis.experiment import Data, Experiment, Part, ReportInputs
from analysis.experiments import EXPERIMENTS
from analysis.options import ExperimentOptions
from analysis.pages.figures import draw
from analysis.pages.text import of_the_bundled, read, read_from, simulated_on, tables, text, traces_of, write_text
from analysis.paper import PAPERS
from ground.errors import InputError
from ground.plots import import_matplotlib

LIST, END = "<!-- pages -->", "<!-- end of pages -->"
"""Marks around the list of pages."""


def experiments_of(name: str) -> list[Experiment]:
    """The experiments of the report ``name``, in their order. Raises InputError for an unknown name."""
    if name not in PAPERS:
        raise InputError(f"report {name!r} is unknown; expected one of {', '.join(PAPERS)}")
    return [one for one in EXPERIMENTS.values() if one.paper.name == name]


def _parts(name: str) -> list[tuple[str, Experiment, Part]]:
    """All runs that a report holds: the name of the data of each, its experiment, and what it is run with."""
    return [(key, one, part) for one in experiments_of(name) for key, part in one.parts_by_key.items()]


def files_of(name: str) -> list[str]:
    """Names of the files that the report ``name`` may write into its folder. Raises InputError for an unknown name."""
    made = [f"{key}{end}" for key, _, _ in _parts(name) for end in (".json", ".png")]
    return [f"{name}.md", *(f"{one.name}.md" for one in experiments_of(name)), *made]


def report(name: str, folder: str | Path, inputs: ReportInputs, only: Sequence[str] | None = None) -> Path:
    """Measure the parts of the report ``name`` and write pages, figures and data into ``folder``.

    ``only`` measures some parts again and leaves the data of the others as it is. Returns the page that lists the
    others. Raises InputError for an unknown name or part, and if the page that is there lacks the marks of its list.
    """
    parts = _parts(name)
    keys = [key for key, _, _ in parts]
    unknown = set(only or ()) - {*keys}
    if unknown:
        raise InputError(f"--only {unknown.pop()}: expected one of {', '.join(keys)}")
    target = Path(folder)
    if not target.is_dir():
        raise InputError(f"-o {target}: is no folder; make it first")
    page = target / f"{name}.md"
    before = page.read_text("utf-8") if page.exists() else f"# {name}: published beside simulated\n\n{LIST}\n{END}\n"
    listed(before, "")  # a page without marks is refused before any work is done
    import_matplotlib()
    wanted = {key: part.options(inputs) if only is None or key in only else None for key, _, part in parts}
    measured = {key: _data(key, experiment, target, wanted[key]) for key, experiment, _ in parts}
    found = {key: data for key, data in measured.items() if data is not None}
    lines = [_written(name, experiment, target, found) for experiment in experiments_of(name)]
    write_text(page, listed(before, "".join(lines)))
    return page


def _data(key: str, experiment: Experiment, folder: Path, options: ExperimentOptions | None) -> Data | None:
    """The data of a part, measured (without ``options``: read, if it is there), and its figure drawn."""
    path = folder / f"{key}.json"
    if options is not None:
        print(f"{key} ...", file=sys.stderr, flush=True)
        try:
            data = experiment.measured(options)
        except InputError as error:
            raise InputError(f"{key}: {error}; --only leaves it out, --show takes the data that is there") from None
        write_text(path, text(experiment, data))
    elif path.exists():
        data = read(path, experiment)
    else:
        return None
    if experiment.draw is not None:
        with read_from(path if options is None else None, experiment):
            draw(experiment, data, path.with_suffix(".png"))
    return data


def _written(name: str, experiment: Experiment, folder: Path, found: Mapping[str, Data]) -> str:
    """Write an experiment's page, if any part of it has data, and return its line in the list of pages."""
    title, blocks, long, lacking = experiment.title, [], [], []
    for key, part in experiment.parts_by_key.items():
        if key in found:
            blocks.append(_block(key, experiment, part, found[key], folder))
            long.append(_long(experiment, part, found[key]))
        else:
            lacking.append(f"; {key} is not measured{f': it needs {part.needs}' if part.needs else ''}")
    blocks += ["## Long tables\n", *filter(None, long)] if any(long) else []
    if blocks:
        head = f"# {title}\n\n{experiment.about.strip()}\n\nWhat follows for the claims: [{name}.md]({name}.md).\n"
        write_text(folder / f"{experiment.name}.md", "\n".join([head, *blocks]))
        title = f"[{title}]({experiment.name}.md)"
    elif not any(part.needs for part in experiment.parts):
        lacking = ["; not measured"]
    return f"- {title}{''.join(lacking)}\n"


def _block(key: str, experiment: Experiment, part: Part, data: Data, folder: Path) -> str:
    """One part on its experiment's page: figure, tables, where the data comes from, and how it is made again."""
    heading = f"## {_heading(part, data)}\n\n" if len(experiment.parts) > 1 else ""
    about = f"{part.about}\n\n" if part.about else ""
    picture = f"![{experiment.title}]({key}.png)\n\n" if experiment.draw is not None else ""
    sheets = experiment.sheets(data)
    more = f"python -m analysis table {experiment.name} --data {(folder / key).as_posix()}.json\n"
    commands = (
        f"{_command(key, experiment, part, data, folder)}\n{more if any(sheet.detail for sheet in sheets) else ''}"
    )
    shown = tables(sheet for sheet in sheets if not sheet.detail and not sheet.long)
    sources = "".join(f"- {files}\n" for files in traces_of(data))
    files = "" if of_the_bundled(data, experiment.paper) else ", with the traces above as FILES"
    return (
        f"{heading}{about}{picture}{shown}\n{simulated_on(data)} Data: [{key}.json]({key}.json). Traces (hash):\n\n"
        f"{sources}\nTo make it again{files}:\n\n```\n{commands}```\n"
    )


def _long(experiment: Experiment, part: Part, data: Data) -> str:
    """The long tables of a part under its heading, which stand behind all parts; empty without any."""
    long = tables(sheet for sheet in experiment.sheets(data) if sheet.long)
    heading = f"### {_heading(part, data)}\n\n" if len(experiment.parts) > 1 else ""
    return long and f"{heading}{long}"


def _heading(part: Part, data: Data) -> str:
    return part.heading or f"Cache {data['made']['cache']}"


def _command(key: str, experiment: Experiment, part: Part, data: Data, folder: Path) -> str:
    """What measures a part again, with FILES for the traces that the data names, if they are not the bundled ones."""
    made, usual = data["made"], replace(ExperimentOptions(), hardware=experiment.paper.hardware)
    given = [f"--{option} {made[option]}" for option in ("hardware", "cache", "seed")
             if option in made and made[option] not in (getattr(usual, option), part.cache)]  # fmt: skip
    if not of_the_bundled(data, experiment.paper):
        given.append(f"{part.needs or '--traces'} FILES")
    return " ".join([f"python -m analysis report {experiment.paper.name} -o {folder.as_posix()} --only {key}", *given])


def listed(page: str, lines: str) -> str:
    """The page with these lines between the marks of its list. Raises InputError if it lacks the marks."""
    before, mark, rest = page.partition(LIST)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise InputError(f"the page lacks the marks {LIST} and {END}; put them where the list of pages belongs")
    return f"{before}{mark}\n{lines}{end}{after}"
