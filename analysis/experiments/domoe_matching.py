"""Do prompts find the table of their own domain?

The formula by which DoMoE matches a prompt with tables is lost in the paper's text; both ways to read it are tried.
"""

from itertools import product

import numpy as np

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, notes, percent
from analysis.workloads import ModelTraces, loaded
from ground.errors import InputError
from sim.policies import Setting, make_policy
from sim.policies.domoe import Domoe
from sim.predictors.matching import confusion
from traces.models.known import resolve_model

READINGS = ("A", "B")


def measure(options: ExperimentOptions) -> Data:
    """Best match and all tables consulted for the evaluation prompts of every domain. Raises InputError for none."""
    models = [
        matched(model, reading, options.seed)
        for model, reading in product(options.models, READINGS)
        if len(model.domains) > 1
        and all(loaded(source.path).prefill_embeddings is not None for source in model.sources)
    ]
    if not models:
        raise InputError("matching prompts: no model has prefill embeddings of two domains")
    return {"models": models, "made": options.made()}


def matched(model: ModelTraces, reading: str, seed: int) -> Data:
    """How often evaluation prompts of each domain (down) matched each table best, or consulted it."""
    traces = [loaded(source.path) for source in model.sources]
    spec = resolve_model(traces[0].meta["model"], traces[0].layers)
    profile = [trace.select("profile") for trace in traces]
    policy = make_policy("domoe", Setting(spec, 0, profile, seed), {"reading": reading})
    assert isinstance(policy, Domoe)
    predictor = policy.predictor(traces[0].meta["embedding"]["prefill_layer"], traces[0].n_experts)
    names = [table.domain for table in predictor.tables]
    counts: dict[str, np.ndarray] = {}
    for trace in traces:
        for label, found in confusion(predictor.matching, names, trace.select("eval")).items():
            counts[label] = counts.get(label, 0) + found
    labels = sorted(counts)
    best, consulted = np.array([counts[label] for label in labels]).swapaxes(0, 1)
    own = [names.index(label) for label in labels]
    return {
        "model": model.name,
        "reading": reading,
        "tables": names,
        "prompts": labels,
        "best": best.tolist(),
        "consulted": consulted.tolist(),
        "right": round(float(best[range(len(own)), own].sum() / best.sum()), 4),
        "right_consulted": round(float(consulted[range(len(own)), own].sum() / best.sum()), 4),
        "tables_a_prompt": round(float(consulted.sum() / best.sum()), 3),
    }


def sheets(data: Data) -> list[Sheet]:
    """How often the own domain is found, then the matrices."""
    rows = [
        [m["model"], m["reading"], percent(m["right"]), percent(m["right_consulted"]), f"{m['tables_a_prompt']:.2f}"]
        for m in data["models"]
    ]
    columns = ["model", "reading", "own domain is best", "own domain is consulted", "tables consulted, mean"]
    result = [Sheet("Domain matching", columns, rows, notes("matching"))]
    for m in data["models"]:
        lines = [
            [label, *(f"{best} ({asked})" for best, asked in zip(b, c, strict=True))]
            for label, b, c in zip(m["prompts"], m["best"], m["consulted"], strict=True)
        ]
        title = f"{m['model']}, reading {m['reading']}: tables that match best (are consulted)"
        result.append(Sheet(title, ["prompts of", *m["tables"]], lines))
    return result


TITLE = "Domain matching: confusion over domains"
EXPERIMENT = Experiment(80, "domoe-matching", TITLE, __doc__, measure, sheets)
