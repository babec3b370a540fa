"""DoMoE and ExpertFlow on the same traces, with the same bytes, alone and in batches.

DoMoE searches a table of embeddings, so the traces must hold these. Both learn from the profile splits of the model's
traces. DoMoE is run as its paper has it and in its fastest form (*best*). ExpertFlow's engine goes by its net where the
traces carry its predictions, and else by an oracle that is right in 90 % (a reference, marked by a star) and by what
can be had without a net: the experts that the profile's tokens of the same id took (*by token*), or the token before.
No scheduler regroups tokens, so that all run the same batches.
"""

from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.expertflow import ASSUMED, contest, made, ratio, way
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.services import Service, Way, services

CACHES = ("25%", "50%")
SHOWN = (1, 4, 16, 32)
"""Batches; of the largest one is full at first."""
CONTROL = "perfect-lfu"


def ways(service: Service) -> dict[str, Way]:
    """Both systems' forms, and what predicts nothing."""
    star = " *" if service.in_domain is None else ""
    flow = {
        f"expertflow{star}": way(service, scheduled=False),
        "at 90 % *": way(service, scheduled=False, scene={"foreseen": ASSUMED}),
    }
    plain = {
        "domoe": "domoe",
        "domoe, best": "domoe,mode=best",
        "by token": "expertflow-guess,guess=tlp",
        "by previous token": "expertflow-guess,guess=previous",
        "lru, a layer": "lru,scope=layer",
        CONTROL: CONTROL,
    }
    named = flow | {name: Way.of(text) for name, text in plain.items()}
    return {
        f"{name}, {cache}": Way(one.policy, {**one.scene, "cache": cache})
        for cache in CACHES
        for name, one in named.items()
    }


def measure(options: ExperimentOptions) -> Data:
    """Everything on every data set with embeddings, batch 1 and up."""
    held = services(options, embedded=True)
    places = [(one, min(one.slots, default=1), batch) for one in held for batch in SHOWN if batch <= one.sequences]
    names = list(dict.fromkeys(name for one in held for name in ways(one)))
    pairs = [(name, f"{CONTROL}, {name.rpartition(', ')[2]}") for name in names]
    cells = contest(places, ways, pairs, options, "domoe beside expertflow")
    return {"names": names, "cells": cells, "made": made(options)}


def sheets(data: Data) -> list[Sheet]:
    """Tokens/s over those of perfect-lfu, a table a cache size."""
    return [_table(data, cache) for cache in CACHES]


def _table(data: Data, cache: str) -> Sheet:
    control = f"{CONTROL}, {cache}"
    names = [name for name in data["names"] if name.endswith(cache) and name != control]
    rows = []
    for model in distinct(data["cells"], "model"):
        for cell in having(data["cells"], model=model):
            speed = number(cell["runs"][control]["tokens_per_s"], 3) if cell["runs"].get(control) else NOTHING
            shown = [interval(ratio(cell, name, control)) for name in names]
            rows.append([model, cell["data"], str(cell["batch"]), speed, *shown])
    columns = ["model", "data", "batch", f"{CONTROL}, tokens/s", *(name.rpartition(", ")[0] for name in names)]
    return Sheet(f"Throughput over perfect-lfu, cache {cache}", columns, rows, notes("expertflow-domoe"))


TITLE = "DoMoE beside ExpertFlow"
EXPERIMENT = Experiment(290, "expertflow-domoe", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
