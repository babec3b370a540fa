"""What is the predictor worth over rivals in their best fair form?

None of these predicts by a net: *lru* with slots a layer or in one pool, which knows the batch and evicts none of its
experts for another of them; *perfect-lfu*, which evicts what was needed least since the run began; *cache-moe* with one
pool and that eviction. The engine goes also by plain guesses, each for free: the experts of the token before, those
that the sequence took most, those that the profile took most. So *over the best guess* is what the net adds to the
engine, and *over the best rival* what the whole adds to a cache.

*Pays from*: the least accuracy, in steps of 0.1, from which on the engine with an oracle is faster than all rivals.
"""

from collections.abc import Iterable

from analysis.experiment import Data, Experiment
from analysis.expertflow import AT_PAPERS, CODE, ENGINE, OURS, contest, label, made, ours, places, ratio, way
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.services import Service, Way, own_services

SLOTS, BATCHES = (4, 16), (4, 16)
RIVALS = {
    "lru": Way.of("lru,scope=layer"),
    "lru, one pool": Way.of("lru"),
    "perfect-lfu": Way.of("perfect-lfu"),
    "cache-moe, perfect-lfu": Way.of("cache-moe,eviction=perfect-lfu,scope=global"),
}
GUESSES = {f"by {guess}": Way.of(f"expertflow-guess,guess={guess}") for guess in ("previous", "slp", "popularity")}
ACCURACIES = tuple(round(0.1 * tenth, 1) for tenth in range(11))


def ways(service: Service) -> dict[str, Way]:
    """ExpertFlow, rivals, and its engine with guesses and oracles."""
    oracles = {_oracle(a): way(service, scheduled=False, scene={"foreseen": a}) for a in ACCURACIES}
    return ours(service) | RIVALS | GUESSES | oracles | {"clairvoyant": Way.of("clairvoyant")}


def _oracle(accuracy: float) -> str:
    return f"oracle {accuracy}"


def measure(options: ExperimentOptions) -> Data:
    """Everything on the predictors' own data sets."""
    fought = places(own_services(options), SLOTS, BATCHES)
    pairs = [(mine, over) for mine in (OURS, AT_PAPERS, ENGINE, "clairvoyant") for over in (*RIVALS, *GUESSES)]
    return {
        "cells": contest(fought, ways, pairs, options, "rivals", [CODE, *map(_oracle, ACCURACIES)]),
        "made": made(options),
    }


def sheets(data: Data) -> list[Sheet]:
    """In short; over every rival and guess; over accuracy."""
    return [_short(data), _over(data, [*RIVALS, *GUESSES]), _accuracies(data)]


def _speed(cell: Data, name: str) -> float:
    run = cell["runs"][name]
    return run["tokens_per_s"] if run else 0.0


def _best(cell: Data, names: Iterable[str]) -> str:
    return max(names, key=lambda name: _speed(cell, name))


def pays_from(cell: Data) -> float | None:
    """The least accuracy from which on the engine with an oracle is faster than all rivals; None for never."""
    most = max(_speed(cell, name) for name in RIVALS)
    slower = [accuracy for accuracy in ACCURACIES if _speed(cell, _oracle(accuracy)) <= most]
    later = [accuracy for accuracy in ACCURACIES if not slower or accuracy > max(slower)]
    return min(later) if later else None


def _where(cell: Data) -> list[str]:
    return [cell["model"], label(cell), f"{cell['slots']} / {cell['batch']}"]


def _short(data: Data) -> Sheet:
    rows = []
    for cell in data["cells"]:
        rival, guess = _best(cell, RIVALS), _best(cell, GUESSES)
        cells = [interval(ratio(cell, mine, over)) for mine in (OURS, AT_PAPERS) for over in (rival, guess)]
        most = interval(ratio(cell, "clairvoyant", rival))
        rows.append([*_where(cell), rival, guess, *cells, most, number(pays_from(cell), 1)])
    columns = ["model", "data", "slots / batch", "best rival", "best guess", "over that rival", "over that guess",
               "at 90 %, over the rival", "at 90 %, over the guess", "clairvoyant over the rival",
               "pays from"]  # fmt: skip
    return Sheet("ExpertFlow over the best of each", columns, rows, notes("expertflow-rivals"))


def _over(data: Data, names: list[str]) -> Sheet:
    rows = [[*_where(cell), *(interval(ratio(cell, OURS, name)) for name in names)] for cell in data["cells"]]
    columns = ["model", "data", "slots / batch", *names]
    return Sheet("ExpertFlow's throughput over each", columns, rows, long=True)


def _accuracies(data: Data) -> Sheet:
    rows = [[*_where(cell), *(number(_speed(cell, _oracle(a))) for a in ACCURACIES)] for cell in data["cells"]]
    columns = ["model", "data", "slots / batch", *map(str, ACCURACIES)]
    return Sheet("Tokens/s of the engine by the accuracy of an oracle", columns, rows, long=True)


TITLE = "Rivals at their best, and what the predictor adds"
EXPERIMENT = Experiment(280, "expertflow-rivals", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
