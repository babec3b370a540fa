"""Tables of how often path predictors and plain guesses are right."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ground.errors import InputError
from ground.output import written
from ground.text import as_is
from traces.predictor.accuracy import Accuracy, accuracy, batch_steps, judged_rows, same_domain
from traces.predictor.rankings import rankings
from traces.trace import Trace

PREDICTOR = "predictor"
_SHOWN = {
    "recall": "token",
    "wide": "of 2 K",
    "union_recall": "batch",
    "union_precision": "right",
    "wide_union_recall": "of 2 K",
    "wide_union_precision": "right",
}
_LEGEND = (
    "Means over layers, in percent. token: experts of a token that are among the first K of its ranking (of 2 K: among "
    "the first 2 K). batch: experts that {batch} sequences need together, found among all that is predicted for them; "
    "right: predicted ones that are needed. TLP and SLP: statistics of the token and of the sequence."
)


def judge(trace: Trace, profile: Trace, batch: int) -> dict[str, Accuracy | None]:
    """The accuracy of a trace's predictions and of plain guesses that learn from ``profile``, on its decode rows.

    None stands for a guess that the traces do not allow. Raises InputError for a trace without predictions or without
    evaluation rows to judge by, or a profile of another shape.
    """
    if trace.predicted_experts is None:
        raise InputError(f"{trace.source}: holds no predictions; python -m traces predictor predict adds them")
    if (profile.layers.tolist(), profile.n_experts) != (trace.layers.tolist(), trace.n_experts):
        raise InputError(f"{profile.source}: not of the model of {trace.source}; expected its layers and experts")
    rows = judged_rows(trace)
    if not len(rows):
        raise InputError(f"{trace.source}: no decode row in the evaluation split, by which rankings are judged")
    most = 2 * trace.top_k
    ranked = {PREDICTOR: trace.predicted_experts[rows], **rankings(trace, profile, rows, min(most, trace.n_experts))}
    group = batch_steps(trace, rows, batch)
    return {
        name: None if one is None else accuracy(trace.experts[rows], one, group, trace.n_experts)
        for name, one in ranked.items()
    }


def show(paths: Sequence[str | Path], profiles: Sequence[str | Path], batch: int, json_to: str | None = None) -> None:
    """Print how often the predictions of traces are right, in all and by layer, beside plain guesses.

    These learn from the profile split of ``profiles`` together, or of each trace itself. ``json_to`` as elsewhere.
    Raises InputError for a trace that does not allow it, before anything is printed.
    """
    if batch < 1:
        raise InputError(f"batch is {batch}; expected at least 1")
    learnt = Trace.concat([Trace.load(path) for path in profiles]) if profiles else None
    traces = [Trace.load(path) for path in paths]
    found = [(trace, judge(trace, learnt or trace, batch)) for trace in traces]
    with written(json_to) as write:
        write([_facts(trace, judged, batch) for trace, judged in found])
    if json_to == "-":
        return
    console = Console(highlight=False)
    for trace, judged in found:
        console.print(as_is(_title(trace)), style="underline", soft_wrap=True)
        console.print(_summary(judged))
        console.print("by layer, token/batch:")
        console.print(_by_layer(trace, judged))
    console.print(_LEGEND.format(batch=batch))


def _title(trace: Trace) -> str:
    words = {True: "in-domain", False: "cross-domain", None: "domains of the predictor not stated"}
    domains = ", ".join(sorted(set(trace.domain[trace.split == "eval"].tolist())))
    return f"{trace.source}: {trace.meta['model']['name']}, {domains} ({words[same_domain(trace)]})"


def _summary(judged: Mapping[str, Accuracy | None]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("guess")
    for name in _SHOWN.values():
        table.add_column(name, justify="right")
    for guess, one in judged.items():
        table.add_row(guess, *("–" if one is None else _percent(getattr(one, field)) for field in _SHOWN))
    return table


def _percent(values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    return _cell(float(known.mean())) if len(known) else "–"


def _by_layer(trace: Trace, judged: Mapping[str, Accuracy | None]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    told = {guess: one for guess, one in judged.items() if one is not None}
    for guess in told:
        table.add_column(guess, justify="right")
    for index, layer in enumerate(trace.layers.tolist()):
        cells = (f"{_cell(one.recall[index])}/{_cell(one.union_recall[index])}" for one in told.values())
        table.add_row(str(layer), *cells)
    return table


def _cell(value: float) -> str:
    return "–" if np.isnan(value) else f"{100 * value:.1f}"


def _facts(trace: Trace, judged: Mapping[str, Accuracy | None], batch: int) -> dict[str, Any]:
    """The same as strict JSON."""

    def lists() -> Iterator[tuple[str, Any]]:
        for guess, one in judged.items():
            yield (
                guess,
                None
                if one is None
                else {
                    field: [None if np.isnan(value) else round(float(value), 4) for value in getattr(one, field)]
                    for field in _SHOWN
                },
            )

    return {
        "file": trace.source,
        "sha256": trace.sha256,
        "model": trace.meta["model"]["name"],
        "layers": trace.layers.tolist(),
        "in_domain": same_domain(trace),
        "predictor_sha256": trace.meta["predictor"]["sha256"],
        "rows": len(judged_rows(trace)),
        "batch": batch,
        "guesses": dict(lists()),
    }
