"""Is it DoMoE's requests that are better than FMoE's, or what it keeps?

Both ask for experts ahead, and both evict what the entries of their tables take least. DoMoE's tables are of the
prompt's own domains, FMoE's is of all. Here the requests of each run with the eviction of each. *Perfect-lfu* is the
control: whoever was needed least since the run began goes, and nothing that was profiled is asked.
"""

from itertools import product

from analysis.altered import Altered, replayed_altered
from analysis.bootstrap import Ratio, mean_ratio
from analysis.contest import contest
from analysis.entries import distinct, having
from analysis.experiment import HALF, Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number
from sim.policies.named import NamedPolicy

REQUESTS = ("domoe", "fmoe")
EVICTIONS = ("domoe", "fmoe", "perfect-lfu")
CONTESTANTS = [
    Altered(f"{requests}, {eviction}", requests, evicts_as=NamedPolicy(eviction, eviction))
    for requests, eviction in product(REQUESTS, EVICTIONS)
]
EFFECTS = {
    **{f"requests, {eviction}": (f"domoe, {eviction}", f"fmoe, {eviction}") for eviction in EVICTIONS},
    **{f"eviction, {requests}": (f"{requests}, domoe", f"{requests}, fmoe") for requests in REQUESTS},
    "eviction over perfect-lfu, domoe": ("domoe, domoe", "domoe, perfect-lfu"),
    "both": ("domoe, domoe", "fmoe, fmoe"),
}
"""Ratios of two runs, by what differs in them and what is the same."""


def measure(options: ExperimentOptions) -> Data:
    """All requests with all evictions on every workload, and what each part is worth, with intervals."""
    cells = [(model, workload) for model in options.models for workload in model.workloads]
    places = [options.place(model, model.workloads[workload]) for model, workload in cells]
    matches = contest(places, [CONTESTANTS] * len(cells), options, "two by two", replayed_altered)
    measured: list[Data] = []
    drawn: dict[tuple[str, str], list[Ratio]] = {}
    for (model, workload), match in zip(cells, matches, strict=True):
        ratios = {effect: match.ratio("throughput", *pair) for effect, pair in EFFECTS.items()}
        for effect, ratio in ratios.items():
            drawn.setdefault((model.name, effect), []).append(ratio)
        measured.append(
            {
                "model": model.name,
                "workload": workload,
                "runs": match.runs(),
                "effects": {effect: ratio.to_json() for effect, ratio in ratios.items()},
            }
        )
    means = [
        {"model": model, "effect": effect, **mean_ratio(ratios).to_json()} for (model, effect), ratios in drawn.items()
    ]
    return {"cells": measured, "means": means, "made": options.made()}


def sheets(data: Data) -> list[Sheet]:
    """Tokens/s of every run, then what the parts are worth."""
    speeds = [
        [cell["model"], cell["workload"], *(number(cell["runs"][one.label]["tokens_per_s"], 3) for one in CONTESTANTS)]
        for cell in data["cells"]
    ]
    parts = []
    for model in distinct(data["cells"], "model"):
        mean = {one["effect"]: one for one in having(data["means"], model=model)}
        for cell in [*having(data["cells"], model=model), {"workload": "mean", "effects": mean}]:
            parts.append([model, cell["workload"], *(interval(cell["effects"][effect]) for effect in EFFECTS)])
    where = ["model", "workload"]
    return [
        Sheet("What each part is worth", [*where, *EFFECTS], parts, notes("two-by-two")),
        Sheet("Tokens/s by requests and eviction", [*where, *(one.label for one in CONTESTANTS)], speeds),
    ]


TITLE = "Requests and eviction, exchanged"
EXPERIMENT = Experiment(15, "domoe-two-by-two", TITLE, __doc__, measure, sheets, parts=[Part(), HALF])
