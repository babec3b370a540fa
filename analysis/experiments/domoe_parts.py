"""Which of DoMoE's open parts make it fast? Each is exchanged alone, in the literal form and in the fastest one known.

*Literal* is ``domoe`` with its defaults: predictions where the paper's objective has them, two tables at most, all
guesses fetched, eviction by the tables' use. *Best* is ``mode=best``: one search as a token begins, in the best table
alone; eviction by the vote until a layer has passed; and only what half of the votes name is fetched.
"""

from typing import Any

from analysis.altered import Altered, altered_unless_too_small
from analysis.contest import contest
from analysis.contestants import CONTROL, DOMOE
from analysis.experiment import HALF, Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, run_cells
from sim.policies.named import NamedPolicy

LITERAL, BEST = "literal", "best"
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    LITERAL: {
        "": {},
        "search once": {"layers": "once"},
        "layers by sampled tokens": {"layers": "sampled"},
        "eviction by vote": {"eviction": "vote"},
        "what half of the votes name": {"sure": 0.5},
        "what nearly all votes name": {"sure": 0.9},
        "the best table alone": {"tables": 1},
        "always two tables": {"margin": 2},
        "24 voters": {"top_k": 24},
        "tables that grow": {"grow": True},
        "search before demands": {"search": "before"},
    },
    BEST: {
        "": {},
        "search at every layer": {"layers": "all"},
        "eviction by the tables' use": {"eviction": "score"},
        "no recency": {"recency": 0},
        "what nearly all votes name": {"sure": 0.9},
        "all guesses": {"sure": 0},
        "two tables": {"tables": 2},
        "8 voters": {"top_k": 8},
        "tables that grow": {"grow": True},
    },
}
"""What differs from a form, and the parameters that make it so."""
FORMS: dict[str, dict[str, Any]] = {LITERAL: {}, BEST: {"mode": "best"}}


def contestants() -> dict[tuple[str, str], NamedPolicy]:
    """By form and what differs; without requests a policy has no costs either, and so evicts as that form for free."""
    found: dict[tuple[str, str], NamedPolicy] = {("", CONTROL.label): CONTROL}
    for form, own in FORMS.items():
        for part, values in PARTS[form].items():
            found[form, part] = NamedPolicy(f"{form}, {part}", DOMOE, own | values)
        found[form, "no requests"] = Altered(f"{form}, no requests", "lru", evicts_as=found[form, ""])
    return found


def measure(options: ExperimentOptions) -> Data:
    """Every exchange on each model's first and mixed workload, and its throughput over that of the literal form."""
    cells = [
        (model, workload)
        for model in options.models
        for workload in dict.fromkeys((next(iter(model.workloads)), model.mixed))
    ]
    places = [options.place(model, model.workloads[workload]) for model, workload in cells]
    those = contestants()
    matches = contest(places, [[*those.values()]] * len(cells), options, "parts of DoMoE", altered_unless_too_small)
    runs = [
        {"model": model.name, "workload": workload, "form": form, "part": part}
        | match.ran[one.label].to_json()
        | {"over": match.ratio("throughput", one.label, those[LITERAL, ""].label).to_json()}
        for (model, workload), match in zip(cells, matches, strict=True)
        for (form, part), one in those.items()
        if one.label in match.ran
    ]
    return {"runs": runs, "made": options.made()}


def sheets(data: Data) -> list[Sheet]:
    """A table a model and workload."""
    shown = ["tokens/s", "hit", "wasted", "predict ms/token", "tables MiB"]
    result: list[Sheet] = []
    for model, workload in dict.fromkeys((run["model"], run["workload"]) for run in data["runs"]):
        rows = [
            [run["form"], run["part"], *run_cells(run, shown, tokens_per_s=3), interval(run["over"])]
            for run in data["runs"]
            if (run["model"], run["workload"]) == (model, workload)
        ]
        below = notes("parts") if not result else []
        result.append(Sheet(f"{model}, {workload}", ["form", "but", *shown, "over literal"], rows, below))
    return result


TITLE = "DoMoE's parts, exchanged"
EXPERIMENT = Experiment(35, "domoe-parts", TITLE, __doc__, measure, sheets, parts=[Part(), HALF])
