"""DoMoE's throughput and hits over those of FMoE and MoE-Infinity, held against the paper's Table 2.

FMoE has one table for all domains. The paper says "under the same table size", which may mean three things, and all
three are run: a table as large as one of DoMoE's (N entries), as the two that DoMoE looks up in (2 N), or as all that
DoMoE stores (domains x N).
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from analysis.bootstrap import METRICS, Ratio, mean_ratio
from analysis.contest import contest, verdict
from analysis.contestants import CHOICES, DOMOE, ENTRIES, MOE_INFINITY, TABLELESS
from analysis.entries import distinct, having
from analysis.experiment import HALF, Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number, run_cells
from analysis.published import ALL, COMPARED, domoe
from analysis.runs import Replayed
from analysis.workloads import ModelTraces
from sim.policies.named import NamedPolicy

RIVALS = {"fmoe": ("fmoe, N", "fmoe, 2 N", "fmoe, domains x N"), "moe-infinity": ("moe-infinity",)}
"""The paper's rivals, and the contestants that may be meant by each."""
MEANT = [name for names in RIVALS.values() for name in names]
OPEN = "fast"
"""The software profile under which what the paper leaves open is tried; the first one, where it is not run."""


def contestants(model: ModelTraces, choices: Iterable[str] = CHOICES) -> list[NamedPolicy]:
    """DoMoE and FMoE by these ``choices``, MoE-Infinity, then policies that need no table."""
    found = [NamedPolicy(name, "domoe", CHOICES[name]) for name in choices]
    sizes = zip(RIVALS["fmoe"], (ENTRIES, 2 * ENTRIES, len(model.domains) * ENTRIES), strict=True)
    for eviction, (name, n) in product(dict.fromkeys(CHOICES[name]["eviction"] for name in choices), sizes):
        found.append(NamedPolicy(_evicting(name, eviction), "fmoe", {"entries": n, "eviction": eviction}))
    return [*found, MOE_INFINITY, NamedPolicy("previous-token", "previous-token"), *TABLELESS]


def _evicting(name: str, eviction: str) -> str:
    return name if eviction == "score" else f"{name}, {eviction}"


def _beside(ours: str, over: str) -> str:
    """The name of the rival ``over`` that evicts by the same rule as ``ours``."""
    return _evicting(over, CHOICES[ours]["eviction"]) if over in RIVALS["fmoe"] else over


def measure(options: ExperimentOptions) -> Data:
    """Contestants on every workload with every software profile, and DoMoE's ratios with their intervals.

    What the paper leaves open is tried under one software profile, the first way under all.
    """
    everything = OPEN if OPEN in options.software else options.software[0]
    choices = {software: [*CHOICES] if software == everything else [DOMOE] for software in options.software}
    cells = [(m, name, software) for m, software in product(options.models, options.software) for name in m.workloads]
    places = [options.place(model, model.workloads[name], software) for model, name, software in cells]
    run = [contestants(model, choices[software]) for model, _, software in cells]
    measured: list[Data] = []
    drawn: Drawn = {}
    for (model, name, software), match in zip(cells, contest(places, run, options, "table 2"), strict=True):
        cell: Data = {
            "model": model.name,
            "workload": name,
            "software": Path(software).stem,
            "sequences": len(match.ran[DOMOE].shares.tokens),
            "runs": match.runs(),
            "ratios": [],
        }
        for ours, over, metric in product(choices[software], MEANT, METRICS):
            rival = _beside(ours, over)
            ratio, most = match.ratio(metric, ours, rival), _most(metric, match.ran[rival])
            drawn.setdefault((cell["software"], ours, over, metric), []).append((model.name, ratio, most))
            cell["ratios"].append({"ours": ours, "over": over, "metric": metric, **ratio.to_json(), "most": most})
        measured.append(cell)
    return {"entries": ENTRIES, "cells": measured, "means": _means(drawn), "made": options.made()}


def _most(metric: str, rival: Replayed) -> float | None:
    """The largest ratio over ``rival`` that any policy could reach there: by both bounds, or with hits alone."""
    if metric != "throughput":
        d = rival.report.decode
        caught = d.hits + (d.late if metric == "hit or late" else 0)
        return round(d.lookups / caught, 4) if caught else None
    both = (rival.report.bounds[name] for name in ("compute_tokens_per_s", "link_tokens_per_s"))
    bounds = [bound for bound in both if bound is not None]
    return round(min(bounds) / rival.tokens_per_s, 4) if bounds and rival.tokens_per_s else None


Drawn = dict[tuple[str, str, str, str], list[tuple[str, Ratio, float | None]]]
"""By software, ours, over and metric: the model, the ratio and the largest possible one of each workload."""


def _means(drawn: Drawn) -> list[Data]:
    """Means over the workloads of each model, and over everything."""
    means: list[Data] = []
    for (software, ours, over, metric), found in drawn.items():
        for model in [*dict.fromkeys(model for model, _, _ in found), ALL]:
            mine = [(ratio, most) for whose, ratio, most in found if model in (whose, ALL)]
            possible = [most for _, most in mine if most is not None]
            what = {"model": model, "software": software, "ours": ours, "over": over, "metric": metric}
            most = {"most": round(sum(possible) / len(possible), 4) if possible else None}
            means.append(what | mean_ratio([ratio for ratio, _ in mine]).to_json() | most)
    return means


def sheets(data: Data) -> list[Sheet]:
    """A summary; published claims against simulated means; ratios by workload; what the paper leaves open; runs."""
    return [
        _summary(data),
        _claims(data),
        *(_ratios(data, metric) for metric in COMPARED),
        _choices(data),
        *(_runs(data, software) for software in distinct(data["cells"], "software")),
    ]


def _software_of_choices(data: Data) -> str:
    """The software under which what the paper leaves open was tried."""
    return next((m["software"] for m in data["means"] if m["ours"] != DOMOE), data["means"][0]["software"])


def _summary(data: Data) -> Sheet:
    """Means of each model under one software profile, beside the range of what is published."""
    software = _software_of_choices(data)
    models = sorted(distinct(data["means"], "model"), key=lambda model: model == ALL)
    models = models[:1] if len(models) == 2 else models  # the mean over one model is that model's
    rows = []
    for metric, (rival, names) in product(COMPARED, RIVALS.items()):
        said = [claim for claim in domoe().claim if (claim.metric, claim.over) == (metric, rival)]
        published = f"{min(claim.least for claim in said)}–{max(claim.most for claim in said)}"
        for over in names:
            means = having(data["means"], software=software, ours=DOMOE, over=over, metric=metric)
            found = {mean["model"]: number(mean["value"]) for mean in means}
            rows.append([metric, over, published, *(found[model] for model in models)])
    columns = ["ratio of", "over", "published", *models]
    return Sheet("Table 2 in short: DoMoE over its rivals", columns, rows, notes("summary", software=software))


def _claims(data: Data) -> Sheet:
    """Each claim of the paper beside the simulated mean of the same, for every software and reading of it."""
    rows = []
    models = dict.fromkeys([ALL, *distinct(data["means"], "model")])
    for model, (rival, names), metric in product(models, RIVALS.items(), COMPARED):
        for claim, over in product(domoe().claims("Table 2", metric, model, over=rival), names):
            found = having(data["means"], model=model, metric=metric, ours=DOMOE, over=over)  # one a software
            said = [verdict(claim, mean) for mean in found]
            rows.append(
                [model, metric, over, claim.text, *map(interval, found), number(found[0]["most"]),
                 said[0] if len({*said}) == 1 else " / ".join(said)]
            )  # fmt: skip
    simulated = [f"simulated, {software}" for software in distinct(data["means"], "software")]
    columns = ["model", "ratio of", "over", "published", *simulated, "most", "so"]
    below = notes("claims", entries=data["entries"])
    return Sheet("Table 2: published claims and simulated means", columns, rows, below, long=True)


def _ratios(data: Data, metric: str) -> Sheet:
    """Ratios of one metric, a row a model, workload and software, each followed by the means."""
    rows = []
    for model, software in dict.fromkeys((m["model"], m["software"]) for m in data["means"]):
        cells = having(data["cells"], model=model, software=software)
        mean = {"workload": "mean", "ratios": having(data["means"], model=model, software=software)}
        for cell in [*cells, mean]:
            rows.append([model, software, cell["workload"], *_over(cell["ratios"], DOMOE, metric)])
    columns = ["model", "software", "workload", *(f"over {one}" for one in MEANT)]
    return Sheet(f"Simulated: DoMoE's {metric} over that of its rivals", columns, rows, long=True)


def _over(ratios: list[Data], ours: str, metric: str) -> list[str]:
    """The ratios of one metric over each rival, as shown."""
    found = {ratio["over"]: ratio for ratio in having(ratios, ours=ours, metric=metric)}
    return [interval(found[one]) for one in MEANT]


def _choices(data: Data) -> Sheet:
    """The means over everything, for what the paper leaves open."""
    software = _software_of_choices(data)
    means = having(data["means"], model=ALL, software=software)
    rows = [[ours, metric, *_over(means, ours, metric)] for ours, metric in product(distinct(means, "ours"), METRICS)]
    columns = ["ours", "ratio of", *(f"over {one}" for one in MEANT)]
    title = f"Simulated: what the paper leaves open, software {software}"
    return Sheet(title, columns, rows, notes("choices"), long=True)


def _runs(data: Data, software: str) -> Sheet:
    shown = ["tokens/s", "hit", "late", "miss", "GiB/token", "wasted", "predict ms/token", "tables MiB", "TTFT ms",
             "efficiency"]  # fmt: skip
    rows = [
        [cell["model"], cell["workload"], name, *run_cells(run, shown)]
        for cell in having(data["cells"], software=software)
        for name, run in cell["runs"].items()
    ]
    columns = ["model", "workload", "policy", *shown]
    return Sheet(f"Simulated: every run, software {software}", columns, rows, detail=True)


OTHER_SEED = Part(
    "-other-seed",
    heading="A second training",
    traces="other_seed",
    about="A model trained anew from the same base and data with another seed, which draws anew which expert serves "
    "what. Intervals do not cover how much a training changes the ratios.",
)
TITLE = "Table 2: DoMoE over FMoE and MoE-Infinity"
EXPERIMENT = Experiment(10, "domoe-overall", TITLE, __doc__, measure, sheets, parts=[Part(), HALF, OTHER_SEED])
