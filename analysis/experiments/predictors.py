"""How often is each predictor right, apart from any cache or link?

Every predictor names as many experts a layer as the router takes. *Recall* is the share of the experts taken that it
named, *precision* the share of those named that were taken. What it has learned from is the profile split of the domain
at hand (*own*), of all other domains (*other*), or of all (*pooled*). One that learns nothing is shown once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.judge import HORIZONS, STEP_BEGIN, Judgement, judge, plain_view
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, notes, percent
from analysis.runs import spread
from analysis.workloads import ModelTraces, Source, loaded
from sim.policies import Setting, make_policy
from sim.policies.domoe import Domoe
from sim.predictors import Predictor
from sim.predictors.activations import ActivationMatrices
from sim.predictors.expert_maps import ExpertMaps
from sim.predictors.global_table import GlobalTable
from sim.predictors.next_gate import NextGate
from sim.predictors.popularity import Popularity
from sim.predictors.previous_token import PreviousToken
from sim.predictors.stride_net import StrideNets
from sim.view import View
from traces.mix import mix
from traces.models.known import resolve_model
from traces.trace import Trace

_EVERY = 4
"""Every so many layers stand in the table."""
OWN, OTHER, POOLED, NOTHING_LEARNED = "own", "other", "pooled", "–"


def _tables(**values: object) -> Callable[[Sequence[Trace], View], Predictor]:
    """DoMoE's predictor with these parameters."""

    def build(profile: Sequence[Trace], view: View) -> Predictor:
        model = resolve_model(profile[0].meta["model"], profile[0].layers)
        policy = make_policy("domoe", Setting(model, 0, profile), dict(values))
        assert isinstance(policy, Domoe)
        return policy.predictor(view.prompt_level, view.n_experts)

    return build


@dataclass(frozen=True)
class Kind:
    """A predictor by name: how it is built from a profile, which it may not need, and which arrays it reads."""

    build: Callable[[Sequence[Trace], View], Predictor]
    learns: bool = True
    needs: frozenset[str] = frozenset()


KINDS: dict[str, Kind] = {
    "previous token": Kind(lambda profile, view: PreviousToken(), learns=False),
    "popularity": Kind(lambda profile, view: Popularity(profile)),
    "next layer's gate": Kind(lambda profile, view: NextGate(), learns=False, needs=frozenset({"lookahead"})),
    "domain tables": Kind(_tables(), needs=frozenset({"embeddings", "prefill_embeddings"})),
    "domain tables, one key an entry": Kind(
        _tables(keys="entry"), needs=frozenset({"embeddings", "prefill_embeddings"})
    ),
    "one table (fmoe), 2000 entries": Kind(lambda profile, view: GlobalTable(profile), needs=frozenset({"embeddings"})),
    "activation matrices": Kind(lambda profile, view: ActivationMatrices(profile)),
    "expert maps": Kind(lambda profile, view: ExpertMaps(profile), needs=frozenset({"embeddings", "probs"})),
    "stride nets": Kind(lambda profile, view: StrideNets(profile, horizons=4), needs=frozenset({"embeddings"})),
}


def measure(options: ExperimentOptions) -> Data:
    """Judge every predictor on every workload, with each profile that it can be given."""
    jobs = [
        (model, workload, name, knowledge)
        for model in options.models
        for workload, sources in model.workloads.items()
        for name, kind in KINDS.items()
        if all(getattr(loaded(source.path), array) is not None for source in model.sources for array in kind.needs)
        for knowledge in (_known(model, sources) if kind.learns else [NOTHING_LEARNED])
    ]
    return {
        "horizons": list(HORIZONS),
        "judged": spread(_judged, jobs, options.processes, "predictors"),
        "chance": {model.name: _chance(model) for model in options.models},
        "made": options.made(),
    }


def _known(model: ModelTraces, sources: Sequence[Source]) -> list[str]:
    """What there is to learn from for a workload of these sources."""
    mine = {domain for source in sources for domain in source.domains}
    return [OWN, OTHER, POOLED] if set(model.domains) - mine else [POOLED]


def _chance(model: ModelTraces) -> float:
    trace = loaded(model.sources[0].path)
    return round(trace.top_k / trace.n_experts, 4)


def _judged(job: tuple[ModelTraces, str, str, str]) -> Data:
    """One predictor, taught one way, on one workload."""
    model, workload, name, knowledge = job
    sources = model.workloads[workload]
    whole = mix([loaded(source.path) for source in sources]).select("eval")
    view = plain_view(whole)
    profile = [] if knowledge == NOTHING_LEARNED else _profile(model, sources, knowledge)
    result = judge(KINDS[name].build(profile, view), view, whole.experts[whole.decode_rows])
    return {"model": model.name, "workload": workload, "predictor": name, "learned_from": knowledge} | _shown(result)


def _profile(model: ModelTraces, sources: Sequence[Source], knowledge: str) -> list[Trace]:
    mine = {domain for source in sources for domain in source.domains}
    wanted = {OWN: mine, OTHER: set(model.domains) - mine, POOLED: set(model.domains)}[knowledge]
    traces = [loaded(source.path) for source in model.sources if set(source.domains) & wanted]
    return [
        t.select("profile", sorted(wanted & set(t.domain.tolist()))) for t in traces if (t.split == "profile").any()
    ]


def _shown(result: Judgement) -> Data:
    # Layers differ in how well they can be predicted: all horizons are judged on those that each can reach.
    common = min(max(HORIZONS), result.right.shape[1]) - 1
    horizons = [*HORIZONS, STEP_BEGIN]
    return {
        "recall": {str(h): result.recall(h, common) for h in horizons},
        "precision": {str(h): result.precision(h, common) for h in horizons},
        "common_layers_from": common,
        "recall_of_all_layers": result.recall(1),
        "recall_by_layer": result.recall_by_layer(1),
        "precision_by_layer": result.precision_by_layer(1),
    }


def _mean(data: Data, model: str, predictor: str, learned_from: str, what: str, horizon: str) -> float | None:
    """Mean over workloads; None where a workload lacks it."""
    judged = having(data["judged"], model=model, predictor=predictor, learned_from=learned_from)
    there = [j[what][horizon] for j in judged if j[what][horizon] is not None]
    return float(np.mean(there)) if there else None


def _taught(data: Data, model: str) -> list[tuple[str, str]]:
    """Predictors and what each learned from, in order."""
    return list(dict.fromkeys((j["predictor"], j["learned_from"]) for j in having(data["judged"], model=model)))


def _layer_curve(data: Data, model: str, predictor: str, learned_from: str, what: str = "recall") -> list[float]:
    """Recall (or precision) of each layer at horizon 1, mean over workloads; NaN where there is none."""
    judged = having(data["judged"], model=model, predictor=predictor, learned_from=learned_from)
    curves = [[np.nan if v is None else v for v in j[f"{what}_by_layer"]] for j in judged]
    return [float(v) for v in np.mean(curves, axis=0)]


def sheets(data: Data) -> list[Sheet]:
    """Recall and precision by horizon, means over workloads, then recall by layer."""
    result = []
    horizons = [str(h) for h in data["horizons"]]
    names = [f"{h} ahead" for h in horizons] + ["step begins"]
    for model, chance in data["chance"].items():
        rows = []
        for predictor, learned in _taught(data, model):
            cells = []
            for h in [*horizons, str(STEP_BEGIN)]:
                recall, precision = (_mean(data, model, predictor, learned, w, h) for w in ("recall", "precision"))
                cells.append(_cell(recall, precision))
            judged = having(data["judged"], model=model, predictor=predictor, learned_from=learned)
            whole = float(np.mean([j["recall_of_all_layers"] for j in judged]))
            rows.append([predictor, learned, percent(whole), *cells])
        below = notes("predictors", deepest=max(data["horizons"]), chance=percent(chance))
        title = f"{model}: experts found among as many named"
        result.append(Sheet(title, ["predictor", "learned from", "next, all layers", *names], rows, below))
        result.append(_by_layer(data, model))
    return result


def _cell(recall: float | None, precision: float | None) -> str:
    """Recall, and precision where it is another number; a dash where nothing was named."""
    if recall is None or precision is None:
        return NOTHING
    return percent(recall) if abs(recall - precision) < 5e-4 else f"{percent(recall)} / {percent(precision)}"


def _by_layer(data: Data, model: str) -> Sheet:
    """Recall (and precision, where it is another number) at horizon 1 by layer."""
    rows = []
    for pair in _taught(data, model):
        both = [_layer_curve(data, model, *pair, what)[::_EVERY] for what in ("recall", "precision")]
        cells = [[None if np.isnan(value) else value for value in curve] for curve in both]
        rows.append([*pair, *map(_cell, *cells)])
    layers = range(0, _EVERY * (len(rows[0]) - 2), _EVERY)
    columns = ["predictor", "learned from", *map(str, layers)]
    return Sheet(f"{model}: recall of the next layer, by layer", columns, rows, detail=True)


def draw(data: Data, figure: Figure) -> None:
    """Recall over horizon and by layer, learned from all domains pooled, mean over workloads; chance dotted."""
    models = list(data["chance"])
    titles, deepest = [f"{model} (small, trained)" for model in models], "routed layer, predicted right before it"
    axes = panels(figure, titles, 4.2, 7.2, deepest, ["recall", "recall"])
    figure.suptitle("learned from the profiles of all domains, pooled; means over the workloads", fontsize=10)
    for (above, below), model in zip(axes, models, strict=True):
        shown = [pair for pair in _taught(data, model) if pair[1] in (POOLED, NOTHING_LEARNED)]
        for index, (predictor, learned) in enumerate(shown):
            named = [h for h in data["horizons"] if _mean(data, model, predictor, learned, "precision", str(h))]
            found = [_mean(data, model, predictor, learned, "recall", str(h)) for h in named]
            above.plot(named, found, marker="o", ms=3, color=f"C{index}", label=predictor)
            below.plot(_layer_curve(data, model, predictor, learned), color=f"C{index}", label=predictor)
        for line in (above, below):
            line.axhline(data["chance"][model], color="0.5", lw=0.8, ls=":", label="chance")
            line.set_ylim(0, 1)
        above.set_xlabel("layers ahead")
        above.set_xscale("log", base=2)
        above.set_xticks(data["horizons"], [str(h) for h in data["horizons"]])


EXPERIMENT = Experiment(100, "predictors", "Predictors apart from caches", __doc__, measure, sheets, draw)
