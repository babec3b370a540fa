"""Do prompts find the table of their own domain?

The formula by which DoMoE matches a prompt with tables is lost in the paper's text; both ways to read it are tried.
"""

from itertools import product

import numpy as np

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, percent
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
        _matched(model, reading, options.seed)
        for model, reading in product(options.models, READINGS)
        if len(model.domains) > 1
        and all(loaded(source.path).prefill_embeddings is not None for source in model.sources)
    ]
    if not models:
        raise InputError("matching prompts: no model has prefill embeddings of two domains")
    return {"models": models, "made": options.made()}


def _matched(model: ModelTraces, reading: str, seed: int) -> Data:
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
    prompts = sum(int(counts[label][0].sum()) for label in labels)
    own = [names.index(label) for label in labels]
    return {
        "model": model.name,
        "reading": reading,
        "tables": names,
        "prompts": labels,
        "best": [counts[label][0].tolist() for label in labels],
        "consulted": [counts[label][1].tolist() for label in labels],
        "right": round(sum(int(counts[label][0][i]) for label, i in zip(labels, own, strict=True)) / prompts, 4),
        "right_consulted": round(
            sum(int(counts[label][1][i]) for label, i in zip(labels, own, strict=True)) / prompts, 4
        ),
        "tables_a_prompt": round(sum(int(counts[label][1].sum()) for label in labels) / prompts, 3),
    }


def sheets(data: Data) -> list[Sheet]:
    """How often the own domain is found, then the matrices."""
    rows = [
        [m["model"], m["reading"], percent(m["right"]), percent(m["right_consulted"]), f"{m['tables_a_prompt']:.2f}"]
        for m in data["models"]
    ]
    columns = ["model", "reading", "own domain is best", "own domain is consulted", "tables consulted, mean"]
    notes = (
        "Prompts of the evaluation split. A prompt has several centres and a table several prototypes. Reading A: the "
        "mean over the centres of the largest cosine with a prototype. Reading B: the largest cosine of all. Up to two "
        "tables are consulted, the second only if it is close behind the first.",
    )
    result = [Sheet("Domain matching", columns, rows, notes)]
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
