"""Table 2: DoMoE over FMoE and over MoE-Infinity, throughput and hit ratio, for every model and workload.

FMoE has one table of all domains. "Under the same table size" may mean a table as large as one of DoMoE's (N entries),
as large as the two that DoMoE searches (2 N), or as large as all that it stores (domains x N): all three are run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from analysis.bootstrap import Ratio, Shares, caught_ratio, hit_ratio, mean_ratio, throughput_ratio
from analysis.experiment import Data, Experiment, Setup
from analysis.published import ALL, Claim, Metric, domoe
from analysis.runs import Design, Outcome, run
from analysis.sheets import NOTHING, Sheet, interval, number, percent
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
    """A policy as it is compared: ``rival`` names whom the paper's claims mean by it, None for a reference."""

    name: str
    policy: str
    values: dict[str, Any]
    rival: str | None = None


def contestants(suite: Suite) -> list[Contestant]:
    """DoMoE first, then its rivals, then policies that need no embeddings and no table."""
    entries = {"N": ENTRIES, "2 N": 2 * ENTRIES, "domains x N": len(suite.domains) * ENTRIES}
    return [
        Contestant("domoe", "domoe", {}),
        Contestant("domoe, one key an entry", "domoe", {"keys": "entry"}),
        Contestant("domoe, evicting by score", "domoe", {"eviction": "score"}),
        *(Contestant(f"fmoe, {name}", "fmoe", {"entries": n}, "fmoe") for name, n in entries.items()),
        Contestant("moe-infinity", "moe-infinity", {}, "moe-infinity"),
        Contestant("previous-token", "previous-token", {}),
        Contestant("lru (a layer)", "lru", {"scope": "layer"}),
        Contestant("popularity (domain)", "popularity", {"by": "domain"}),
        Contestant("clairvoyant", "clairvoyant", {}),
    ]


OURS = ("domoe", "domoe, one key an entry", "domoe, evicting by score")
"""Contestants whose ratios over the others are shown."""
_RIVALS = ("fmoe", "moe-infinity")


def measure(setup: Setup) -> Data:
    """Every contestant on every workload with every software profile, and DoMoE's ratios with their intervals."""
    cells = [
        (suite, name, software) for suite, software in product(setup.suites, setup.software) for name in suite.workloads
    ]
    designs = [
        Design(setup.place(suite, suite.workloads[name], software), one.policy, one.values)
        for suite, name, software in cells
        for one in contestants(suite)
    ]
    outcomes = iter(run(designs, setup.workers, "table 2"))
    measured: list[Data] = []
    drawn: dict[tuple[str, str, str, str], list[tuple[str, Ratio]]] = {}
    for index, (suite, name, software) in enumerate(cells):
        ran = {one.name: (one, next(outcomes)) for one in contestants(suite)}
        software = Path(software).stem
        measured.append(
            {
                "model": suite.model,
                "workload": name,
                "software": software,
                "sequences": len(ran["domoe"][1].shares.tokens),
                "runs": {who: outcome.to_json() for who, (_, outcome) in ran.items()},
                "ratios": [],
            }
        )
        for ours, other, metric in product(OURS, ran, METRICS):
            if other in OURS:
                continue
            mine, theirs = ran[ours][1], ran[other][1]
            ratio = METRICS[metric](mine.shares, theirs.shares, setup.seed + index)
            drawn.setdefault((software, ours, other, metric), []).append((suite.model, ratio))
            measured[-1]["ratios"].append(
                {"ours": ours, "over": other, "metric": metric, **ratio.to_json(), "most": _most(metric, theirs)}
            )
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


def _means(drawn: dict[tuple[str, str, str, str], list[tuple[str, Ratio]]]) -> list[Data]:
    """Means over the workloads of each model, and over everything."""
    means: list[Data] = []
    for (software, ours, over, metric), ratios in drawn.items():
        for model in [*dict.fromkeys(model for model, _ in ratios), ALL]:
            mean = mean_ratio([ratio for whose, ratio in ratios if model in (whose, ALL)])
            means.append(
                {"model": model, "software": software, "ours": ours, "over": over, "metric": metric, **mean.to_json()}
            )
    return means


def sheets(data: Data) -> list[Sheet]:
    """Published claims against simulated means; every ratio; every run."""
    softwares = list(dict.fromkeys(cell["software"] for cell in data["cells"]))
    return [
        _claims(data, softwares),
        *(_ratios(data, software, metric) for software in softwares for metric in ("throughput", "hit ratio")),
        *(_runs(data, software) for software in softwares),
    ]


def _claims(data: Data, softwares: Sequence[str]) -> Sheet:
    """Each claim of the paper beside the simulated mean of the same, for every software and reading of it."""
    models = list(dict.fromkeys(cell["model"] for cell in data["cells"]))
    rows = []
    shown: tuple[Metric, ...] = ("throughput", "hit ratio")
    for model, rival, metric in product([ALL, *models], _RIVALS, shown):
        means = [
            m
            for m in data["means"]
            if (m["model"], m["metric"], m["ours"]) == (model, metric, OURS[0]) and _rival(m["over"]) == rival
        ]
        for claim in domoe().claims("Table 2", metric, model, over=rival):
            for mean in means:
                rows.append(
                    [model, metric, mean["over"], mean["software"], claim.text, interval(mean), verdict(claim, mean)]
                )
    notes = (
        "Published: DoMoE's ratio over the rival, as the paper's text gives it. Simulated: mean over workloads (and "
        "models) of the same ratio, 95 % bootstrap interval over sequences, drawn with replacement and paired between "
        "both policies; it covers which sequences were drawn, not another training, text, order or machine.",
        f"N is {data['entries']:,} entries a domain, or what the trace holds. Models in the simulation are small "
        f"trained ones of the named topology, costs those of the released model.",
        f"Software: {', '.join(softwares)}.",
    )
    columns = ["model", "ratio of", "over", "software", "published", "simulated", "so"]
    return Sheet("Table 2: published claims and simulated means", columns, rows, notes)


def _rival(name: str) -> str:
    return name.partition(",")[0]


def verdict(claim: Claim, ratio: Data) -> str:
    """Whether the claim lies inside the simulated interval, and if not on which side."""
    if ratio["low"] is None:
        return NOTHING
    if claim.meets(ratio["low"], ratio["high"]):
        return "inside"
    lower = claim.high is not None and claim.high < ratio["low"]
    return "published is lower" if lower else "published is higher"


def _ratios(data: Data, software: str, metric: str) -> Sheet:
    """Ratios of one metric under one software, a row a model and workload, and the means."""
    cells = [cell for cell in data["cells"] if cell["software"] == software]
    rivals = [r["over"] for r in cells[0]["ratios"] if (r["ours"], r["metric"]) == (OURS[0], metric)]
    rows = []
    for cell in cells:
        found = {(r["ours"], r["over"]): r for r in cell["ratios"] if r["metric"] == metric}
        most = " / ".join(number(found[OURS[0], rival]["most"]) for rival in rivals if _rival(rival) in _RIVALS)
        ours = [interval(found[OURS[0], rival]) for rival in rivals]
        rows.append([cell["model"], cell["workload"], *ours, most])
    for model in dict.fromkeys(m["model"] for m in data["means"]):
        found = {
            m["over"]: m
            for m in data["means"]
            if (m["model"], m["software"], m["metric"], m["ours"]) == (model, software, metric, OURS[0])
        }
        rows.append([model, "mean", *(interval(found[rival]) for rival in rivals), ""])
    columns = ["model", "workload", *(f"over {rival}" for rival in rivals), "most possible (rivals in order)"]
    title = f"Simulated: DoMoE's {metric} over that of others, software {software}"
    return Sheet(title, columns, rows)


def _runs(data: Data, software: str) -> Sheet:
    rows = []
    for cell in data["cells"]:
        if cell["software"] != software:
            continue
        for name, r in cell["runs"].items():
            rows.append(
                [cell["model"], cell["workload"], name, number(r["tokens_per_s"]), percent(r["hit_ratio"]),
                 percent(r["late_ratio"]), percent(r["miss_ratio"]), number(r["gib_per_token"]), percent(r["wasted"]),
                 number(r["predict_ms_per_token"]), number(r["tables_mib"], 0), number(r["ttft_ms"], 0),
                 percent(r["efficiency"])]
            )  # fmt: skip
    columns = ["model", "workload", "policy", "tokens/s", "hit", "late", "miss", "GiB/token", "wasted",
               "predict ms/token", "tables MiB", "TTFT ms", "efficiency"]  # fmt: skip
    return Sheet(f"Simulated: every run, software {software}", columns, rows)


EXPERIMENT = Experiment(
    name="domoe-overall",
    title="Table 2: DoMoE over FMoE and MoE-Infinity",
    measure=measure,
    sheets=sheets,
)
