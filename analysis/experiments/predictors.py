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
from analysis.judge import HORIZONS, STEP_BEGIN, Judgement, What, judge, plain_view
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, notes, percent
from analysis.runs import spread
from analysis.workloads import ModelTraces, Source, loaded
from ground.errors import InputError
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
BOTH: tuple[What, ...] = ("recall", "precision")
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
    needs: Sequence[str] = ()


KINDS: dict[str, Kind] = {
    "previous token": Kind(lambda profile, view: PreviousToken(), learns=False),
    "popularity": Kind(lambda profile, view: Popularity(profile)),
    "next layer's gate": Kind(lambda profile, view: NextGate(), learns=False, needs=("lookahead",)),
    "domain tables": Kind(_tables(), needs=("embeddings", "prefill_embeddings")),
    "domain tables, one key an entry": Kind(_tables(keys="entry"), needs=("embeddings", "prefill_embeddings")),
    "one table (fmoe), 2000 entries": Kind(lambda profile, view: GlobalTable(profile), needs=("embeddings",)),
    "activation matrices": Kind(lambda profile, view: ActivationMatrices(profile)),
    "expert maps": Kind(lambda profile, view: ExpertMaps(profile), needs=("embeddings", "probs")),
    "stride nets": Kind(lambda profile, view: StrideNets(profile, horizons=4), needs=("embeddings",)),
}


def measure(options: ExperimentOptions) -> Data:
    """Judge every predictor on every workload, with each profile that it can be given. Raises InputError."""
    for source in (source for model in options.models for source in model.sources):
        if not (loaded(source.path).split == "profile").any():
            raise InputError(f"--traces {source.path}: no sequence of split profile; expected at least one")
    first = {model.name: loaded(model.sources[0].path) for model in options.models}
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
        "chance": {name: round(trace.top_k / trace.n_experts, 4) for name, trace in first.items()},
        "made": options.made(),
    }


def _known(model: ModelTraces, sources: Sequence[Source]) -> dict[str, set[str]]:
    """What there is to learn from for a workload of these sources: the domains of each."""
    mine, pooled = {domain for source in sources for domain in source.domains}, set(model.domains)
    return ({OWN: mine, OTHER: pooled - mine} if pooled - mine else {}) | {POOLED: pooled}


def _judged(job: tuple[ModelTraces, str, str, str]) -> Data:
    """One predictor, taught one way, on one workload."""
    model, workload, name, knowledge = job
    sources = model.workloads[workload]
    whole = mix([loaded(source.path) for source in sources]).select("eval")
    view = plain_view(whole)
    wanted = {NOTHING_LEARNED: set[str](), **_known(model, sources)}[knowledge]
    traces = [loaded(source.path) for source in model.sources if set(source.domains) & wanted]
    profile = [t.select("profile", sorted(wanted & set(t.domain.tolist()))) for t in traces]
    result = judge(KINDS[name].build(profile, view), view, whole.experts[whole.decode_rows])
    return {"model": model.name, "workload": workload, "predictor": name, "learned_from": knowledge} | _shown(result)


def _shown(result: Judgement) -> Data:
    # Layers differ in how well they can be predicted: all horizons are judged on those that each can reach.
    common = min(max(HORIZONS), result.right.shape[1]) - 1
    return {
        **{what: {str(h): result.rate(what, h, slice(common, None)) for h in result.horizons} for what in BOTH},
        "common_layers_from": common,
        "recall_of_all_layers": result.rate("recall", 1),
        **{f"{what}_by_layer": result.by_layer(what, 1) for what in BOTH},
    }


def _taught(data: Data, model: str) -> dict[tuple[str, str], list[Data]]:
    """How a model's predictors were judged, a workload each, by predictor and what it learned from, in order."""
    found: dict[tuple[str, str], list[Data]] = {}
    for judged in having(data["judged"], model=model):
        found.setdefault((judged["predictor"], judged["learned_from"]), []).append(judged)
    return found


def _mean(judged: list[Data], what: str, horizon: object) -> float | None:
    """Mean over workloads; None where none has it."""
    there = [j[what][str(horizon)] for j in judged if j[what][str(horizon)] is not None]
    return float(np.mean(there)) if there else None


def _layer_curve(judged: list[Data], what: str = "recall") -> list[float]:
    """Recall (or precision) of each layer at horizon 1, mean over workloads; NaN where there is none."""
    curves = [[np.nan if v is None else v for v in j[f"{what}_by_layer"]] for j in judged]
    return [float(v) for v in np.mean(curves, axis=0)]


def sheets(data: Data) -> list[Sheet]:
    """Recall and precision by horizon, means over workloads, then recall by layer."""
    result = []
    names = [f"{h} ahead" for h in data["horizons"]] + ["step begins"]
    for model, chance in data["chance"].items():
        rows = []
        for pair, judged in _taught(data, model).items():
            cells = [_cell(*(_mean(judged, what, h) for what in BOTH)) for h in [*data["horizons"], STEP_BEGIN]]
            whole = float(np.mean([j["recall_of_all_layers"] for j in judged]))
            rows.append([*pair, percent(whole), *cells])
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
    for pair, judged in _taught(data, model).items():
        both = [_layer_curve(judged, what)[::_EVERY] for what in BOTH]
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
        shown = {who: judged for (who, of), judged in _taught(data, model).items() if of in (POOLED, NOTHING_LEARNED)}
        for index, (predictor, judged) in enumerate(shown.items()):
            named = [h for h in data["horizons"] if _mean(judged, "precision", h)]
            above.plot(named, [_mean(judged, "recall", h) for h in named], f"C{index}o-", ms=3, label=predictor)
            below.plot(_layer_curve(judged), f"C{index}", label=predictor)
        for line in (above, below):
            line.axhline(data["chance"][model], color="0.5", lw=0.8, ls=":", label="chance")
            line.set_ylim(0, 1)
        above.set_xlabel("layers ahead")
        above.set_xscale("log", base=2)
        above.set_xticks(data["horizons"], [str(h) for h in data["horizons"]])


EXPERIMENT = Experiment(100, "predictors", "Predictors apart from caches", __doc__, measure, sheets, draw)
