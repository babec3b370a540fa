"""A trace's routing held against what is published of released models, in `published_routing.toml` beside this file."""

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ground.errors import InputError
from traces.statistics.figures import REPETITIONS, figures, parting
from traces.trace import Trace

PUBLISHED: dict[str, Any] = tomllib.loads(
    (resources.files("traces.statistics") / "published_routing.toml").read_text("utf-8")
)


@dataclass(frozen=True)
class Limits:
    """A range, open where None, and whether a found value lies in it."""

    low: float | None
    high: float | None

    def verdict(self, found: float | None) -> str | None:
        """``within``, ``below`` or ``above``; None where nothing was found."""
        if found is None:
            return None
        if self.low is not None and found < self.low:
            return "below"
        return "above" if self.high is not None and found > self.high else "within"


def models() -> list[str]:
    """The models that traces can be held against, by name."""
    return sorted({entry["model"] for entry in PUBLISHED["figures"]} | set(PUBLISHED["nearest"]))


def held_against(traces: Sequence[Trace], model: str) -> dict[str, Any]:
    """Traces of one model beside what is published of ``model``, as JSON.

    ``statistics`` are `figures` of the traces together, ``parting`` is `parting` of all their rows. ``judged`` has a
    line for each published figure and each target: what was ``found`` in prompt rows (decode rows where there are no
    others: ``judged_rows`` says which) and in ``decode`` rows, the lowest and highest ``published`` value, all
    ``published_values`` with the model, text and source of each, and the ``verdict`` where there are limits. Limits are
    those of a target, else the range that several texts of the model itself have, with the tolerance. ``beside`` are
    the models whose figures are shown; of others than ``model`` no repetition is, as that follows from how many experts
    there are.

    Raises InputError for a model of which nothing is published, and as `Trace.concat` does.
    """
    if model not in models():
        raise InputError(f"--against {model!r}: nothing is published of it here; expected one of {', '.join(models())}")
    whole = Trace.concat(traces)
    found = figures(whole)
    rows = "decode" if found["prompt"] is None else "prompt"
    beside = [m for m in (model, *PUBLISHED["nearest"].get(model, ())) if any(e["model"] == m for e in _entries(m))]
    judged = [_judged(found, rows, model, *key, shown) for key, shown in _by_statistic(model, beside).items()]
    return {
        "model": whole.meta["model"]["name"],
        "against": model,
        "beside": beside,
        "traces": [{"file": Path(trace.source).name, "sha256": trace.sha256} for trace in traces],
        "judged_rows": rows,
        "statistics": found,
        "parting": parting(whole),
        "judged": judged,
        "sources": _sources(judged),
    }


def _sources(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the published figures are from, how they came about, and which texts they are of."""
    texts: dict[str, dict[str, None]] = {}
    for line in judged:
        for each in line["published_values"]:
            texts.setdefault(each["source"], {})[each["text"]] = None
    return [
        {key: PUBLISHED["sources"][name][key] for key in ("title", "how")} | {"texts": list(of)}
        for name, of in texts.items()
    ]


def _entries(model: str) -> Iterator[dict[str, Any]]:
    return (entry for entry in PUBLISHED["figures"] if entry["model"] == model)


def _by_statistic(model: str, beside: Sequence[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """For each (statistic, at) that is published or aimed at: the published values, each with what it is of."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for other in beside:
        for entry in _entries(other):
            if other != model and entry["statistic"] in REPETITIONS:
                continue
            for place, at in enumerate(entry["at"]):
                found.setdefault((entry["statistic"], at), []).extend(
                    {"model": other, "text": text, "value": values[place], "source": entry["source"]}
                    for text, values in entry["values"].items()
                )
    for target in PUBLISHED["targets"]:
        if model in target["models"]:
            found.setdefault((target["statistic"], target["at"]), [])
    order = list(PUBLISHED["tolerance"])
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0])))


def _judged(
    found: dict[str, Any], rows: str, model: str, statistic: str, at: str, shown: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One line of the comparison."""
    limits, is_target = _limits(model, statistic, at, [each["value"] for each in shown if each["model"] == model])
    values = [each["value"] for each in shown]
    value, decode, random = (
        (found[phase] or {}).get(statistic, {}).get(key)
        for phase, key in ((rows, at), ("decode", at), (rows, "random"))
    )
    return {
        "statistic": statistic,
        "at": at,
        "found": value,
        "decode": decode,
        "random": random,
        "published": [min(values), max(values)] if values else None,
        "published_values": list(shown),
        "limits": None if limits is None else [limits.low, limits.high],
        "target": is_target,
        "verdict": None if limits is None else limits.verdict(value),
    }


def _limits(model: str, statistic: str, at: str, own: Sequence[float]) -> tuple[Limits | None, bool]:
    """What a value is to lie within, and whether that is a target."""
    for target in PUBLISHED["targets"]:
        if model in target["models"] and (statistic, at) == (target["statistic"], target["at"]):
            return Limits(target.get("low"), target.get("high")), True
    if len(own) < 2:  # one text is no range
        return None, False
    wider = PUBLISHED["tolerance"][statistic]
    most = 1.0 if max(own) <= 1 else math.inf  # what is a share stays one
    return Limits(round(min(own) - wider, 4), min(round(max(own) + wider, 4), most)), False
