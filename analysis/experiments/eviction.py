"""How much of a policy's speed is its eviction, and how right must a predictor be under each rule?

Every policy makes its own requests, and evicts by each rule in turn. *lru* evicts the least recently used, *lfu* the
least often used since it was loaded, *perfect-lfu* the least often used since the run began. *score* evicts what the
policy itself values least. A difference along a row is eviction's, one along a column the requests' and their costs'.

Perfect-lfu is the control: it counts the traffic at hand, and needs no profile, no label and no prediction.
"""

from collections.abc import Iterator
from itertools import product
from statistics import geometric_mean
from typing import Any, get_args

from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, notes, number
from analysis.runs import Design, spread, unless_too_small
from sim.policies.named import NamedPolicy

RULES = ("lru", "lfu", "perfect-lfu", "score", "next-use")
"""The rules compared; the first three know nothing but the traffic at hand."""
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "domoe": ("domoe", {}),
    "fmoe": ("fmoe", {}),
    "promoe": ("promoe", {}),
    "promoe, one pool": ("promoe", {"scope": "global"}),
    "cache-moe": ("cache-moe", {}),
    "cache-moe, one pool": ("cache-moe", {"scope": "global"}),
}
"""Policies that ask for experts ahead, by name: each evicts by the rules that it takes."""
NO_PREFETCH = "no prefetch"
ALONE = {
    "lru": NamedPolicy(NO_PREFETCH, "lru"),
    "lfu": NamedPolicy(NO_PREFETCH, "lfu"),
    "perfect-lfu": NamedPolicy(NO_PREFETCH, "perfect-lfu"),
    "score": NamedPolicy(NO_PREFETCH, "popularity", {"by": "domain"}),
    "next-use": NamedPolicy(NO_PREFETCH, "oracle", {"prefetch": False, "eviction": "next-use"}),
}
"""The rules without requests for what a token will take."""
SPLIT = {
    **{rule: NamedPolicy(f"{NO_PREFETCH}, a layer", rule, {"scope": "layer"}) for rule in RULES[:3]},
    "next-use": NamedPolicy(
        f"{NO_PREFETCH}, a layer", "oracle", {"prefetch": False, "eviction": "next-use", "scope": "layer"}
    ),
}
"""The same with slots split over layers, as ``promoe`` and ``cache-moe`` have them."""
ORACLES = {"oracle": (NO_PREFETCH, "global"), "oracle, a layer": (f"{NO_PREFETCH}, a layer", "layer")}
"""The oracles, and by what each is held against itself: its slots without requests."""
LARGER = "50%"
ACCURACIES = tuple(round(0.05 * i, 2) for i in range(21))
_SHOWN = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The accuracies that stand in the table."""


def _contestants() -> Iterator[tuple[str, NamedPolicy]]:
    """Rule and policy of every run that is no oracle's."""
    yield from (*ALONE.items(), *SPLIT.items())
    for (label, (name, values)), rule in product(REQUESTS.items(), RULES):
        one = NamedPolicy(label, name, values | {"eviction": rule})
        if rule in get_args(one.kind.takes.model_fields["eviction"].annotation):
            yield rule, one


def measure(options: ExperimentOptions) -> Data:
    """All rules on each model's first and mixed workload; the oracle's on the first, at every accuracy."""
    jobs: list[tuple[Data, Design]] = []
    for model, cache in product(options.models, dict.fromkeys((options.cache, LARGER))):
        first = next(iter(model.workloads))
        for workload in dict.fromkeys((first, model.mixed)):
            place = options.place(model, model.workloads[workload], cache=cache)
            where = {"model": model.name, "cache": cache, "workload": workload}
            jobs += [
                (where | {"requests": one.label, "eviction": rule, "accuracy": None}, Design(place, one))
                for rule, one in _contestants()
            ]
            if workload == first:
                jobs += [
                    (
                        where | {"requests": label, "eviction": rule, "accuracy": accuracy},
                        Design(place, NamedPolicy(label, "oracle", values | {"accuracy": accuracy, "eviction": rule})),
                    )
                    for label, values in ((label, {"scope": scope}) for label, (_, scope) in ORACLES.items())
                    for rule, accuracy in product(RULES, ACCURACIES)
                ]
    outcomes = spread(unless_too_small, [design for _, design in jobs], options.processes, "eviction")
    runs = [
        where | {"tokens_per_s": done.to_json()["tokens_per_s"]}
        for (where, _), done in zip(jobs, outcomes, strict=True)
        if done is not None
    ]
    return {"accuracies": list(ACCURACIES), "runs": runs, "made": options.made()}


def _places(data: Data) -> list[tuple[str, str, str]]:
    """Model, cache size and workload of the runs, in order."""
    return list(dict.fromkeys((run["model"], run["cache"], run["workload"]) for run in data["runs"]))


def _at(data: Data, place: tuple[str, str, str], accurate: bool) -> list[Data]:
    """Runs of a place: the oracle's, or the others."""
    model, cache, workload = place
    found = having(data["runs"], model=model, cache=cache, workload=workload)
    return [run for run in found if (run["accuracy"] is not None) == accurate]


def _speeds(runs: list[Data]) -> dict[str, dict[str, float]]:
    """Tokens/s by what is requested and by rule."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        found.setdefault(run["requests"], {})[run["eviction"]] = run["tokens_per_s"]
    return found


def _short(data: Data) -> Sheet:
    """By cache size the mean over models and workloads of each rule's speed over that of plain lru."""
    caches = dict.fromkeys(cache for _, cache, _ in _places(data))
    rows = []
    for cache in caches:
        over: dict[tuple[str, str], list[float]] = {}
        for place in (place for place in _places(data) if place[1] == cache):
            speeds = _speeds(_at(data, place, accurate=False))
            for requests, by_rule in speeds.items():
                for rule, speed in by_rule.items():
                    over.setdefault((requests, rule), []).append(speed / speeds[NO_PREFETCH]["lru"])
        mean = {pair: geometric_mean(ratios) for pair, ratios in over.items()}
        rows += [
            [cache, requests, *(number(mean.get((requests, rule))) for rule in RULES)]
            for requests in dict.fromkeys(requests for requests, _ in mean)
        ]
    return Sheet("Eviction in short", ["cache", "requests", *RULES], rows, notes("eviction-short"))


def sheets(data: Data) -> list[Sheet]:
    """In short; tokens/s of each policy by rule; then of the oracle by rule and accuracy."""
    columns = ["model", "cache", "workload", "requests", *RULES, "most"]
    rows = []
    for place in _places(data):
        for requests, speed in _speeds(_at(data, place, accurate=False)).items():
            most = max((rule for rule in speed if rule != "next-use"), key=speed.__getitem__)
            rows.append([*place, requests, *(number(speed.get(rule), 3) for rule in RULES), most])
    return [_short(data), Sheet("Tokens/s by eviction rule", columns, rows, notes("eviction")), _by_accuracy(data)]


def _by_accuracy(data: Data) -> Sheet:
    shown = [accuracy for accuracy in data["accuracies"] if accuracy in _SHOWN]
    rows = []
    for place in _places(data):
        alone = _speeds(_at(data, place, accurate=False))
        best = max(alone.get(which, {}).get(rule, 0.0) for which, _ in ORACLES.values() for rule in RULES[:3])
        oracle = _at(data, place, accurate=True)
        for label, rule in dict.fromkeys((run["requests"], run["eviction"]) for run in oracle):
            speed = {run["accuracy"]: run["tokens_per_s"] for run in having(oracle, requests=label, eviction=rule)}
            own = None if rule == "score" else alone[ORACLES[label][0]][rule]
            rows.append(
                [*place, label, rule, number(own, 3), *(number(speed[a], 3) for a in shown), _from(speed, own),
                 _from(speed, best)]
            )  # fmt: skip
    columns = ["model", "cache", "workload", "requests", "eviction", NO_PREFETCH, *(f"{a:.2f}" for a in shown),
               "pays from", "beats all from"]  # fmt: skip
    return Sheet("How right a predictor must be: the oracle's tokens/s by accuracy", columns, rows,
                 notes("eviction-accuracy"))  # fmt: skip


def _from(speed: dict[float, float], other: float | None) -> str:
    """The least accuracy from which on all are faster than ``other``."""
    if other is None:
        return NOTHING
    slower = [accuracy for accuracy, value in speed.items() if value <= other]
    faster = [accuracy for accuracy in speed if not slower or accuracy > max(slower)]
    return f"{min(faster):.2f}" if faster else "never"


EXPERIMENT = Experiment(115, "eviction", "Eviction apart from requests", __doc__, measure, sheets)
