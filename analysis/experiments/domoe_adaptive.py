"""At which layers should DoMoE predict? The paper minimises an expected cost; this sets it beside the simulated time.

A prediction takes time (c_pred), and a wrong one makes a copy necessary (c_load). The further back the last prediction,
the more often it is wrong. *all* predicts at every layer, *every:n* at every n-th. *adaptive* is the set with the least
expected cost, *sampled* what most of the sampled tokens would have, each for itself. *adaptive, by layer* counts errors
for each layer by itself.
"""

from itertools import product
from typing import Any

from analysis.contestants import control_note, controls
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import Sheet, notes, number, run_cells
from analysis.runs import Design, run, scene_at, spread
from analysis.workloads import loaded
from sim.policies import Setting, make_policy
from sim.policies.domoe import Domoe
from sim.policies.named import NamedPolicy
from sim.predictors.adaptive import objective

SPACINGS = (2, 4, 8, 16)
OFFSETS = (0, 1, 2, 4, 8, 16, 32)
CHOSEN: dict[str, dict[str, Any]] = {
    "adaptive": {"layers": "adaptive"},
    "sampled": {"layers": "sampled"},
    "adaptive, by layer": {"layers": "adaptive", "chances": "layer"},
}
"""Sets chosen by expected cost: the least of all, what most tokens would have, the least with errors by layer."""


def measure(options: ExperimentOptions) -> Data:
    """DoMoE with predictions at evenly spaced and at chosen layers, on every model, with every software profile."""
    jobs: list[tuple[str, Design]] = []
    for model, software in product(options.models, options.software):
        sources = next(iter(model.workloads.values()))
        n_layers = loaded(sources[0].path).n_layers
        even = ["all", *(f"every:{n}" for n in SPACINGS if n < n_layers), f"every:{n_layers}"]
        place = options.place(model, sources, software)
        sets = {layers: {"layers": layers} for layers in even} | CHOSEN
        jobs += [(model.name, Design(place, NamedPolicy(name, "domoe", values))) for name, values in sets.items()]
    designs = [design for _, design in jobs]
    expected = spread(_expected, designs, options.processes, "predicting costs")
    outcomes = run(designs, options.processes, "adaptive")
    points = [
        {"model": model, "layers": design.policy.label, **costs, "tpot_ms": _ms(outcome.report.tpot_ms.mean)}
        | outcome.to_json()
        for (model, design), costs, outcome in zip(jobs, expected, outcomes, strict=True)
    ]
    return {"points": points, "controls": controls(options), "made": options.made()}


def _expected(design: Design) -> Data:
    """The expected cost of a set of layers and what it is made of."""
    here = scene_at(design.scene)
    setting = Setting(here.model, here.budget, here.profile, here.seed, here.hardware, here.software)
    policy = make_policy("domoe", setting, design.policy.values)
    assert isinstance(policy, Domoe)
    level, n_experts = here.trace.meta["embedding"]["prefill_layer"], here.trace.n_experts
    at = policy.prediction_layers(level, n_experts, here.trace.n_layers)
    found = policy.estimate(level, n_experts)
    return {
        "at": list(at),
        "expected_ms": _ms(objective(at, found.by_offset(), policy.predict_ns, policy.load_ns) / 1e6),
        "expected_by_layer_ms": _ms(objective(at, found.by_layer(), policy.predict_ns, policy.load_ns) / 1e6),
        "c_pred_ms": _ms(policy.predict_ns / 1e6),
        "c_load_ms": _ms(policy.load_ns / 1e6),
        "miss_by_offset": [_ms(chance) for chance in found.by_offset().tolist()],
    }


def _ms(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def sheets(data: Data) -> list[Sheet]:
    """A table a model and software, a row a set of layers."""
    result = []
    shown = ["tokens/s", "hit", "late", "miss", "predict ms/token"]
    for model, software in product(distinct(data["points"], "model"), distinct(data["points"], "software")):
        mine = having(data["points"], model=model, software=software)
        rows = [
            [p["layers"], str(len(p["at"])), *map(number, (p["expected_ms"], p["expected_by_layer_ms"], p["tpot_ms"])),
             *run_cells(p, shown, tokens_per_s=3, predict_ms_per_token=3)]
            for p in mine
        ]  # fmt: skip
        miss = mine[0]["miss_by_offset"]
        below = notes(
            "adaptive",
            c_pred=number(mine[0]["c_pred_ms"], 3),
            c_load=number(mine[0]["c_load_ms"]),
            chances=", ".join(f"{offset}: {miss[offset]:.3f}" for offset in OFFSETS if offset < len(miss)),
            best=min(mine, key=lambda p: float(p["tpot_ms"]))["layers"],
            chosen="; ".join(f"{p['layers']} {', '.join(map(str, p['at']))}" for p in mine if p["layers"] in CHOSEN),
        )
        columns = ["layers", "predictions", "expected ms", "by layer", "simulated ms", *shown]
        below += control_note(data, model)
        result.append(Sheet(f"Expected and simulated time of a token: {model}, {software}", columns, rows, below))
    return result


def draw(data: Data, figure: Figure) -> None:
    """Simulated over expected time, a point a set of layers, a colour a software profile, a panel a model."""
    models = distinct(data["points"], "model")
    axes = panels(figure, models, 2.6, 4.2, "expected ms a token (objective)", ["simulated ms a token"])
    for (ax,), model in zip(axes, models, strict=True):
        for software in distinct(data["points"], "software"):
            mine = having(data["points"], model=model, software=software)
            line = ax.plot([p["expected_ms"] for p in mine], [p["tpot_ms"] for p in mine], "o", ms=4, label=software)
            for p in mine:
                if p["layers"] == "adaptive":
                    ax.plot(p["expected_ms"], p["tpot_ms"], "*", ms=12, color=line[0].get_color())
    axes[0, 0].plot([], [], "k*", ms=9, label="the layers that adaptive chooses")


TITLE = "Adaptive prediction: expected and simulated cost"
EXPERIMENT = Experiment(40, "domoe-adaptive", TITLE, __doc__, measure, sheets, draw)
