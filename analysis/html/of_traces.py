"""What the routing of traces looks like: experts by layer and domain, layers by likeness, and matched domains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.experiment import Data
from analysis.experiments.domoe_matching import matched
from analysis.experiments.domoe_similarity import layer_cosines
from analysis.html.plots import Axis, HeatMap
from analysis.html.wording import counted, figure, listed, percent
from analysis.workloads import ModelTraces, Source, loaded
from traces.schema import DECODE
from traces.statistics.domain_use import evenness, own_over_other
from traces.statistics.usage import expert_counts, shares
from traces.trace import Trace

MOST_DOMAINS = 8
HEADINGS = ("", "trace", "sha256", "model", "domains", "sequences", "decode rows")


@dataclass(frozen=True)
class Routing:
    """What a model's traces say; ``cosine`` and ``matching`` are None where they lack what these need.

    Attributes:
        model: its name.
        layers: (L,) numbers of the routed layers.
        domains: names; ``use`` (D, L, E) is the share of each one's activations that an expert of a layer takes.
        top_k: experts a token.
        cosine: (L + 1, L + 1) mean cosine of a token's embeddings at two levels.
        matching: how prompts match the tables of domains, as `matched` gives it.
    """

    model: str
    layers: Sequence[int]
    domains: Sequence[str]
    use: np.ndarray
    top_k: int
    cosine: np.ndarray | None
    matching: Data | None


def routing(model: ModelTraces, seed: int = 0) -> Routing:
    """Read the traces of a model. Raises InputError."""
    traces = [loaded(source.path) for source in model.sources]
    counts: dict[str, np.ndarray] = {}
    for trace in traces:
        decode = trace.phase == DECODE
        for domain in np.unique(trace.domain).tolist():
            rows = decode & (trace.domain[trace.sequence] == domain)
            if rows.any():
                counts[domain] = counts.get(domain, 0) + expert_counts(trace.experts[rows], trace.n_experts)
    names = sorted(counts)
    head = traces[0]
    use = shares(np.stack([counts[name] for name in names])) if names else np.zeros((0, head.n_layers, head.n_experts))
    return Routing(
        model.name, head.layers.tolist(), names, use, head.top_k, _cosine(traces), _matching(model, traces, seed)
    )


def _cosine(traces: Sequence[Trace]) -> np.ndarray | None:
    held = [trace.embeddings for trace in traces if trace.embeddings is not None and len(trace.embeddings)]
    return layer_cosines(np.concatenate(held)) if held else None


def _matching(model: ModelTraces, traces: Sequence[Trace], seed: int) -> Data | None:
    known = all(trace.prefill_embeddings is not None and {"profile", "eval"} <= set(trace.split) for trace in traces)
    return matched(model, "A", seed) if known and len(model.domains) > 1 else None


def trace_plots(found: Routing, suffix: str = "") -> list[HeatMap]:
    """The plots of a model; ``suffix`` goes behind their names."""
    return [*_use(found, suffix), *_likeness(found, suffix), *_confusion(found, suffix)]


def _use(found: Routing, suffix: str) -> list[HeatMap]:
    experts = found.use.shape[2]
    most = 100 * float(found.use.max(initial=0))
    says = (
        f"Of the activations of a layer, the share that each expert takes in decode. Even use would be "
        f"{figure(100 / experts)} %. Colours stand for the same shares in every domain."
    )
    return [
        HeatMap(
            f"experts-{at}{suffix}", f"Experts that {domain} uses: {found.model}", says, Axis("layer"), Axis("expert"),
            list(map(str, found.layers)), list(map(str, range(experts))), (100 * use).round(4).tolist(),
            "share of activations (%)", span=(0, most),
        )
        for at, (domain, use) in enumerate(list(zip(found.domains, found.use, strict=True))[:MOST_DOMAINS], 1)
    ]  # fmt: skip


def _likeness(found: Routing, suffix: str) -> list[HeatMap]:
    if found.cosine is None:
        return []
    levels = ["start", *map(str, found.layers)]
    says = (
        "Mean cosine of one token's embeddings at two places: start is the embedding layer's output, the others are "
        "the router inputs of the layers. The more alike they are, the longer a prediction holds."
    )
    values = [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in found.cosine]
    title = f"Similarity of layers: {found.model}"
    return [HeatMap(f"similarity{suffix}", title, says, Axis("layer"), Axis("layer"), levels, levels, values, "cosine")]


def _confusion(found: Routing, suffix: str) -> list[HeatMap]:
    if found.matching is None:
        return []
    best = np.array(found.matching["best"])
    prompts = best.sum(axis=1, keepdims=True)
    says = (
        "Of the evaluation prompts of each domain, the share that matches the table of a domain best, as the policy "
        "domoe reads the paper's formula. A perfect matcher has 100 % where both names are the same."
    )
    notes = [[f"{n} of {counted(int(all_), 'prompt')}" for n in row]
             for row, all_ in zip(best.tolist(), prompts[:, 0], strict=True)]  # fmt: skip
    return [
        HeatMap(f"matching{suffix}", f"Domains that prompts are matched with: {found.model}", says,
                Axis("domain of the prompt"), Axis("domain of the table"), found.matching["prompts"],
                found.matching["tables"], (100 * best / np.maximum(1, prompts)).round(2).tolist(),
                "share of prompts (%)", notes, span=(0, 100))
    ]  # fmt: skip


def said(found: Routing) -> str:
    """What stands out, in sentences."""
    even = evenness(found.use) if len(found.use) else np.zeros(0)
    parts = [f"{found.model}, {listed(list(found.domains))}:"]
    if len(even):
        parts.append(
            f"its experts are used evenly to {percent(float(even.min()))} in the least even layer and to "
            f"{percent(float(even.max()))} in the most even one (100 % is even)."
        )
    if len(found.domains) > 1:
        times = own_over_other(found.use, found.top_k)
        parts.append(
            f"The {found.top_k} experts of a layer that a domain uses most take {times:.2f} times as many of its "
            f"activations as those that another domain uses most."
        )
    if found.cosine is not None and len(found.layers) > 1:
        near = np.nanmean(np.diagonal(found.cosine[1:, 1:], 1))
        parts.append(f"Router inputs of neighbouring layers have a mean cosine of {figure(float(near))}.")
    if found.matching is not None:
        parts.append(f"{percent(found.matching['right'])} of the prompts match the table of their own domain best.")
    return " ".join(parts)


def captured(models: Sequence[ModelTraces]) -> str:
    """Whose routing the traces of each model hold, where they say so; a small model may stand in for it."""
    found = {model.name: what for model in models if (what := _captured(model.sources[0]))}
    return " ".join(f"Those named {name} were captured from {what}." for name, what in found.items())


def _captured(source: Source) -> str:
    return str(loaded(source.path).meta.get("captured", {}).get("what") or "").rstrip(".")


def source_lines(models: Sequence[ModelTraces]) -> list[list[str]]:
    """Where the numbers come from, a line a trace, below `HEADINGS`."""
    lines = []
    for at, source in enumerate((source for model in models for source in model.sources), 1):
        trace = loaded(source.path)
        rows = [f"{trace.n_sequences:,}", f"{len(trace.decode_rows):,}"]
        lines.append([str(at), source.path, source.sha256[:16], source.model, ", ".join(source.domains), *rows])
    return lines
