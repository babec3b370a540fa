"""What each part of DoMoE adds, held against the paper's Figure 4.

*Trajectory* is DoMoE with MoE-Infinity's predictor in the place of its tables. *Table* looks tokens up in a table of
their domain, at every layer. *Table (T+M)* is the whole of DoMoE: it looks up at chosen layers only. MoE-Infinity
itself, with its own eviction and queue, stands beside them.
"""

from itertools import product
from pathlib import Path

import numpy as np

from analysis.contest import contest, verdict
from analysis.contestants import CONTROL, MOE_INFINITY
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number, run_cells
from analysis.published import COMPARED, domoe
from sim.policies.named import NamedPolicy

STAGES = [
    NamedPolicy("trajectory", "domoe", {"mode": "trajectory"}),
    NamedPolicy("table", "domoe", {"mode": "table"}),
    NamedPolicy("table (T+M)", "domoe"),
    MOE_INFINITY,
    CONTROL,
]
STEPS = {"table over trajectory": ("table", "trajectory"), "table (T+M) over table": ("table (T+M)", "table")}


def measure(options: ExperimentOptions) -> Data:
    """All stages on each model's mixed workload (or the last one that it has), with every software profile."""
    cells = list(product(options.models, options.software))
    places = [options.place(model, model.workloads[model.mixed], software) for model, software in cells]
    matches = contest(places, [STAGES] * len(places), options, "figure 4")
    measured = [
        {
            "model": model.name,
            "workload": model.mixed,
            "software": Path(software).stem,
            "runs": match.runs(),
            "steps": {
                step: {metric: match.ratio(metric, *stages).to_json() for metric in COMPARED}
                for step, stages in STEPS.items()
            },
        }
        for (model, software), match in zip(cells, matches, strict=True)
    ]
    return {"cells": measured, "made": options.made()}


def sheets(data: Data) -> list[Sheet]:
    """Each step's ratio, published and simulated, then the absolute numbers of both."""
    rows = []
    for cell, step, metric in product(data["cells"], STEPS, COMPARED):
        ratio = cell["steps"][step][metric]
        claims = domoe().claims("Figure 4", metric, cell["model"], step=step)
        published = claims[0].text if claims else NOTHING
        said = verdict(claims[0], ratio) if claims else NOTHING
        rows.append([cell["model"], step, metric, cell["software"], published, interval(ratio), said])
    shown = ["tokens/s", "hit", "late", "miss", "GiB/token", "predict ms/token", "tables MiB"]
    absolute = [
        [p.model, "published", p.at, number(p.tokens_per_s), *[NOTHING] * 6] for p in domoe().points("Figure 4")
    ] + [
        [cell["model"], f"simulated, {cell['software']}", stage, *run_cells(run, shown)]
        for cell in data["cells"]
        for stage, run in cell["runs"].items()
    ]
    columns = ["model", "step", "ratio of", "software", "published", "simulated", "so"]
    return [
        Sheet("Figure 4: steps of the ablation, mixed workload", columns, rows, notes("ablation")),
        Sheet("Figure 4: absolute numbers", ["model", "whose", "stage", *shown], absolute),
    ]


def draw(data: Data, figure: Figure) -> None:
    """Tokens/s of the stages, a panel a model, published beside each software profile."""
    models, stages = distinct(data["cells"], "model"), [*data["cells"][0]["runs"]]
    for (ax,), model in zip(panels(figure, models, 3.2, 4, "", ["tokens/s"]), models, strict=True):
        bars: dict[str, list[float]] = {}
        if points := {p.at: p.tokens_per_s or np.nan for p in domoe().points("Figure 4", model)}:
            bars["published"] = [points.get(stage, np.nan) for stage in stages]
        for cell in having(data["cells"], model=model):
            bars[f"simulated, {cell['software']}"] = [cell["runs"][stage]["tokens_per_s"] for stage in stages]
        width = 0.8 / len(bars)
        for index, (name, heights) in enumerate(bars.items()):
            colour = "0.3" if name == "published" else f"C{index - ('published' in bars)}"
            ax.bar(np.arange(len(stages)) + index * width, heights, width, label=name, color=colour)
        ax.set_xticks(np.arange(len(stages)) + 0.4 - width / 2, stages, fontsize=8)
        ax.xaxis.grid(visible=False)


EXPERIMENT = Experiment(30, "domoe-ablation", "Figure 4: the ablation", __doc__, measure, sheets, draw)
