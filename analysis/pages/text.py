"""What experiments gave, as JSON, in a terminal and in Markdown."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rich.console import Group
from rich.text import Text

from analysis.experiment import Data, Experiment
from analysis.pages.sheets import Sheet
from analysis.paper import Paper
from ground import output
from ground.errors import InputError
from ground.files import atomic_path
from sim.run.scene import bundled_traces


def read(path: Path, experiment: Experiment) -> Data:
    """The data of ``experiment`` that was written to ``path``. Raises InputError for anything else, or if damaged."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    have = data.get("experiment") if isinstance(data, dict) else None
    if have != experiment.name:
        raise InputError(f"{path}: holds {have!r}; expected the data of {experiment.name}, as --json writes it")
    with read_from(path, experiment):
        markdown(experiment, data)
    return dict(data)


@contextmanager
def read_from(path: Path | None, experiment: Experiment) -> Iterator[None]:
    """Around showing data of the file ``path`` (None: measured now): what cannot be shown is damaged or of old.

    Nothing but its tables and its figure knows what the data of an experiment must hold. Raises InputError.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if path is None or isinstance(error, InputError):
            raise
        what = f"{type(error).__name__}: {error}".split("\n")[0]
        raise InputError(
            f"{path}: not the data of {experiment.name} as this version writes it ({what}); measure it again"
        ) from None


def text(experiment: Experiment, data: Data) -> str:
    """The data as a JSON text, an entry of a list a line."""
    return output.by_entries({"experiment": experiment.name} | data, ensure_ascii=False)


def write_data(target: str | None, experiment: Experiment, data: Data) -> None:
    """The data to a file or, for ``-``, to standard output."""
    if target == "-":
        print(text(experiment, data), end="")
    elif target is not None:
        write_text(Path(target), text(experiment, data))


def write_text(path: Path, content: str) -> None:
    """A file of this text, whole or not at all."""
    with atomic_path(path) as part:
        part.write_text(content, "utf-8")


def markdown(experiment: Experiment, data: Data) -> str:
    """The tables of an experiment in Markdown, under their heading."""
    return f"## {experiment.title}\n\n{tables(experiment.sheets(data))}\n{made_from(data)}\n"


def tables(sheets: Iterable[Sheet]) -> str:
    """Tables in Markdown, one below the other."""
    return "\n".join(sheet.markdown() for sheet in sheets)


def made_from(data: Data) -> str:
    """Where the data comes from, in sentences."""
    made = data["made"]
    others = sorted({source["model"] for source in made["traces"] if source["sha256"] not in _bundled()})
    apart = f" Those of {', '.join(others)} are captures that are not bundled." if others else ""
    return f"{simulated_on(data)} Traces of {'; '.join(traces_of(data))}.{apart}"


def simulated_on(data: Data) -> str:
    """The machine and the code that the data comes from, in a sentence."""
    made = data["made"]
    cache = f", cache {made['cache']}" if "cache" in made else ""
    return f"Simulated on {made['hardware']}{cache}, seed {made['seed']}, code {made['code']}."


def traces_of(data: Data) -> list[str]:
    """The traces that the data comes from by name and the start of their hash, a text a model."""
    by_model: dict[str, list[str]] = {}
    for source in data["made"]["traces"]:
        trained = f"{source['model']}, training seed {source['training_seed']}" if "training_seed" in source else ""
        by_model.setdefault(trained or source["model"], []).append(f"{source['trace']} ({source['sha256'][:8]})")
    return [f"{model}: {', '.join(files)}" for model, files in by_model.items()]


def of_the_bundled(data: Data, paper: Paper) -> bool:
    """Whether the data was made from the bundled traces of the paper's models, all of them and no others."""
    return {source["sha256"] for source in data["made"]["traces"]} == {_hash(path) for path in paper.traces}


def _bundled() -> frozenset[str]:
    """Hashes of the traces that come with the project."""
    return frozenset(map(_hash, bundled_traces()))


@cache
def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def show(experiment: Experiment, data: Data, json_target: str | None) -> None:
    """The tables on standard output, unless JSON goes there."""
    output.show(Group(*experiment.sheets(data), Text(made_from(data), style="dim")), json_target)
