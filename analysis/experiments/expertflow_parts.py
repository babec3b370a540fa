"""What does each part of ExpertFlow add? Each is taken away in turn, and each is tried alone.

*Whole* is the paper's form. Without the *scheduler* tokens stay in their batches; without the *pipeline* a step's
predictions and splits begin when the step before has ended; without *shares* slots are split evenly over layers;
without *correction* missed experts wait behind what was predicted, and what was predicted in vain stays as long as what
was not; without *prefetch* predictions decide only who leaves; without *its eviction* the least recently used leaves.
Without the *predictor* the same engine goes by the experts of the token before, or by those that the sequence took
most.

*Alone*: LRU with slots a layer, to which one part is added.
"""

from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.expertflow import ASSUMED, contest, label, made, places, ratio, way
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.services import Service, Way, own_services

WHOLE, PLAIN = "whole", "lru"
SLOTS, BATCHES = (4, 16), (16,)


def ways(service: Service) -> dict[str, Way]:
    """The whole, each part away, and each part alone."""
    scene = way(service).scene
    return {
        WHOLE: way(service),
        "no shares": way(service, plec=False),
        "no correction": way(service, correction=False),
        "no prefetch": way(service, prefetch=False),
        "no own eviction": way(service, eviction="lru"),
        "previous token": Way.of("expertflow-guess,guess=previous", **scene),
        "the sequence's most": Way.of("expertflow-guess,guess=slp", **scene),
        "free predictions": way(service, charge="free"),
        "no scheduler": way(service, scheduled=False),
        "no pipeline": way(service, scene={"pipeline": "sequential"}),
        f"right in {ASSUMED:.0%}": way(service, scene={"foreseen": ASSUMED}),
        "scheduler alone": Way.of("lru,scope=layer", **scene),
        "eviction alone": way(service, scheduled=False, prefetch=False, charge="free"),
        "prefetch alone": way(service, scheduled=False, eviction="lru", plec=False, charge="free"),
        PLAIN: Way.of("lru,scope=layer"),
    }


def measure(options: ExperimentOptions) -> Data:
    """Everything over the whole and over plain LRU, on the predictor's own data sets."""
    fought = places(own_services(options), SLOTS, BATCHES)
    names = list(dict.fromkeys(name for one, _, _ in fought for name in ways(one)))
    pairs = [(name, over) for name in names for over in (WHOLE, PLAIN) if name != over]
    return {"names": names, "cells": contest(fought, ways, pairs, options, "parts"), "made": made(options)}


def sheets(data: Data) -> list[Sheet]:
    """Each part away over the whole; each alone over plain LRU."""
    away = [name for name in data["names"] if "alone" not in name and name not in (WHOLE, PLAIN)]
    alone = [name for name in data["names"] if "alone" in name]
    return [
        _table(data, "Without one part, over the whole", away, WHOLE),
        _table(data, "One part alone, over lru", [WHOLE, *alone], PLAIN),
    ]


def _table(data: Data, title: str, names: list[str], over: str) -> Sheet:
    rows = []
    for model in distinct(data["cells"], "model"):
        for cell in having(data["cells"], model=model):
            speed = number(run["tokens_per_s"]) if (run := cell["runs"][over]) else ""
            cells = [interval(ratio(cell, name, over)) for name in names]
            rows.append([model, label(cell), f"{cell['slots']} / {cell['batch']}", speed, *cells])
    columns = ["model", "data", "slots / batch", f"{over}, tokens/s", *names]
    return Sheet(title, columns, rows, notes("expertflow-parts"))


TITLE = "ExpertFlow's parts"
EXPERIMENT = Experiment(250, "expertflow-parts", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
