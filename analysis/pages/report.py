"""A page of many experiments: tables between marks, figures and data beside it.

What stands between the marks of a part is written anew; everything else on the page is a person's and stays.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.experiment import Data, Experiment, Setup
from analysis.experiments import EXPERIMENTS
from analysis.pages.figures import check, draw
from analysis.pages.text import block, read, read_from, text, write_text
from ground.errors import InputError

Paths = Sequence[str | Path] | None


@dataclass(frozen=True)
class Inputs:
    """What a report is made from: traces of its own for some parts; a part without keeps the data that is there."""

    setup: Setup
    other_seed: Paths = None
    large: Paths = None
    routes: Paths = None


@dataclass(frozen=True)
class Part:
    """One experiment on a page: ``key`` names its files, ``setup`` what it is run with (None if that is missing)."""

    key: str
    experiment: str
    setup: Callable[[Inputs], Setup | None]
    needs: str = ""
    """The option without which it is not measured again."""
    also: str = ""
    """What tells its heading from that of another part with the same experiment."""

    @property
    def of(self) -> Experiment:
        """The experiment."""
        return EXPERIMENTS[self.experiment]

    @property
    def title(self) -> str:
        """Its heading."""
        return f"{self.of.title}{self.also and f', {self.also}'}"


def _plain(inputs: Inputs) -> Setup:
    return inputs.setup


def _with(name: str) -> Callable[[Inputs], Setup | None]:
    """The setup on other traces, those of ``Inputs.name``."""

    def setup(inputs: Inputs) -> Setup | None:
        paths: Paths = getattr(inputs, name)
        return None if paths is None else replace(inputs.setup, traces=paths)

    return setup


HALF = "50%"

REPORTS: dict[str, tuple[Part, ...]] = {
    "domoe": (
        Part("domoe-overall", "domoe-overall", _plain),
        Part(
            "domoe-overall-half",
            "domoe-overall",
            lambda inputs: replace(inputs.setup, cache=HALF),
            also=f"cache {HALF}",
        ),
        Part("domoe-overall-other-seed", "domoe-overall", _with("other_seed"), "--other-seed", "second training seed"),
        Part("domoe-limits", "domoe-limits", _plain),
        Part("domoe-ablation", "domoe-ablation", _plain),
        Part("domoe-cache-size", "domoe-cache-size", _plain),
        Part("domoe-table-size", "domoe-table-size", lambda inputs: _with("large")(inputs) or inputs.setup),
        Part("domoe-adaptive", "domoe-adaptive", _plain),
        Part("domoe-neighbours", "domoe-neighbours", _plain),
        Part("domoe-similarity", "domoe-similarity", _plain),
        Part("domoe-matching", "domoe-matching", _plain),
        Part("predictors", "predictors", _plain),
        Part("anomalies", "anomalies", _plain),
        Part("real-routes", "real-routes", _with("routes"), "--routes"),
    )
}


def _parts(name: str) -> tuple[Part, ...]:
    if name not in REPORTS:
        raise InputError(f"report {name!r} is unknown; expected one of {', '.join(REPORTS)}")
    return REPORTS[name]


def files_of(name: str) -> list[str]:
    """Names of the files that the report ``name`` may write into its folder. Raises InputError for an unknown name."""
    return [f"{name}.md", *(f"{part.key}{end}" for part in _parts(name) for end in (".json", ".png"))]


def report(name: str, folder: str | Path, inputs: Inputs, only: Sequence[str] | None = None) -> Path:
    """Measure the parts of the report ``name`` and write page, figures and data into ``folder``; returns the page.

    ``only`` measures some parts again and leaves the data of the others as it is. Raises InputError for an unknown
    name or part, and if the page that is there lacks the marks of a part.
    """
    parts = _parts(name)
    unknown = set(only or ()) - {part.key for part in parts}
    if unknown:
        raise InputError(f"--only {unknown.pop()}: expected one of {', '.join(part.key for part in parts)}")
    target = Path(folder)
    if not target.is_dir():
        raise InputError(f"-o {target}: is no folder; make it first")
    page = target / f"{name}.md"
    before = page.read_text("utf-8") if page.exists() else _empty(name, parts)
    replaced(before, {part.key: "" for part in parts})  # a page that lacks a mark is refused before any work is done
    for part in parts:
        if part.of.draw is not None:
            check(part.of, target / f"{part.key}.png")
    blocks = {}
    for part in parts:
        setup = part.setup(inputs) if only is None or part.key in only else None
        blocks[part.key] = _made(part, target, setup)
    write_text(page, replaced(before, blocks))
    return page


def _made(part: Part, folder: Path, setup: Setup | None) -> str:
    """Measure a part (None: read what was measured earlier), write its data and figure, and return its block."""
    path = folder / f"{part.key}.json"
    if setup is not None:
        print(f"{part.key} ...", file=sys.stderr, flush=True)
        try:
            data: Data = part.of.measure(setup)
        except InputError as error:
            raise InputError(
                f"{part.key}: {error}; --only leaves it out, --show makes a page of what is there"
            ) from None
        write_text(path, text(part.of, data))
    elif path.exists():
        data = read(path, part.of)
    else:
        return f"Not measured{f': it needs {part.needs}' if part.needs else ''}.\n"
    picture = ""
    if part.of.draw is not None:
        with read_from(path if setup is None else None, part.of):
            draw(part.of, data, path.with_suffix(".png"))
        picture = f"![{part.title}]({part.key}.png)\n\n"
    return f"{picture}{block(part.of, data, path.name)}"


def _empty(name: str, parts: Sequence[Part]) -> str:
    blocks = "\n".join(f"## {part.title}\n\n{_mark(part.key)}\n{_end(part.key)}\n" for part in parts)
    return f"# {name}: published beside simulated\n\n{blocks}"


def _mark(key: str) -> str:
    return f"<!-- {key} -->"


def _end(key: str) -> str:
    return f"<!-- end of {key} -->"


def replaced(page: str, blocks: Mapping[str, str]) -> str:
    """The page with what stands between the marks of each block replaced. Raises InputError for marks that lack."""
    for key, content in blocks.items():
        before, mark, rest = page.partition(_mark(key))
        _, end, after = rest.partition(_end(key))
        if not mark or not end:
            raise InputError(f"the page lacks the marks {_mark(key)} and {_end(key)}; put them where the part belongs")
        page = f"{before}{mark}\n{content}{end}{after}"
    return page
