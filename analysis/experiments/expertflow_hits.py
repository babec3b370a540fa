"""Does the predictive cache find more experts than LRU?

Both have the same slots a layer, no scheduler regroups tokens, and each look-up is one distinct expert that a batch
needs in a layer. *Hit*: resident when the route is known. *Hit or late*: its copy was at least asked for by then. The
predictive cache (PLEC) asks for what is predicted, so it is late where LRU misses.

*Lru* knows the batch: all that a layer's tokens need is looked up at once, and none of it is evicted for another of it.
*One by one* does not: experts are looked up and loaded in rising order, and may push each other out. *Perfect-lfu* has
one pool and evicts what was needed least since the run began. *MIN* is the most hits that any cache without prefetch
can have at these bytes.
"""

from collections import OrderedDict

from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.expertflow import ASSUMED, made, places, way
from analysis.jackknife import fought, level
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, notes, number, percent
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.runs import scene_at
from analysis.services import SLOTS, Service, Way, designs, own_services
from sim.workload import Workload
from traces.schema import DECODE

PLEC, LRU = "plec", "lru"
COLUMNS = ("hit ratio", "hit or late")
UNDRAWN = ("plec, perfect", "lru, one pool", "perfect-lfu", "cache-moe")
"""Shown without intervals."""


def ways(service: Service) -> dict[str, Way]:
    """What is compared."""
    return {
        PLEC: way(service, scheduled=False),
        "plec, 90 %": way(service, scheduled=False, scene={"foreseen": ASSUMED}),
        "plec, perfect": way(service, scheduled=False, scene={"foreseen": 1.0}),
        LRU: Way.of("lru,scope=layer"),
        "lru, one pool": Way.of("lru"),
        "perfect-lfu": Way.of("perfect-lfu"),
        "cache-moe": Way.of("cache-moe"),
    }


def measure(options: ExperimentOptions) -> Data:
    """Hits of every cache on every data set of the predictor's own domain, with all slots and batches."""
    at = places(own_services(options))
    bouts = [designs(one.place(options, slots, batch), ways(one)) for one, slots, batch in at]
    cells = []
    for (one, slots, batch), ran in zip(at, fought(bouts, options.processes, "hits", UNDRAWN), strict=True):
        work = scene_at(one.place(options, slots, batch)).work
        found = {name: {what: level(what, outcome) for what in COLUMNS} for name, outcome in ran.items() if outcome}
        most = next(outcome.report.bounds["min_hit_ratio"] for outcome in ran.values() if outcome)
        shown = {"hits": found, "one by one": one_by_one(work, slots), "min": most and round(most, 4)}
        cells.append(one.to_json() | {"slots": slots, "batch": batch} | shown)
    return {"cells": cells, "made": made(options)}


def one_by_one(work: Workload, slots: int) -> float:
    """The share of decode's look-ups that LRU a layer finds if it loads them one after another, in rising order."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(work.n_layers)]
    decode = work.schedule.phase == DECODE
    found = looked = 0
    for call, expert in zip(work.call.tolist(), work.expert.tolist(), strict=True):
        cached = caches[call % work.n_layers]
        hit = expert in cached
        if hit:
            cached.move_to_end(expert)
        else:
            cached[expert] = None
            if len(cached) > slots:
                cached.popitem(last=False)
        if decode[call // work.n_layers]:
            found, looked = found + hit, looked + 1
    return round(found / max(1, looked), 4)


def sheets(data: Data) -> list[Sheet]:
    """Published points beside simulated ones; then everything."""
    names = list(data["cells"][0]["hits"])
    rows = []
    for cell in data["cells"]:
        shown = [_both(cell["hits"].get(name)) for name in names]
        rows.append(
            [cell["model"], cell["data"], str(cell["slots"]), str(cell["batch"]), *shown, percent(cell["one by one"]),
             percent(cell["min"])]
        )  # fmt: skip
    columns = ["model", "data", "slots", "batch", *names, "lru, one by one", "MIN"]
    return [_points(data), Sheet("Hits / hits or lates", columns, rows, long=True)]


def _both(found: Data | None) -> str:
    return NOTHING if found is None else " / ".join(percent(found[name]["value"]) for name in COLUMNS)


def _points(data: Data) -> Sheet:
    rows = []
    for point in [one for one in expertflow().points("hits") if one.at == "PLEC"]:
        (lru,) = (
            one.hit_ratio
            for one in expertflow().points("hits")
            if one.at == "LRU" and (one.slots, one.batch) == (point.slots, point.batch)
        )
        for cell in having(data["cells"], model=point.model, slots=point.slots, batch=point.batch):
            plec, plain = cell["hits"][PLEC], cell["hits"][LRU]
            rows.append(
                [f"{point.slots} / {point.batch}", percent(point.hit_ratio),
                 *(_ranged(plec[name]) for name in COLUMNS), percent(lru), _ranged(plain["hit ratio"]),
                 percent(cell["one by one"]), _both(cell["hits"]["perfect-lfu"]), percent(cell["min"])]
            )  # fmt: skip
    columns = ["slots / batch", "PLEC, published", "PLEC hits", "PLEC hits or lates", "LRU, published", "LRU hits",
               "one by one", "perfect-lfu", "MIN"]  # fmt: skip
    return Sheet("Published and simulated hits, Switch-32", columns, rows, notes("expertflow-hits"))


def _ranged(found: Data) -> str:
    return f"{percent(found['value'])} ± {number(100 * found['plus_minus'], 1)}"


def draw(data: Data, figure: Figure) -> None:
    """Hits over the batch, a panel a model, a line a cache and slots."""
    models = list(dict.fromkeys(cell["model"] for cell in data["cells"]))
    axes = panels(figure, models, 2.6, 3.6, "sequences in a batch", ["hits"], sharey=True)
    for (ax,), model in zip(axes, models, strict=True):
        mine = having(data["cells"], model=model)
        for index, name in enumerate((PLEC, LRU, "perfect-lfu")):
            for style, slots in zip(("-", "--", ":"), sorted(SLOTS, reverse=True), strict=True):
                at = [cell for cell in having(mine, slots=slots) if name in cell["hits"]]
                batches = [cell["batch"] for cell in at]
                hits = [cell["hits"][name]["hit ratio"]["value"] for cell in at]
                ax.plot(batches, hits, f"C{index}{style}", label=f"{name}, {slots} slots")
        ax.set_xscale("log", base=2)
        batches = sorted({cell["batch"] for cell in mine})
        ax.set_xticks(batches, [str(batch) for batch in batches])
        ax.set_ylim(0, 1)


TITLE = "Hits of the predictive cache and of LRU"
EXPERIMENT = Experiment(230, "expertflow-hits", TITLE, __doc__, measure, sheets, draw, paper=EXPERTFLOW)
