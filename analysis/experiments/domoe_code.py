"""What becomes of DoMoE's lead when its rivals run as MoE-Infinity's published code does?

DoMoE and its FMoE were built on MoE-Infinity's code. The conditions that this code brings are added one after another.
*Equal terms*: every policy as its paper says, and a copy ahead gives way to a needed one. *Demand-first*: a copy that
has begun is never stopped. *Code*: MoE-Infinity evicts and orders its queue as its code does. *Slow*: look-ups are as
slow as DoMoE's Figure 5 implies. *Search first*: each layer is predicted before its experts are asked for. What was
added stays.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from analysis.altered import Altered, replayed_altered
from analysis.bootstrap import Ratio, mean_ratio
from analysis.contest import contest, verdict
from analysis.contestants import DOMOE, ENTRIES
from analysis.entries import distinct, having
from analysis.experiment import HALF, Data, Experiment, Part
from analysis.options import IMPLIED, ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number
from analysis.published import ALL, domoe
from analysis.workloads import ModelTraces
from sim.plan import Discipline


@dataclass(frozen=True)
class Condition:
    """What the code brings: an order of the link's queue, parameters of all and of MoE-Infinity, cost of look-ups."""

    discipline: Discipline = "preemptive"
    software: str = "fast"
    each: dict[str, Any] = field(default_factory=dict)
    moe_infinity: dict[str, Any] = field(default_factory=dict)


CODE = {"code": True, "search": "after"}
CONDITIONS = {
    "equal terms": Condition(),
    "demand-first": Condition("demand-first"),
    "code": Condition("demand-first", moe_infinity=CODE),
    "slow": Condition("demand-first", IMPLIED, moe_infinity=CODE),
    "search first": Condition("demand-first", IMPLIED, {"search": "before"}, {"code": True}),
}
RIVALS = {"fmoe, N": "fmoe", "fmoe, domains x N": "fmoe", "moe-infinity": "moe-infinity"}
"""What DoMoE is held against, and the policy that each is."""


def contestants(model: ModelTraces, name: str) -> list[Altered]:
    """DoMoE and its rivals under one condition; FMoE with a table as large as one of DoMoE's, or as all."""
    condition = CONDITIONS[name]
    values = {
        DOMOE: {},
        "fmoe, N": {"entries": ENTRIES},
        "fmoe, domains x N": {"entries": ENTRIES * len(model.domains)},
        "moe-infinity": condition.moe_infinity,
    }
    return [
        Altered(label, RIVALS.get(label, label), condition.each | own, discipline=condition.discipline)
        for label, own in values.items()
    ]


def measure(options: ExperimentOptions) -> Data:
    """Every condition on every workload, and DoMoE's throughput over that of its rivals, with intervals."""
    cells = [(m, name, condition) for m in options.models for name in m.workloads for condition in CONDITIONS]
    places = [options.place(m, m.workloads[name], CONDITIONS[condition].software) for m, name, condition in cells]
    run = [contestants(model, condition) for model, _, condition in cells]
    measured: list[Data] = []
    drawn: dict[tuple[str, str, str], list[Ratio]] = {}
    for (model, name, condition), match in zip(
        cells, contest(places, run, options, "code conditions", replayed_altered), strict=True
    ):
        ratios = {over: match.ratio("throughput", DOMOE, over) for over in RIVALS}
        for over, ratio in ratios.items():
            drawn.setdefault((model.name, condition, over), []).append(ratio)
        measured.append(
            {"model": model.name, "workload": name, "condition": condition, "runs": match.runs()}
            | {"ratios": {over: ratio.to_json() for over, ratio in ratios.items()}}
        )
    means: list[Data] = []
    for condition, over in product(CONDITIONS, RIVALS):
        of_model = {model: ratios for (model, *pair), ratios in drawn.items() if pair == [condition, over]}
        everything = {ALL: [ratio for ratios in of_model.values() for ratio in ratios]}
        means += [
            {"model": model, "condition": condition, "over": over, **mean_ratio(ratios).to_json()}
            for model, ratios in (of_model | everything).items()
        ]
    return {"cells": measured, "means": means, "made": options.made()}


def sheets(data: Data) -> list[Sheet]:
    """Published ratios beside the means of every condition; the ratios of each workload; tokens/s."""
    return [_claims(data), _by_workload(data), _speeds(data)]


def _claims(data: Data) -> Sheet:
    rows = []
    for model, (over, rival) in product(dict.fromkeys([ALL, *distinct(data["means"], "model")]), RIVALS.items()):
        mean = {one["condition"]: one for one in having(data["means"], model=model, over=over)}
        claims = domoe().claims("Table 2", "throughput", model, over=rival)
        published = claims[0].text if claims else NOTHING
        said = (verdict(claims[0], mean[name]) if claims else NOTHING for name in ("equal terms", "search first"))
        rows.append([model, over, published, *(interval(mean[name]) for name in CONDITIONS), " / ".join(said)])
    columns = ["model", "over", "published", *CONDITIONS, "so"]
    return Sheet("DoMoE's throughput over its rivals', published and simulated", columns, rows, notes("conditions"))


def _by_workload(data: Data) -> Sheet:
    rows = [
        [model, workload, over, *(interval(cells[name]["ratios"][over]) for name in CONDITIONS)]
        for model, workload, cells in _grouped(data)
        for over in RIVALS
    ]
    columns = ["model", "workload", "over", *CONDITIONS]
    return Sheet("The same by workload", columns, rows, long=True)


def _speeds(data: Data) -> Sheet:
    rows = [
        [model, workload, one, *(number(cells[name]["runs"][one]["tokens_per_s"], 3) for name in CONDITIONS)]
        for model, workload, cells in _grouped(data)
        for one in (DOMOE, *RIVALS)
    ]
    return Sheet("Tokens/s", ["model", "workload", "policy", *CONDITIONS], rows, long=True)


def _grouped(data: Data) -> list[tuple[str, str, dict[str, Data]]]:
    """Model, workload and what was measured there, by condition."""
    places = dict.fromkeys((cell["model"], cell["workload"]) for cell in data["cells"])
    return [
        (model, workload, {cell["condition"]: cell for cell in having(data["cells"], model=model, workload=workload)})
        for model, workload in places
    ]


TITLE = "DoMoE over rivals as coded"
EXPERIMENT = Experiment(17, "domoe-code", TITLE, __doc__, measure, sheets, parts=[Part(), HALF])
