"""How hits and throughput change with the number of entries in a domain's table, held against the paper's Figure 5."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from analysis.contestants import control_note, controls
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import Sheet, notes, percent, run_cells, starred
from analysis.published import domoe
from analysis.runs import Design, run
from analysis.workloads import Source, loaded
from sim.policies.named import NamedPolicy
from traces.schema import DECODE

ENTRIES = (100, 250, 500, 1000, 1500, 2000, 2500, 3000)


def measure(options: ExperimentOptions) -> Data:
    """DoMoE at every table size that the profile of each model's first workload can fill.

    The paper does not say on which workload; the first is law, with the longest profile, where there is law.
    """
    jobs: list[tuple[Data, Design]] = []
    for model in options.models:
        workload, sources = next(iter(model.workloads.items()))
        held = _held(sources)
        for software, entries in product(options.software, options.entries or ENTRIES):
            if entries <= held:
                where = {"model": model.name, "workload": workload, "held": held, "entries": entries}
                policy = NamedPolicy(f"domoe, {entries} entries", "domoe", {"entries": entries})
                jobs.append((where, Design(options.place(model, sources, software), policy)))
    outcomes = run([design for _, design in jobs], options.processes, "figure 5")
    points = [where | outcome.to_json() for (where, _), outcome in zip(jobs, outcomes, strict=True)]
    return {"points": points, "controls": controls(options), "made": options.made()}


def _held(sources: Sequence[Source]) -> int:
    """Profile tokens of decode that the traces hold."""
    traces = [loaded(source.path) for source in sources]
    return sum(int((trace.row_split("profile") & (trace.phase == DECODE)).sum()) for trace in traces)


def sheets(data: Data) -> list[Sheet]:
    """Published points, then simulated ones by model, one row a table size."""
    paper = domoe()
    points = paper.points("Figure 5")
    published = [[p.model, p.at, starred(p.tokens_per_s, p.worked_out), percent(p.hit_ratio)] for p in points]
    sources = "; ".join(f"{p.model}, {p.at} entries: {p.where}" for p in points)
    below = notes("table-size", says=paper.said("Figure 5").says, sources=sources)
    result = [Sheet("Figure 5, published", ["model", "entries", "tokens/s", "hit"], published, below)]
    shown = ["tokens/s", "hit", "late", "miss", "predict ms/token", "tables MiB"]
    for model in distinct(data["points"], "model"):
        mine = having(data["points"], model=model)
        rows = [[p["software"], f"{p['entries']:,}", *run_cells(p, shown, tokens_per_s=3)] for p in mine]
        best = [f"{s}: {_best(having(mine, software=s))}" for s in distinct(mine, "software")]
        title = f"Figure 5, simulated: {model}, {mine[0]['workload']} ({mine[0]['held']:,} profile tokens)"
        most = f"Entries with the most tokens/s: {', '.join(best)}."
        below = [most, *control_note(data, model)]
        result.append(Sheet(title, ["software", "entries", *shown], rows, below))
    return result


def _best(points: list[Data]) -> str:
    return f"{max(points, key=lambda p: float(p['tokens_per_s']))['entries']:,}"


def draw(data: Data, figure: Figure) -> None:
    """Throughput and hit ratio over entries, a row each, a column a model; what is published in black."""
    models = distinct(data["points"], "model")
    axes = panels(figure, models, 3.6, 6, "entries of a domain's table", ["tokens/s", "hit ratio"], sharex=True)
    for column, model in zip(axes, models, strict=True):
        mine = having(data["points"], model=model)
        for ax, what in zip(column, ("tokens_per_s", "hit_ratio"), strict=True):
            for index, software in enumerate(distinct(mine, "software")):
                line = [(p["entries"], p[what], 1 - p["miss_ratio"]) for p in having(mine, software=software)]
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
        ax.plot([], [], "k:", label="hit or late, in the colour of its software")


TITLE = "Figure 5: throughput and hits over table size"
LARGE = Part(traces="large", else_all=True)
EXPERIMENT = Experiment(50, "domoe-table-size", TITLE, __doc__, measure, sheets, draw, [LARGE])
