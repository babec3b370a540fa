"""What is the token scheduler worth?

Two batches run in turns, and before each token of theirs the scheduler splits the tokens of both anew, by predicted
paths (*kmeans*). It is held to the same two batches whose tokens stay where they are (*none*) or are split at random,
in the same pipeline: *sequential* predicts, splits and then runs; *overlapped* begins each thing when what it needs is
there; *dual-batch*, the paper's, does so with two pairs of batches in flight; *clairvoyant* is fed recorded tokens
ahead, as the paper's code is. Predictions and splits take the time that was measured, and regrouping moves keys and
values.

*Twice the batch* has as many sequences under way as a pair, but runs them together and regroups nothing. *Lru* is a
plain cache of slots a layer under the same scheduler: so the scheduler without the predictive cache. *90 %*
and *perfect*: an oracle that is right so often stands for the predictor, in scheduler and cache.
"""

from dataclasses import replace
from itertools import product

from analysis.contest import verdict
from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.expertflow import ASSUMED, PIPELINE, contest, label, made, places, ratio, way
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.services import Service, Way, services

SLOTS, BATCHES = (4, 16), (8, 16, 32)
PIPELINES = ("sequential", "overlapped", "dual-batch", "clairvoyant")
GROUPINGS = ("none", "random", "kmeans")


BESIDE = ("90 %", "perfect", "lru", "over twice the batch")
"""COLUMNS beside the published numbers."""


def ways(service: Service) -> dict[str, Way]:
    """Every pipeline with and without the scheduler, and the scheduler under other terms."""

    def grouped(grouping: str, pipeline: str = PIPELINE, foreseen: float | None = None) -> Way:
        scene = {"regroup": grouping, "pipeline": pipeline} | ({} if foreseen is None else {"foreseen": foreseen})
        return way(service, scene=scene)

    found = {
        f"{grouping}, {pipeline}": grouped(grouping, pipeline)
        for pipeline, grouping in product(PIPELINES, GROUPINGS)
        if pipeline == PIPELINE or grouping != "random"
    }
    for grouping in ("none", "kmeans"):
        found[f"{grouping}, lru"] = Way.of("lru,scope=layer", **grouped(grouping).scene)
        found[f"{grouping}, 90 %"] = grouped(grouping, foreseen=ASSUMED)
        found[f"{grouping}, perfect"] = grouped(grouping, foreseen=1.0)
    plain = way(service, scheduled=False)
    return found | {"plain batches": plain, "twice the batch": replace(plain, times=2)}


COLUMNS = {
    **{pipeline: (f"kmeans, {pipeline}", f"none, {pipeline}") for pipeline in PIPELINES},
    "random": (f"random, {PIPELINE}", f"none, {PIPELINE}"),
    "90 %": ("kmeans, 90 %", "none, 90 %"),
    "perfect": ("kmeans, perfect", "none, perfect"),
    "lru": ("kmeans, lru", "none, lru"),
    "over plain batches": (f"kmeans, {PIPELINE}", "plain batches"),
    "over twice the batch": (f"kmeans, {PIPELINE}", "twice the batch"),
}


def measure(options: ExperimentOptions) -> Data:
    """Every way on the predictors' own data sets, of the models that the paper gives numbers of."""
    said = {claim.model for claim in expertflow().claim if claim.figure == "scheduler"}
    held = [one for one in services(options) if one.in_domain and one.model.name in said]
    cells = contest(places(held, SLOTS, BATCHES), ways, list(COLUMNS.values()), options, "scheduler")
    return {"cells": cells, "made": made(options)}


def sheets(data: Data) -> list[Sheet]:
    """Published beside simulated; then every pipeline."""
    return [_claims(data), _needed(data), _everything(data)]


def _claims(data: Data) -> Sheet:
    rows = []
    for claim in [one for one in expertflow().claim if one.figure == "scheduler"]:
        for cell in having(data["cells"], model=claim.model, in_domain=True):
            found = ratio(cell, *COLUMNS[PIPELINE])
            place = f"{cell['slots']} / {cell['batch']}"
            others = [
                interval(ratio(cell, *COLUMNS[name])) for name in ("90 %", "perfect", "lru", "over twice the batch")
            ]
            rows.append([claim.model, place, claim.text, interval(found), verdict(claim, found), *others])
    columns = [
        "model",
        "slots / batch",
        "published",
        "simulated",
        "so",
        "right in 90 %",
        "perfect",
        "with lru",
        "over twice the batch",
    ]
    return Sheet("The scheduler, on over off", columns, rows, notes("expertflow-scheduler"))


def _needed(data: Data) -> Sheet:
    """How many distinct experts a token needs of a layer call, which is what the scheduler is to lessen."""
    rows = []
    for cell in data["cells"]:
        runs = [cell["runs"][f"{grouping}, {PIPELINE}"] for grouping in GROUPINGS]
        if all(runs):
            needed = [number(run["lookups_per_token"], 3) for run in runs]
            less = number(100 * (1 - runs[2]["lookups_per_token"] / runs[0]["lookups_per_token"]), 1)
            rows.append([cell["model"], label(cell), f"{cell['slots']} / {cell['batch']}", *needed, f"{less} %"])
    columns = ["model", "data", "slots / batch", *GROUPINGS, "fewer"]
    return Sheet("Experts looked up a token", columns, rows, long=True)


def _everything(data: Data) -> Sheet:
    rows = [
        [cell["model"], label(cell), f"{cell['slots']} / {cell['batch']}",
         *(interval(ratio(cell, *pair)) for pair in COLUMNS.values())]
        for cell in data["cells"]
    ]  # fmt: skip
    columns = ["model", "data", "slots / batch", *COLUMNS]
    return Sheet("The scheduler, on over off, by pipeline", columns, rows, long=True)


TITLE = "The token scheduler and its pipelines"
EXPERIMENT = Experiment(240, "expertflow-scheduler", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
