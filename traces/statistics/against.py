"""The comparison of traces with what is published, as tables for a person and for a document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ground.files import atomic_path
from ground.output import written
from ground.tables import Parts
from ground.text import as_is
from traces.statistics.marked_document import between_marks, markdown
from traces.statistics.published import held_against, models
from traces.trace import Trace

_FEWEST_ROWS = 1000  # of which shares are no chance
_NAMES = {
    "first_repeated": "first choice repeated",
    "first_or_second_repeated": "first or second repeated",
    "entropy": "entropy of use",
    "most_over_least": "most over least used",
    "divergence": "divergence of domains, bits",
    "own_over_other": "own over other domain",
    "reuse_over_popularity": "reuse over popularity",
}
_PLACES = {"mean": "mean of layers", "middle": "middle layer", "least": "least layer", "highest": "highest layer"}
_OF_ALL_LAYERS = ("divergence", "own_over_other", "reuse_over_popularity")
_HEADINGS = ("statistic", "prompt rows", "decode rows", "at random", "published", "to lie in", "verdict")


def show(
    paths: Sequence[str | Path], model: str, *, json_to: str | None = None, document: str | Path | None = None
) -> None:
    """Print the traces' statistics beside those published of ``model``, and the sources below.

    With ``json_to`` also write them as JSON, see `held_against` (``-``: print only that). ``document`` is a text whose
    table, between the marks of this model, is replaced. Raises InputError for a file or model that cannot be used,
    before anything is written.
    """
    result = held_against([Trace.load(path) for path in paths], model)
    renewed = None if document is None else replaced(Path(document).read_text("utf-8"), result)
    with written(json_to, ensure_ascii=False) as write:
        write(result)
    if document is not None and renewed is not None:
        with atomic_path(document) as part:
            part.write_text(renewed, encoding="utf-8")
    if json_to != "-":
        print_tables(result, Console(highlight=False, markup=False))


def verdicts(trace: Trace) -> str | None:
    """How many figures of a trace lie where its model's do, and which do not; None where nothing can be said of it."""
    model = trace.meta["model"]["name"]
    if model not in models() or trace.n_rows < _FEWEST_ROWS:
        return None
    judged = [line for line in held_against([trace], model)["judged"] if line["verdict"]]
    odd = [f"{_title(line)} {line['verdict']}" for line in judged if line["verdict"] != "within"]
    said = f"{len(judged) - len(odd)} of {len(judged)} figures are as published of {model}"
    return said + (f"; {', '.join(odd)}" if odd else "") + f" (all: --against {model})" if judged else None


def print_tables(result: dict[str, Any], console: Console) -> None:
    """The table, what it is of, and the sources below it."""
    title = f"routing of the traces of {result['model']} against {result['against']}"
    console.print(Parts(title, _HEADINGS, rows(result)))
    for remark in remarks(result):
        console.print(as_is(remark))
    for source in result["sources"]:
        console.print(as_is(f"source: {source['title']}: {source['how']}. Texts: {'; '.join(source['texts'])}"))


def remarks(result: dict[str, Any]) -> list[str]:
    """What a reader has to know of the table, one sentence each."""
    said = [f"The verdict is on {result['judged_rows']} rows. * is a target, else a published range, widened."]
    if result["model"] != result["against"]:
        said.append(f"The traces are of {result['model']}, whose figures need not be those of {result['against']}.")
    if result["against"] not in result["beside"]:
        said.append(f"Nothing is published of {result['against']}: the figures are those of {_listed(result)}.")
    elif len(result["beside"]) > 1:
        said.append(f"Little is published of {result['against']}: beside it are {_listed(result)}.")
    return said


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, a line for each statistic and layer."""
    prompt = result["judged_rows"] == "prompt"
    return [
        [
            _title(line),
            _number(line["found"]) if prompt else "–",
            _number(line["decode"]),
            _number(line["random"]),
            _range(line["published"]),
            _range(line["limits"]) + "*" * line["target"],
            line["verdict"] or "–",
        ]
        for line in result["judged"]
    ]


def replaced(text: str, result: dict[str, Any]) -> str:
    """The document with this comparison's table between the marks of its model."""
    return between_marks(text, f"against {result['against']}", markdown(_HEADINGS, rows(result)))


def _title(line: dict[str, Any]) -> str:
    return ", ".join(filter(None, (_NAMES[line["statistic"]], _place(line))))


def _place(line: dict[str, Any]) -> str:
    """Which layers a line is of, where its statistic is shown of several."""
    at = line["at"]
    if line["statistic"] in _OF_ALL_LAYERS:
        return ""
    return f"layer {at}" if at.isdecimal() else _PLACES[at]


def _range(ends: Sequence[float | None] | None) -> str:
    """Two numbers, one where they are the same, or the open range that one of them bounds."""
    if ends is None:
        return "–"
    low, high = (None if end is None else _number(end) for end in ends)
    if low is None or high is None:
        return f"at least {low}" if high is None else f"at most {high}"
    return low if low == high else f"{low} to {high}"


def _number(value: float | None) -> str:
    """Three figures that say something, as shares and ratios need."""
    if value is None:
        return "–"
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _listed(result: dict[str, Any]) -> str:
    return ", ".join(name for name in result["beside"] if name != result["against"])
