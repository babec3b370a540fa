"""How DoMoE compares with others when the cache holds 10 to 90 % of all experts.

The paper does not state its cache size, and it decides most. What is predicted does not depend on it.
"""

from itertools import product

import numpy as np

from analysis.contest import contest
from analysis.contestants import CHOICES, DOMOE, ENTRIES, MOE_INFINITY, TABLELESS
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import Sheet, interval, notes, number, run_cells
from analysis.published import ALL, domoe
from analysis.runs import unless_too_small
from sim.policies.named import NamedPolicy

_NONE: dict[str, float | None] = {"value": None, "low": None, "high": None}
CACHES = ("10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%", "90%")
OTHERS = [NamedPolicy("fmoe, N", "fmoe", {"entries": ENTRIES, **CHOICES[DOMOE]}), MOE_INFINITY, *TABLELESS]
NAMES = [other.label for other in OTHERS]


def measure(options: ExperimentOptions) -> Data:
    """DoMoE and others at every cache size, on each model's mixed workload (or the last one that it has)."""
    sizes = list(product(options.models, CACHES))
    places = [options.place(model, model.workloads[model.mixed], cache=cache) for model, cache in sizes]
    everyone = [NamedPolicy(DOMOE, "domoe", CHOICES[DOMOE]), *OTHERS]
    matches = contest(places, [everyone] * len(places), options, "cache sizes", unless_too_small)
    points = [
        {
            "model": model.name,
            "workload": model.mixed,
            "cache": cache,
            "runs": match.runs(),
            "over": {one: match.ratio("throughput", DOMOE, one).to_json() for one in NAMES if one in match.ran},
        }
        for (model, cache), match in zip(sizes, matches, strict=True)
        if DOMOE in match.ran
    ]
    return {"points": points, "made": options.made()}


def _named(data: Data) -> list[str]:
    """The others that were run, in order."""
    return [name for name in NAMES if any(name in p["over"] for p in data["points"])]


def sheets(data: Data) -> list[Sheet]:
    """Ratios of throughput by cache size, then DoMoE's own numbers beside the bound."""
    names = _named(data)
    rows = [
        [p["model"], p["cache"], *(interval(p["over"].get(rival, _NONE)) for rival in names),
         *run_cells(p["runs"][DOMOE], ["tokens/s", "hit"]),
         number(min(p["runs"][DOMOE]["compute_bound"], p["runs"][DOMOE]["link_bound"] or np.inf))]
        for p in data["points"]
    ]  # fmt: skip
    columns = ["model", "cache", *(f"over {rival}" for rival in names), "tokens/s", "hit", "bound, tokens/s"]
    title = f"Simulated: DoMoE's throughput over that of others by cache size, {data['points'][0]['workload']}"
    return [Sheet(title, columns, rows, notes("cache-size"))]


def draw(data: Data, figure: Figure) -> None:
    """Ratios over cache size, a panel a model; the published average over FMoE dashed."""
    models = distinct(data["points"], "model")
    axes = panels(figure, models, 3.4, 4, "cache, % of all experts", ["DoMoE's tokens/s over another's"], sharey=True)
    (claim,) = domoe().claims("Table 2", "throughput", ALL, over="fmoe")
    for (ax,), model in zip(axes, models, strict=True):
        mine = having(data["points"], model=model)
        cache = [float(p["cache"].rstrip("%")) for p in mine]
        for index, rival in enumerate(name for name in _named(data) if name != "clairvoyant"):
            over = [p["over"].get(rival, _NONE) for p in mine]
            value, low, high = (np.array([ratio[k] for ratio in over], float) for k in ("value", "low", "high"))
            ax.plot(cache, value, f"C{index}o-", ms=3, label=f"over {rival}")
            ax.fill_between(cache, low, high, color=f"C{index}", alpha=0.2)
        ax.axhline(1, color="k", lw=0.8)
        if claim.low is not None:
            ax.axhline(claim.low, color="k", ls="--", lw=0.8, label=f"published, over FMoE: {claim.text}")


TITLE = "Where DoMoE gains: over cache size"
EXPERIMENT = Experiment(20, "domoe-cache-size", TITLE, __doc__, measure, sheets, draw)
