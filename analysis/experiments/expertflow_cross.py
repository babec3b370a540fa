"""What is left of ExpertFlow's lead where its predictor learnt from another data set?

The predictor of a model learnt from one data set and predicts another. Beside the ratios over the baselines stand those
with a perfect predictor (an oracle that costs as much), on the same data: their distance is what accuracy could still
give.
"""

from analysis.contest import verdict
from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.expertflow import ENGINE, OURS, at_claim, contest, label, made, ours, places, ratio, rivals, way
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, notes
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.services import Service, Way, services

SLOTS, BATCHES = (4, 16), (16,)
PERFECT = "perfect predictor"
OVER = ("cache-moe", "lru", "perfect-lfu")


def ways(service: Service) -> dict[str, Way]:
    """ExpertFlow, its rivals, and the engine with a perfect predictor."""
    chosen = {name: way for name, way in rivals().items() if name in OVER}
    perfect = way(service, scheduled=False, scene={"foreseen": 1.0})
    return ours(service) | {PERFECT: perfect} | chosen | {"perfect-lfu": Way.of("perfect-lfu")}


def measure(options: ExperimentOptions) -> Data:
    """Both data sets of every model whose traces carry predictions."""
    told = [one for one in services(options) if one.in_domain is not None]
    pairs = [(mine, over) for mine in (OURS, ENGINE, PERFECT) for over in OVER]
    return {"cells": contest(places(told, SLOTS, BATCHES), ways, pairs, options, "cross-domain"), "made": made(options)}


def sheets(data: Data) -> list[Sheet]:
    """Published beside simulated; then all data sets."""
    rows = []
    for claim in [one for one in expertflow().claim if one.figure == "cross-domain throughput"]:
        cells = [cell for cell in at_claim(claim, data["cells"]) if cell["in_domain"] is False]
        others = having(data["cells"], slots=claim.slots, batch=claim.batch, in_domain=False)
        for cell in cells or others:
            found = ratio(cell, OURS, "cache-moe")
            rows.append([f"{claim.model}, {claim.data}", claim.text, f"{cell['model']}, {cell['data']}",
                         interval(found), verdict(claim, found) if cells else NOTHING])  # fmt: skip
    first = Sheet(
        "Published and simulated ratios over Cache-MoE, 4 slots, batch 16",
        ["published of", "published", "simulated of", "simulated", "so"], rows, notes("expertflow-cross"),
    )  # fmt: skip
    return [first, *(_over(data, over) for over in OVER)]


def _over(data: Data, over: str) -> Sheet:
    rows = [
        [cell["model"], label(cell), str(cell["slots"]),
         *(interval(ratio(cell, mine, over)) for mine in (OURS, ENGINE, PERFECT))]
        for cell in data["cells"]
    ]  # fmt: skip
    columns = ["model", "data", "slots", OURS, "no scheduler", "no scheduler, perfect predictor"]
    return Sheet(f"Throughput over {over}, batch 16", columns, rows)


TITLE = "A predictor of another domain"
EXPERIMENT = Experiment(260, "expertflow-cross", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
