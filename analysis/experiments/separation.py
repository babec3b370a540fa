"""What is knowing the domain worth, as domains part?

Trainings of one topology that differ in the weight of the balance over windows of a sequence: the larger it is, the
less domains part. How far they part is told by *own over other*: a domain's activations in its own K most used
experts, over those in another domain's, in the prompts' rows. 1 means not at all. On the axis stand released models, by
what is published of their routing. Each policy's throughput is set over that of perfect-lfu, which knows no domain.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from analysis.contest import contest
from analysis.contestants import CONTROL, DOMOE, ENTRIES, MOE_INFINITY
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import Sheet, interval, notes, number
from analysis.workloads import Source, by_model, loaded
from sim.policies.named import NamedPolicy
from traces.schema import PREFILL
from traces.statistics.figures import parting
from traces.statistics.published import PUBLISHED
from traces.trace import Trace

CONTESTANTS = [
    CONTROL,
    NamedPolicy(DOMOE, "domoe", {"entries": ENTRIES}),
    NamedPolicy("domoe, best", "domoe", {"mode": "best"}),
    NamedPolicy("popularity, domain", "popularity", {"by": "domain"}),
    NamedPolicy("popularity, pooled", "popularity"),
    NamedPolicy("fmoe", "fmoe", {"entries": ENTRIES}),
    MOE_INFINITY,
    NamedPolicy("lru", "lru"),
]
RIVALS = [one.label for one in CONTESTANTS[1:]]


def measure(options: ExperimentOptions) -> Data:
    """Every folder of traces is one training, and so is every model of the traces that are given file by file."""
    files = [path for path in options.traces or () if not path.is_dir()]
    trainings = [model for path in options.traces or () if path.is_dir() for model in by_model([path])]
    trainings += by_model(files or None) if files or options.traces is None else []
    cells = [(model, workload) for model in trainings for workload in model.workloads]
    places = [options.place(model, model.workloads[workload]) for model, workload in cells]
    measured = []
    apart = {id(model): _apart(model.sources) for model in trainings}
    for (model, workload), match in zip(
        cells, contest(places, [CONTESTANTS] * len(cells), options, "separation"), strict=True
    ):
        measured.append(
            {
                **apart[id(model)],
                "workload": workload,
                "runs": match.runs(),
                "ratios": {name: match.ratio("throughput", name, CONTROL.label).to_json() for name in RIVALS},
            }
        )
    return {"cells": measured, "made": options.made(trainings)}


def _apart(sources: Sequence[Source]) -> Data:
    """What training these traces are of, and how far their domains part."""
    whole = Trace.concat([loaded(source.path) for source in sources])
    trained = whole.meta.get("captured", {}).get("trained") or {}
    own, bits = (parting(whole, PREFILL)[name]["mean"] for name in ("own_over_other", "divergence"))
    return {
        "model": whole.meta["model"]["name"],
        "window_balance": trained.get("window_balance"),
        "tokens": trained.get("trained_tokens"),
        "seed": trained.get("seed"),
        "own_over_other": own,
        "divergence": bits,
    }


def _training(cell: Data) -> str:
    """What a table calls a training."""
    weight = cell["window_balance"]
    what = "none (first edition)" if weight is None else f"{weight:g}"
    return what if cell["tokens"] is None else f"{what}, {cell['tokens'] / 1e6:.0f} M tokens, seed {cell['seed']}"


def sheets(data: Data) -> list[Sheet]:
    """Throughput over the control by training, least parted first; where released models stand."""
    rows = []
    for cell in sorted(data["cells"], key=lambda cell: (cell["model"], cell["own_over_other"], cell["workload"])):
        where = [cell["model"], _training(cell), number(cell["own_over_other"]), number(cell["divergence"], 4)]
        ratios = [interval(cell["ratios"][name]) for name in RIVALS]
        rows.append([*where, cell["workload"], number(cell["runs"][CONTROL.label]["tokens_per_s"], 3), *ratios])
    columns = ["model", "weight", "own over other", "bits", "workload", f"{CONTROL.label}, tokens/s", *RIVALS]
    released = [[one["model"], text, number(value), one["source"]] for one, text, value in _released()]
    return [
        Sheet(f"Throughput over {CONTROL.label}, as domains part", columns, rows, notes("separation")),
        Sheet("Released models", ["model", "text", "own over other", "source"], released),
    ]


def _released() -> list[tuple[dict[str, Any], str, float]]:
    """What is published of how far domains part: the entry, its text, own over other."""
    found = [one for one in PUBLISHED["figures"] if one["statistic"] == "own_over_other"]
    return [(one, text, values[one["at"].index("mean")]) for one in found for text, values in one["values"].items()]


def draw(data: Data, figure: Figure) -> None:
    """Ratios over how far domains part, a panel a model and workload, with released models on the axis."""
    kinds = list(product(distinct(data["cells"], "model"), distinct(data["cells"], "workload")))
    kinds = [kind for kind in kinds if having(data["cells"], model=kind[0], workload=kind[1])]
    titles = [f"{model}, {workload}" for model, workload in kinds]
    axes = panels(figure, titles, 4.2, 5.4, "own over other domain", [f"tokens/s over {CONTROL.label}"], sharey=True)
    for (ax,), (model, workload) in zip(axes, kinds, strict=True):
        cells = sorted(having(data["cells"], model=model, workload=workload), key=lambda one: one["own_over_other"])
        new, old = ([one for one in cells if (one["window_balance"] is None) == first] for first in (False, True))
        for index, name in enumerate(RIVALS):
            for those, style in ((new, f"C{index}o-"), (old, f"C{index}s")):
                points = [(one["own_over_other"], one["ratios"][name]["value"]) for one in those]
                if points:
                    ax.plot(*zip(*points, strict=True), style, ms=4, label=name if those is new else None)
        ax.plot([], [], "ks", ms=4, label="squares: first edition")
        ax.axhline(1, color="k", lw=0.8)
        ax.set_xlim(0.98, 0.05 + max(1.1, *(one["own_over_other"] for one in cells)))
        for one, _, value in _released():
            ax.axvline(value, color="#888888", lw=0.6, ls=":" if one["model"] != model else "--")
        ax.plot([], [], color="#888888", lw=0.6, ls="--", label="released, this model")
        ax.plot([], [], color="#888888", lw=0.6, ls=":", label="released, others")


TITLE = "What knowing the domain is worth, as domains part"
TRAININGS = Part(traces="trainings", about="Each training was captured in full; the first edition stands apart.")
EXPERIMENT = Experiment(18, "separation", TITLE, __doc__, measure, sheets, draw, [TRAININGS])
