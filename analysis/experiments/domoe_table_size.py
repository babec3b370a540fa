"""Figure 5: hit ratio and throughput over the number of entries of a domain's table."""

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from analysis.experiment import Data, Experiment, Setup
from analysis.pages.drawing import legend, panels
from analysis.pages.sheets import NOTHING, Sheet, number, percent
from analysis.published import domoe
from analysis.runs import Design, run
from analysis.workloads import Suite, kept
from sim.log import DECODE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENTRIES = (100, 250, 500, 1000, 1500, 2000, 2500, 3000)
WORKLOAD = "law"
"""The paper does not say on which workload; this is the one with the longest profile."""


def measure(setup: Setup) -> Data:
    """DoMoE at every table size that the profile of the workload can fill, on every model that has it."""
    sizes = setup.entries or ENTRIES
    jobs = []
    for suite in setup.suites:
        workload = WORKLOAD if WORKLOAD in suite.workloads else next(iter(suite.workloads))
        held = _held(suite, workload)
        for software, entries in product(setup.software, sizes):
            if entries <= held:
                jobs.append((suite, workload, held, software, entries))
    designs = [
        Design(setup.place(suite, suite.workloads[workload], software), "domoe", {"entries": entries})
        for suite, workload, _, software, entries in jobs
    ]
    points = [
        {"model": suite.model, "workload": workload, "held": held, "entries": entries, **outcome.to_json()}
        for (suite, workload, held, _, entries), outcome in zip(
            jobs, run(designs, setup.workers, "figure 5"), strict=True
        )
    ]
    return {"points": points, "made": setup.made([source for suite in setup.suites for source in suite.sources])}


def _held(suite: Suite, workload: str) -> int:
    """Profile tokens of decode that the workload's traces hold."""
    traces = [kept(source.path) for source in suite.workloads[workload]]
    return sum(int((trace.row_split("profile") & (trace.phase == DECODE)).sum()) for trace in traces)


def sheets(data: Data) -> list[Sheet]:
    """Published points, then simulated ones by model, one row a table size."""
    paper = domoe()
    published = [
        [p.model, p.at, NOTHING if p.tokens_per_s is None else f"{p.tokens_per_s}{'*' if p.worked_out else ''}",
         percent(p.hit_ratio), p.where]
        for p in paper.points("Figure 5")
    ]  # fmt: skip
    result = [
        Sheet(
            "Figure 5, published",
            ["model", "entries", "tokens/s", "hit", "where"],
            published,
            (paper.statements("Figure 5")[0].says + ".", "* worked out from a factor that the paper gives."),
        )
    ]
    for model in dict.fromkeys(p["model"] for p in data["points"]):
        mine = [p for p in data["points"] if p["model"] == model]
        softwares = list(dict.fromkeys(p["software"] for p in mine))
        rows = [
            [p["software"], f"{p['entries']:,}", number(p["tokens_per_s"], 3), percent(p["hit_ratio"]),
             percent(p["late_ratio"]), percent(p["miss_ratio"]), number(p["predict_ms_per_token"]),
             number(p["tables_mib"], 0)]
            for p in mine
        ]  # fmt: skip
        columns = ["software", "entries", "tokens/s", "hit", "late", "miss", "predict ms/token", "tables MiB"]
        best = [f"{s}: {_best([p for p in mine if p['software'] == s])}" for s in softwares]
        title = f"Figure 5, simulated: {model}, {mine[0]['workload']} ({mine[0]['held']:,} profile tokens)"
        result.append(Sheet(title, columns, rows, (f"Most tokens/s at entries: {', '.join(best)}.",)))
    return result


def _best(points: list[Data]) -> str:
    return f"{max(points, key=lambda p: float(p['tokens_per_s']))['entries']:,}"


def draw(data: Data, figure: "Figure") -> None:
    """Throughput and hit ratio over entries, a row each, a column a model; what is published in black."""
    models = list(dict.fromkeys(p["model"] for p in data["points"]))
    axes = panels(figure, models, 3.6, 6, rows=2, sharex=True)
    for column, model in enumerate(models):
        for row, (what, label) in enumerate((("tokens_per_s", "tokens/s"), ("hit_ratio", "hit ratio"))):
            ax = axes[row][column]
            mine = [p for p in data["points"] if p["model"] == model]
            for index, software in enumerate(dict.fromkeys(p["software"] for p in mine)):
                line = [(p["entries"], p[what], 1 - p["miss_ratio"]) for p in mine if p["software"] == software]
                entries, value, caught = np.array(line).T
                ax.plot(entries, value, f"C{index}o-", ms=3, label=f"simulated, {software}")
                if what == "hit_ratio":
                    ax.plot(entries, caught, f"C{index}:")
            points = [(int(p.at), getattr(p, what)) for p in domoe().points("Figure 5", model)]
            there = np.array([point for point in points if point[1] is not None])
            if len(there):
                ax.plot(*there.T, "k^--", lw=0.8, label="published")
            highest = max(float(np.max(line.get_ydata())) for line in ax.lines)
            ax.set_ylim(0, 1 if what == "hit_ratio" else 1.1 * highest)
            if column == 0:
                ax.set_ylabel(label)
        axes[1][column].plot([], [], "k:", label="hit or late, in the colour of its software")
        axes[1][column].set_xlabel("entries of a domain's table")
    legend(figure, axes.flat)


EXPERIMENT = Experiment(
    name="domoe-table-size",
    title="Figure 5: throughput and hits over table size",
    measure=measure,
    sheets=sheets,
    draw=draw,
)
