"""How often is the path predictor right, layer by layer, in its own domain and in another?

Beside it stand plain guesses: *TLP*, what the profile's tokens of the same id took most; *SLP*, what earlier tokens of
the sequence took; the previous token's experts; popularity; and chance. The paper compares with TLP and SLP without
defining them; these are readings of their names. TLP needs token ids, which traces of texts that may not be passed on
do not hold.

*Token* is the share of a token's experts among as many first ones of its ranking. *Batch* is the share of the experts
that a batch needs together, found among all that is predicted for any of its tokens: the paper's code judges so. The
larger the batch, the more a guess at random finds.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.expertflow import label, made
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, notes, percent
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.services import Service, services
from analysis.workloads import Source, loaded
from traces.predictor.accuracy import Accuracy, accuracy, batch_steps, judged_rows
from traces.predictor.rankings import rankings
from traces.trace import Trace

PREDICTOR = "predictor"
BATCH = 16
SAID = {True: "accuracy, same domain", False: "accuracy, other domain"}


def measure(options: ExperimentOptions) -> Data:
    """How often every guess is right, on every data set; guesses learn from the predictor's own data set."""
    found = services(options)
    own = {one.model.name: one for one in reversed(found) if one.in_domain}
    return {
        "batch": BATCH,
        "judged": [
            one.to_json() | {"guess": guess, **({} if right is None else _shown(right))}
            for one in found
            for guess, right in _judged(one, one if one.in_domain else own.get(one.model.name, one)).items()
        ],
        "recorded": [_recorded(one) for one in _records() if one["model"] in {two.model.name for two in found}],
        "made": made(options),
    }


def _records() -> list[Data]:
    """How right predictors and guesses were on the full captures, which hold token ids (``traces/records``)."""
    files = sorted((resources.files("traces") / "records").iterdir(), key=lambda file: file.name)
    read = [json.loads(file.read_text("utf-8")) for file in files if file.name.endswith("_accuracy.json")]
    return [one for entries in read for one in entries]


def _recorded(one: Data) -> Data:
    shown = {
        guess: None if right is None else [_mean(np.array(right[what], float)) for what in ("recall", "union_recall")]
        for guess, right in one["guesses"].items()
    }
    keys = ("model", "in_domain", "rows", "batch")
    return {"data": Path(one["file"]).stem, "guesses": shown} | {key: one[key] for key in keys}


def _judged(one: Service, own: Service) -> Mapping[str, Accuracy | None]:
    trace, profile = (_whole(service.sources) for service in (one, own))
    rows = judged_rows(trace)
    ranked = dict(rankings(trace, profile, rows, trace.top_k))
    if trace.predicted_experts is not None:
        ranked = {PREDICTOR: trace.predicted_experts[rows]} | ranked
    group = batch_steps(trace, rows, BATCH)
    taken = trace.experts[rows]
    return {name: None if ids is None else accuracy(taken, ids, group, trace.n_experts) for name, ids in ranked.items()}


def _whole(sources: Sequence[Source]) -> Trace:
    return Trace.concat([loaded(source.path) for source in sources])


def _shown(right: Accuracy) -> Data:
    return {
        "token": _mean(right.recall),
        "batch": _mean(right.union_recall),
        "batch_right": _mean(right.union_precision),
        "token_by_layer": [None if np.isnan(value) else round(float(value), 4) for value in right.recall],
    }


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return round(float(known.mean()), 4) if len(known) else None


def sheets(data: Data) -> list[Sheet]:
    """Per token and of a batch; then the predictor by layer."""
    guesses = distinct(data["judged"], "guess")
    rows, layers = [], []
    for model, which in dict.fromkeys((one["model"], label(one)) for one in data["judged"]):
        mine = {one["guess"]: one for one in having(data["judged"], model=model) if label(one) == which}
        said = _published(next(iter(mine.values()))["in_domain"])
        cells = [_cell(mine[guess]) if guess in mine else NOTHING for guess in guesses]
        rows.append([model, which, said, *cells])
        for guess, one in mine.items():
            if "token_by_layer" in one:
                by_layer = one["token_by_layer"]
                shown = [percent(value, 0) for value in by_layer[:: max(1, len(by_layer) // 6)][:6]]
                layers.append([model, which, guess, *shown])
    title = f"Right per token / of a batch of {data['batch']}"
    sixth = [f"{i}/6" for i in range(6)]
    return [
        _of_captures(data),
        Sheet(title, ["model", "data", "published", *guesses], rows, notes("expertflow-accuracy")),
        Sheet("Right per token, by layer", ["model", "data", "guess", *sixth], layers, long=True),
    ]


def _of_captures(data: Data) -> Sheet:
    rows = []
    guesses = list(dict.fromkeys(guess for one in data["recorded"] for guess in one["guesses"]))
    for one in data["recorded"]:
        cells = [NOTHING if (two := one["guesses"][guess]) is None else _pair(*two) for guess in guesses]
        learnt = "same" if one["in_domain"] else "other"
        rows.append([one["model"], f"{one['data']} ({learnt} domain)", str(one["batch"]), *cells])
    title = "Right per token / of a batch, on the full captures"
    return Sheet(title, ["model", "data", "batch", *guesses], rows, notes("expertflow-accuracy-captures"))


@cache
def _published(in_domain: bool | None) -> str:
    return NOTHING if in_domain is None else expertflow().said(SAID[in_domain]).says.split(",")[0]


def _cell(one: Data) -> str:
    return _pair(one["token"], one["batch"]) if "token" in one else NOTHING


def _pair(token: float | None, batch: float | None) -> str:
    return f"{percent(token, 0)} / {percent(batch, 0)}"


def draw(data: Data, figure: Figure) -> None:
    """Right per token by layer, a panel a model and data set."""
    pairs = list(dict.fromkeys((one["model"], label(one)) for one in data["judged"]))
    titles = ["\n".join(pair) for pair in pairs]
    axes = panels(figure, titles, 2.2, 3.4, "routed layer", ["right per token"], sharey=True)
    for (ax,), (model, which) in zip(axes, pairs, strict=True):
        for index, guess in enumerate(distinct(data["judged"], "guess")):
            for one in having(data["judged"], model=model, guess=guess):
                if label(one) == which and "token_by_layer" in one:
                    values = [np.nan if value is None else value for value in one["token_by_layer"]]
                    ax.plot(values, f"C{index}o-", ms=2, label=guess)
        ax.set_ylim(0, 1)
        ax.title.set_fontsize(7)


TITLE = "The path predictor apart from caches"
EXPERIMENT = Experiment(220, "expertflow-accuracy", TITLE, __doc__, measure, sheets, draw, paper=EXPERTFLOW)
