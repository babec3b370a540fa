"""Table 2: DoMoE over FMoE and over MoE-Infinity, throughput and hit ratio, for every model and workload.

FMoE has one table of all domains. "Under the same table size" may mean a table as large as one of DoMoE's (N entries),
as large as the two that DoMoE searches (2 N), or as large as all that it stores (domains x N): all three are run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from analysis import bootstrap
from analysis.bootstrap import Ratio, Shares, caught_ratio, hit_ratio, mean_ratio, throughput_ratio
from analysis.experiment import Data, Experiment, Setup
from analysis.pages.sheets import NOTHING, Sheet, interval, number, percent
from analysis.published import ALL, Claim, Metric, domoe
from analysis.runs import Design, Outcome, run
from analysis.workloads import Suite

ENTRIES = 2000
"""N: what the paper finds best, a domain."""
METRICS: dict[str, Callable[[Shares, Shares, int], Ratio]] = {
    "throughput": throughput_ratio,
    "hit ratio": hit_ratio,
    "hit or late": caught_ratio,
}


@dataclass(frozen=True)
class Contestant:
    """A policy as it is compared."""

    name: str
    policy: str
    values: dict[str, Any]


DOMOE = "domoe"
RIVALS = {"fmoe": ("fmoe, N", "fmoe, 2 N", "fmoe, domains x N"), "moe-infinity": ("moe-infinity",)}
"""Whom the paper compares with, and the contestants that may be meant by it."""
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    DOMOE: ({"eviction": "score"}, {"eviction": "score"}),
    "domoe, one key an entry": ({"eviction": "score", "keys": "entry"}, {"eviction": "score"}),
    "domoe, lru": ({"eviction": "lru"}, {"eviction": "lru"}),
}
"""What the paper leaves open, ours and what FMoE is set to beside it: eviction is the same for both.

The first is what the claims are held against: both evict what the entries of their tables take least.
"""


def contestants(suite: Suite, choices: Iterable[str] = CHOICES) -> list[Contestant]:
    """DoMoE and FMoE by these ``choices``, MoE-Infinity, then policies that need no table."""
    entries = dict(zip(RIVALS["fmoe"], (ENTRIES, 2 * ENTRIES, len(suite.domains) * ENTRIES), strict=True))
    evictions = dict.fromkeys(CHOICES[name][1]["eviction"] for name in choices)
    return [
        *(Contestant(name, "domoe", CHOICES[name][0]) for name in choices),
        *(
            Contestant(_evicting(name, eviction), "fmoe", {"entries": n, "eviction": eviction})
            for eviction in evictions
            for name, n in entries.items()
        ),
        Contestant("moe-infinity", "moe-infinity", {}),
        Contestant("previous-token", "previous-token", {}),
        Contestant("lru, a layer", "lru", {"scope": "layer"}),
        Contestant("popularity, domain", "popularity", {"by": "domain"}),
        Contestant("clairvoyant", "clairvoyant", {}),
    ]


OPEN = "fast"
"""The software profile under which what the paper leaves open is tried."""


def _evicting(name: str, eviction: str) -> str:
    return name if eviction == "score" else f"{name}, {eviction}"


def _beside(ours: str, over: str) -> str:
    """The contestant that ``over`` is where DoMoE is ``ours``."""
    return _evicting(over, CHOICES[ours][1]["eviction"]) if over in RIVALS["fmoe"] else over


def measure(setup: Setup) -> Data:
    """Contestants on every workload with every software profile, and DoMoE's ratios with their intervals.

    What the paper leaves open is tried under one software profile, the first way under all.
    """
    bootstrap.check()
    cells = [
        (suite, name, software) for suite, software in product(setup.suites, setup.software) for name in suite.workloads
    ]
    everything = OPEN if OPEN in setup.software else setup.software[0]
    choices = {software: [*CHOICES] if software == everything else [DOMOE] for software in setup.software}
    designs = [
        Design(setup.place(suite, suite.workloads[name], software), one.policy, one.values)
        for suite, name, software in cells
        for one in contestants(suite, choices[software])
    ]
    outcomes = iter(run(designs, setup.workers, "table 2"))
    measured: list[Data] = []
    drawn: dict[tuple[str, str, str, str], list[tuple[str, Ratio, float | None]]] = {}
    for index, (suite, name, software) in enumerate(cells):
        ran = {one.name: next(outcomes) for one in contestants(suite, choices[software])}
        cell: Data = {
            "model": suite.model,
            "workload": name,
            "software": Path(software).stem,
            "sequences": len(ran[DOMOE].shares.tokens),
            "runs": {who: outcome.to_json() for who, outcome in ran.items()},
            "ratios": [],
        }
        for ours, over, metric in product(choices[software], [one for who in RIVALS.values() for one in who], METRICS):
            theirs = ran[_beside(ours, over)]
            ratio = METRICS[metric](ran[ours].shares, theirs.shares, setup.seed + index)
            most = _most(metric, theirs)
            drawn.setdefault((cell["software"], ours, over, metric), []).append((suite.model, ratio, most))
            cell["ratios"].append({"ours": ours, "over": over, "metric": metric, **ratio.to_json(), "most": most})
        measured.append(cell)
    return {
        "entries": ENTRIES,
        "cells": measured,
        "means": _means(drawn),
        "made": setup.made([source for suite in setup.suites for source in suite.sources]),
    }


def _most(metric: str, rival: Outcome) -> float | None:
    """The largest ratio over ``rival`` that any policy could reach there: by both bounds, or with hits alone."""
    if metric != "throughput":
        d = rival.report.decode
        caught = d.hits + (d.late if metric == "hit or late" else 0)
        return round(d.lookups / caught, 4) if caught else None
    bounds = [b for b in rival.report.bounds.values() if b is not None]
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
    softwares = list(dict.fromkeys(cell["software"] for cell in data["cells"]))
    return [
        _claims(data),
        *(_ratios(data, metric) for metric in ("throughput", "hit ratio")),
        _choices(data),
        *(_runs(data, software) for software in softwares),
    ]


def _claims(data: Data) -> Sheet:
    """Each claim of the paper beside the simulated mean of the same, for every software and reading of it."""
    shown: tuple[Metric, ...] = ("throughput", "hit ratio")
    softwares = list(dict.fromkeys(m["software"] for m in data["means"]))
    rows = []
    models = dict.fromkeys([ALL, *(m["model"] for m in data["means"])])
    for model, (rival, names), metric in product(models, RIVALS.items(), shown):
        for claim, over in product(domoe().claims("Table 2", metric, model, over=rival), names):
            means = {
                m["software"]: m
                for m in data["means"]
                if (m["model"], m["metric"], m["ours"], m["over"]) == (model, metric, DOMOE, over)
            }
            found = [means[software] for software in softwares]
            said = dict.fromkeys(verdict(claim, mean) for mean in found)
            rows.append(
                [model, metric, over, claim.text, *map(interval, found), number(found[0]["most"]),
                 " / ".join(said if len(said) == 1 else [verdict(claim, mean) for mean in found])]
            )  # fmt: skip
    notes = (
        "Published: DoMoE's ratio over the rival, as the paper's text gives it. Simulated: mean over workloads (and "
        "models) of the same ratio, with a 95 % bootstrap interval over sequences, drawn with replacement and paired "
        "between both policies. It covers which sequences were drawn, not another training, text, order or machine.",
        "Most: the largest ratio over that rival that any policy could have, by the bounds on compute and link, or "
        "with hits alone (under the first software). So: the published number lies inside the simulated interval, is "
        "higher or lower, or is impossible at batch 1 on this hardware and cache.",
        f"N is {data['entries']:,} entries a domain, or what the traces hold. Eviction is not in the paper; DoMoE and "
        f"FMoE both evict what their tables' entries take least. Models in the simulation are small trained ones of "
        f"the named topology; costs are those of the released model.",
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
    over = [one for who in RIVALS.values() for one in who]
    for model, software in dict.fromkeys((m["model"], m["software"]) for m in data["means"]):
        kinds = [
            (cell["workload"], cell["ratios"])
            for cell in data["cells"]
            if (cell["model"], cell["software"]) == (model, software)
        ]
        mean = [m for m in data["means"] if (m["model"], m["software"]) == (model, software)]
        for workload, ratios in [*kinds, ("mean", mean)]:
            found = {r["over"]: r for r in ratios if (r["ours"], r["metric"]) == (DOMOE, metric)}
            rows.append([model, software, workload, *(interval(found[one]) for one in over)])
    columns = ["model", "software", "workload", *(f"over {one}" for one in over)]
    return Sheet(f"Simulated: DoMoE's {metric} over that of its rivals", columns, rows)


def _choices(data: Data) -> Sheet:
    """The means over everything, for what the paper leaves open."""
    over = [one for who in RIVALS.values() for one in who]
    means = [m for m in data["means"] if m["model"] == ALL]
    tried = [m["software"] for m in means if m["ours"] != DOMOE]
    software = tried[0] if tried else means[0]["software"]
    rows = []
    for ours, metric in product(dict.fromkeys(m["ours"] for m in means), METRICS):
        found = {m["over"]: m for m in means if (m["software"], m["ours"], m["metric"]) == (software, ours, metric)}
        rows.append([ours, metric, *(interval(found[one]) for one in over)])
    notes = (
        "Means over all models and workloads. One key an entry: tables hold one embedding an entry, not one a layer. "
        "lru: both evict the least recently used. Hit or late: the expert was resident, or its prefetch was queued or "
        "under way: what a hit is if prefetches count that have not arrived.",
    )
    columns = ["ours", "ratio of", *(f"over {one}" for one in over)]
    return Sheet(f"Simulated: what the paper leaves open, software {software}", columns, rows, notes)


def _runs(data: Data, software: str) -> Sheet:
    rows = [
        [cell["model"], cell["workload"], name, number(r["tokens_per_s"]), percent(r["hit_ratio"]),
         percent(r["late_ratio"]), percent(r["miss_ratio"]), number(r["gib_per_token"]), percent(r["wasted"]),
         number(r["predict_ms_per_token"]), number(r["tables_mib"], 0), number(r["ttft_ms"], 0),
         percent(r["efficiency"])]
        for cell in data["cells"]
        if cell["software"] == software
        for name, r in cell["runs"].items()
    ]  # fmt: skip
    columns = ["model", "workload", "policy", "tokens/s", "hit", "late", "miss", "GiB/token", "wasted",
               "predict ms/token", "tables MiB", "TTFT ms", "efficiency"]  # fmt: skip
    return Sheet(f"Simulated: every run, software {software}", columns, rows, detail=True)


EXPERIMENT = Experiment(
    name="domoe-overall",
    title="Table 2: DoMoE over FMoE and MoE-Infinity",
    measure=measure,
    sheets=sheets,
)
