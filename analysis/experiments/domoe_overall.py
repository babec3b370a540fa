"""DoMoE's throughput and hits over those of FMoE and MoE-Infinity, held against the paper's Table 2.

FMoE has one table for all domains. The paper says "under the same table size", which may mean three things, and all
three are run: a table as large as one of DoMoE's (N entries), as the two that DoMoE looks up in (2 N), or as all that
DoMoE stores (domains x N).
"""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from analysis.bootstrap import Ratio, Shares, caught_ratio, hit_ratio, mean_ratio, throughput_ratio
from analysis.contest import Contestants, contest
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, number, run_cells
from analysis.published import ALL, Claim, Metric, domoe
from analysis.runs import Outcome
from analysis.workloads import ModelTraces

ENTRIES = 2000
"""N: the entries of a domain's table; the paper finds 2,000 best."""
METRICS: dict[str, Callable[[Shares, Shares, int], Ratio]] = {
    "throughput": throughput_ratio,
    "hit ratio": hit_ratio,
    "hit or late": caught_ratio,
}


DOMOE = "domoe"
RIVALS = {"fmoe": ("fmoe, N", "fmoe, 2 N", "fmoe, domains x N"), "moe-infinity": ("moe-infinity",)}
"""The paper's rivals, and the contestants that may be meant by each."""
MEANT = [name for names in RIVALS.values() for name in names]
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    DOMOE: ({"eviction": "score"}, {"eviction": "score"}),
    "domoe, one key an entry": ({"eviction": "score", "keys": "entry"}, {"eviction": "score"}),
    "domoe, lru": ({"eviction": "lru"}, {"eviction": "lru"}),
}
"""What the paper leaves open: DoMoE's parameters, and those of FMoE beside it, which evicts by the same rule.

The claims are held against the first: both evict what the entries of their tables take least.
"""


def contestants(model: ModelTraces, choices: Iterable[str] = CHOICES) -> Contestants:
    """DoMoE and FMoE by these ``choices``, MoE-Infinity, then policies that need no table."""
    entries = dict(zip(RIVALS["fmoe"], (ENTRIES, 2 * ENTRIES, len(model.domains) * ENTRIES), strict=True))
    evictions = dict.fromkeys(CHOICES[name][1]["eviction"] for name in choices)
    return {
        **{name: ("domoe", CHOICES[name][0]) for name in choices},
        **{
            _evicting(name, eviction): ("fmoe", {"entries": n, "eviction": eviction})
            for eviction, (name, n) in product(evictions, entries.items())
        },
        "moe-infinity": ("moe-infinity", {}),
        "previous-token": ("previous-token", {}),
        "lru, a layer": ("lru", {"scope": "layer"}),
        "popularity, domain": ("popularity", {"by": "domain"}),
        "clairvoyant": ("clairvoyant", {}),
    }


OPEN = "fast"
"""The software profile under which what the paper leaves open is tried."""


def _evicting(name: str, eviction: str) -> str:
    return name if eviction == "score" else f"{name}, {eviction}"


def _beside(ours: str, over: str) -> str:
    """The name of the rival ``over`` that evicts by the same rule as ``ours``."""
    return _evicting(over, CHOICES[ours][1]["eviction"]) if over in RIVALS["fmoe"] else over


def measure(options: ExperimentOptions) -> Data:
    """Contestants on every workload with every software profile, and DoMoE's ratios with their intervals.

    What the paper leaves open is tried under one software profile, the first way under all.
    """
    everything = OPEN if OPEN in options.software else options.software[0]
    choices = {software: [*CHOICES] if software == everything else [DOMOE] for software in options.software}
    cells = [(m, name, software) for m, software in product(options.models, options.software) for name in m.workloads]
    outcomes = contest(
        [
            (options.place(model, model.workloads[name], software), contestants(model, choices[software]))
            for model, name, software in cells
        ],
        options.processes,
        "table 2",
    )
    measured: list[Data] = []
    drawn: dict[tuple[str, str, str, str], list[tuple[str, Ratio, float | None]]] = {}
    for index, ((model, name, software), ran) in enumerate(zip(cells, outcomes, strict=True)):
        cell: Data = {
            "model": model.name,
            "workload": name,
            "software": Path(software).stem,
            "sequences": len(ran[DOMOE].shares.tokens),
            "runs": {who: outcome.to_json() for who, outcome in ran.items()},
            "ratios": [],
        }
        for ours, over, metric in product(choices[software], MEANT, METRICS):
            theirs = ran[_beside(ours, over)]
            ratio = METRICS[metric](ran[ours].shares, theirs.shares, options.seed + index)
            most = _most(metric, theirs)
            drawn.setdefault((cell["software"], ours, over, metric), []).append((model.name, ratio, most))
            cell["ratios"].append({"ours": ours, "over": over, "metric": metric, **ratio.to_json(), "most": most})
        measured.append(cell)
    return {"entries": ENTRIES, "cells": measured, "means": _means(drawn), "made": options.made()}


def _most(metric: str, rival: Outcome) -> float | None:
    """The largest ratio over ``rival`` that any policy could reach there: by both bounds, or with hits alone."""
    if metric != "throughput":
        d = rival.report.decode
        caught = d.hits + (d.late if metric == "hit or late" else 0)
        return round(d.lookups / caught, 4) if caught else None
    both = (rival.report.bounds[name] for name in ("compute_tokens_per_s", "link_tokens_per_s"))
    bounds = [bound for bound in both if bound is not None]
    return round(min(bounds) / rival.tokens_per_s, 4) if bounds and rival.tokens_per_s else None


def _means(drawn: dict[tuple[str, str, str, str], list[tuple[str, Ratio, float | None]]]) -> list[Data]:
    """Means over the workloads of each model, and over everything."""
    means: list[Data] = []
    for (software, ours, over, metric), found in drawn.items():
        for model in [*dict.fromkeys(model for model, _, _ in found), ALL]:
            mine = [(ratio, most) for whose, ratio, most in found if model in (whose, ALL)]
            possible = [most for _, most in mine if most is not None]
            means.append(
                {
                    "model": model,
                    "software": software,
                    "ours": ours,
                    "over": over,
                    "metric": metric,
                    **mean_ratio([ratio for ratio, _ in mine]).to_json(),
                    "most": round(sum(possible) / len(possible), 4) if possible else None,
                }
            )
    return means


def sheets(data: Data) -> list[Sheet]:
    """Published claims against simulated means; ratios by workload; by what the paper leaves open; every run."""
    return [
        _claims(data),
        *(_ratios(data, metric) for metric in ("throughput", "hit ratio")),
        _choices(data),
        *(_runs(data, software) for software in distinct(data["cells"], "software")),
    ]


def _claims(data: Data) -> Sheet:
    """Each claim of the paper beside the simulated mean of the same, for every software and reading of it."""
    shown: tuple[Metric, ...] = ("throughput", "hit ratio")
    softwares = distinct(data["means"], "software")
    rows = []
    models = dict.fromkeys([ALL, *distinct(data["means"], "model")])
    for model, (rival, names), metric in product(models, RIVALS.items(), shown):
        for claim, over in product(domoe().claims("Table 2", metric, model, over=rival), names):
            found = having(data["means"], model=model, metric=metric, ours=DOMOE, over=over)  # one a software
            said = [verdict(claim, mean) for mean in found]
            rows.append(
                [model, metric, over, claim.text, *map(interval, found), number(found[0]["most"]),
                 said[0] if len({*said}) == 1 else " / ".join(said)]
            )  # fmt: skip
    notes = (
        "Published: DoMoE's ratio over the rival, as the paper's text gives it. Simulated: the mean of the same ratio "
        "over workloads (and models). Intervals are 95 %, from a bootstrap over sequences; both policies' shares of a "
        "drawn sequence go together. They cover which sequences were drawn, not another training, text, order or "
        "machine.",
        "Most: the largest ratio over that rival that any policy could have, by the bounds on compute and link, or "
        "with hits alone (under the first software). So: the published number lies inside the simulated interval, is "
        "higher or lower, or is impossible at batch 1 on this hardware and cache.",
        f"N is {data['entries']:,} entries a domain, or as many as the traces hold. The paper does not say how it "
        f"evicts; here DoMoE and FMoE both evict what their tables' entries take least. The models are small trained "
        f"ones of the named topology; costs are those of the released model.",
    )
    columns = ["model", "ratio of", "over", "published", *(f"simulated, {one}" for one in softwares), "most", "so"]
    return Sheet("Table 2: published claims and simulated means", columns, rows, notes)


def verdict(claim: Claim, ratio: Data) -> str:
    """Whether the claim lies inside the simulated interval, and if not on which side, or beyond what is possible."""
    if ratio["low"] is None:
        return NOTHING
    if ratio.get("most") is not None and claim.least > ratio["most"]:
        return "impossible"
    if claim.meets(ratio["low"], ratio["high"]):
        return "inside"
    return "lower" if claim.most < ratio["low"] else "higher"


def _ratios(data: Data, metric: str) -> Sheet:
    """Ratios of one metric, a row a model, workload and software, each followed by the means."""
    rows = []
    for model, software in dict.fromkeys((m["model"], m["software"]) for m in data["means"]):
        cells = having(data["cells"], model=model, software=software)
        mean = {"workload": "mean", "ratios": having(data["means"], model=model, software=software)}
        for cell in [*cells, mean]:
            rows.append([model, software, cell["workload"], *_over(cell["ratios"], DOMOE, metric)])
    columns = ["model", "software", "workload", *(f"over {one}" for one in MEANT)]
    return Sheet(f"Simulated: DoMoE's {metric} over that of its rivals", columns, rows)


def _over(ratios: list[Data], ours: str, metric: str) -> list[str]:
    """The ratios of one metric over each rival, as shown."""
    found = {ratio["over"]: ratio for ratio in having(ratios, ours=ours, metric=metric)}
    return [interval(found[one]) for one in MEANT]


def _choices(data: Data) -> Sheet:
    """The means over everything, for what the paper leaves open."""
    means = having(data["means"], model=ALL)
    tried = [m["software"] for m in means if m["ours"] != DOMOE]
    software = tried[0] if tried else means[0]["software"]
    mine = having(means, software=software)
    rows = [[ours, metric, *_over(mine, ours, metric)] for ours, metric in product(distinct(means, "ours"), METRICS)]
    notes = (
        "Means over all models and workloads. One key an entry: a table's entry has one embedding, not one a layer. "
        "lru: both evict the least recently used. Hit or late: the expert was there, or its copy was queued or under "
        "way. Such copies may be what the paper counts as hits.",
    )
    columns = ["ours", "ratio of", *(f"over {one}" for one in MEANT)]
    return Sheet(f"Simulated: what the paper leaves open, software {software}", columns, rows, notes)


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


HALF = Part(
    "-half", cache="50%", about="Room for half of all experts, which an L40 has for Mixtral-8x7B and Phi-3.5-MoE."
)
OTHER_SEED = Part(
    "-other-seed",
    heading="A second training",
    traces="other_seed",
    about="A model trained anew from the same base and data with another seed, which draws anew which expert serves "
    "what. Intervals do not cover how much a training changes the ratios.",
)
TITLE = "Table 2: DoMoE over FMoE and MoE-Infinity"
EXPERIMENT = Experiment(10, "domoe-overall", TITLE, __doc__, measure, sheets, parts=[Part(), HALF, OTHER_SEED])
