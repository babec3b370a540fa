"""How the routing of the bundled traces compares with that of large published models, and one training with another.

A small trained model stands in for a large one only where its routing behaves alike. This puts the same statistics of
both side by side, each beside what routing at random with the same popularity of experts would give.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.files import atomic_path
from traces.arrays import read_arrays
from traces.convert.kinds import convert_file
from traces.trace import DECODE, Trace

DISTANCES = (1, 2, 4, 8, 16)
WINDOWS = (2, 4, 8, 16)
_RECALLS = {
    "in_domain_recall": "recall by neighbours of the own domain",
    "cross_domain_recall": "recall by neighbours of another domain",
    "popularity_recall": "recall by the own domain's popularity",
    "previous_token_recall": "recall by the previous token",
}
_MARKS = ("<!-- comparison -->", "<!-- end of comparison -->")


def behaviour(traces: Sequence[Trace]) -> dict[str, Any]:
    """Statistics of the decode rows of one model's traces as JSON; numbers are means over layers.

    ``entropy`` is that of a layer's experts over log2 of their number (1: all used alike), ``top_quarter`` the share of
    activations that the most used quarter of the experts takes. ``reuse[d]`` is the share of a token's experts that
    its sequence's token d rows earlier took too; ``distinct[w]`` the distinct experts of w rows in a row over w x K (1:
    no expert twice). Each has what independent draws with the same popularity would give beside it (``by_popularity``).
    ``tables``: recall of the evaluation rows' experts by the K most popular experts of the own domain's profile rows,
    of each other domain's (mean), and of all domains pooled; None with one domain.
    """
    whole = Trace.concat(traces)
    layers, top_k = whole.n_layers, whole.top_k
    counts = np.stack([np.bincount(ids[ids >= 0], minlength=whole.n_experts) for ids in _decoded(whole)])
    rows = np.array([(ids >= 0).any(axis=1).sum() for ids in _decoded(whole)])
    used = counts / np.maximum(1, rows)[:, None]  # chance that a row takes the expert
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    logs = np.log2(np.where(shares > 0, shares, 1))
    quarter = max(1, whole.n_experts // 4)
    return {
        "model": whole.meta["model"]["name"],
        "layers": layers,
        "experts": whole.n_experts,
        "top_k": top_k,
        "sequences": whole.n_sequences,
        "decode_rows": int((whole.phase == DECODE).sum()),
        "domains": len(set(whole.domain.tolist())),
        "entropy": _rounded((-(shares * logs).sum(axis=1) / np.log2(whole.n_experts)).mean()),
        "top_quarter": _rounded(np.sort(shares, axis=1)[:, -quarter:].sum(axis=1).mean()),
        "reuse": {d: _rounded(_reuse(whole, d)) for d in DISTANCES},
        "reuse_by_popularity": _rounded(((used**2).sum(axis=1) / np.maximum(1e-12, used.sum(axis=1))).mean()),
        "distinct": {w: _rounded(_distinct(whole, w)) for w in WINDOWS},
        "distinct_by_popularity": {
            w: _rounded((1 - (1 - used) ** w).sum(axis=1).mean() / (w * top_k)) for w in WINDOWS
        },
        "tables": _tables(whole),
        "entropy_profile": np.round(-(shares * logs).sum(axis=1) / np.log2(whole.n_experts), 3).tolist(),
    }


def _decoded(trace: Trace) -> list[np.ndarray]:
    """Routes (Td, K) of each layer's decode rows."""
    return list(np.moveaxis(trace.experts[trace.decode_rows], 1, 0))


def _rounded(value: Any) -> float | None:
    return None if not np.isfinite(value) else round(float(value), 4)


def _pairs(trace: Trace, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (earlier, later) of one sequence that lie ``distance`` apart, both decode."""
    later = np.arange(distance, trace.n_rows)
    earlier = later - distance
    fits = (trace.sequence[later] == trace.sequence[earlier]) & (trace.phase[earlier] == DECODE)
    return earlier[fits], later[fits]


def _reuse(trace: Trace, distance: int) -> float:
    """Share of the later rows' experts that the earlier rows took, mean over layers."""
    earlier, later = _pairs(trace, distance)
    found, used = np.zeros(trace.n_layers), np.zeros(trace.n_layers)
    for start in range(0, len(later), 4096):
        before, now = trace.experts[earlier[start : start + 4096]], trace.experts[later[start : start + 4096]]
        valid = now >= 0
        found += ((now[..., None] == before[:, :, None]).any(axis=3) & valid).sum(axis=(0, 2))
        used += valid.sum(axis=(0, 2))
    return float((found / used).mean()) if (used > 0).all() else float("nan")


def _distinct(trace: Trace, window: int) -> float:
    """Distinct experts of ``window`` rows in a row, over window x K, mean over windows and layers."""
    earlier, _ = _pairs(trace, window - 1)
    total, count = 0.0, 0
    for start in range(0, len(earlier), 2048):
        rows = earlier[start : start + 2048, None] + np.arange(window)
        ids = np.sort(trace.experts[rows].transpose(0, 2, 1, 3).reshape(len(rows), trace.n_layers, -1), axis=2)
        fresh = (np.diff(ids, axis=2, prepend=-1) != 0) & (ids >= 0)
        total += float(fresh.sum())
        count += fresh.shape[0] * trace.n_layers
    return total / (count * window * trace.top_k) if count else float("nan")


def _tables(trace: Trace) -> dict[str, float | None] | None:
    """Recall by popularity tables of the own, another and all domains."""
    domains = sorted(set(trace.domain.tolist()))
    if len(domains) < 2:
        return None
    counts = {split: np.stack([_counts(trace, domain, split) for domain in domains]) for split in ("profile", "eval")}
    both = (counts["profile"].sum(axis=(1, 2)) > 0) & (counts["eval"].sum(axis=(1, 2)) > 0)
    learned, asked = counts["profile"][both], counts["eval"][both]
    top = np.argsort(-learned, axis=2, kind="stable")[:, :, : trace.top_k]  # (domain, layer, K)
    pooled = np.argsort(-learned.sum(axis=0), axis=1, kind="stable")[:, : trace.top_k]
    # matrix[a, b]: rows of domain a asked of the table of domain b.
    matrix = np.stack([[_covered(a, table) for table in top] for a in asked])
    own, others = np.diag(matrix), matrix[~np.eye(len(matrix), dtype=bool)]
    return {
        "own": _rounded(own.mean()),
        "other": _rounded(others.mean()),
        "pooled": _rounded(np.mean([_covered(a, pooled) for a in asked])),
    }


def _covered(counts: np.ndarray, table: np.ndarray) -> float:
    """Share of activations (L, E) that the experts of a table (L, K) take, mean over layers."""
    return float((np.take_along_axis(counts, table, axis=1).sum(axis=1) / np.maximum(1, counts.sum(axis=1))).mean())


def _counts(trace: Trace, domain: str, split: str) -> np.ndarray:
    """(L, E) activations of one domain's decode rows of a split; zeros if it has none."""
    rows = ((trace.domain == domain) & (trace.split == split))[trace.sequence] & (trace.phase == DECODE)
    if not rows.any():
        return np.zeros((trace.n_layers, trace.n_experts), np.int64)
    ids = trace.experts[rows]
    return np.stack([np.bincount(one[one >= 0], minlength=trace.n_experts) for one in np.moveaxis(ids, 1, 0)])


def training_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a routing record (``capture --statistics``) says of one training, with its spread over domains."""
    routing, trained = record["routing"], record["captured"]["trained"]
    matrix = routing["neighbour_recall"]
    own = {one: row[one] for one, row in matrix.items()}
    other = {one: float(np.mean([value for name, value in row.items() if name != one])) for one, row in matrix.items()}
    cosine, entropy = routing["adjacent_layer_cosine"], routing["entropy_bits"]
    return {
        "model": record["captured"]["topology"]["name"],
        "seed": trained["seed"],
        "tokens": trained["trained_tokens"],
        "final_loss": trained["final_loss"],
        "in_domain_recall": {one: round(value, 4) for one, value in own.items()},
        "cross_domain_recall": {one: round(value, 4) for one, value in other.items()},
        "popularity_recall": {one: round(value, 4) for one, value in routing["popularity_recall"].items()},
        "previous_token_recall": {one: round(value, 4) for one, value in routing["previous_token_recall"].items()},
        "entropy_bits": _spread(entropy),
        "adjacent_cosine": _spread(cosine),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "mean": round(float(np.mean(values)), 4), "max": max(values)}


def compare(
    bundled: Sequence[str | Path],
    beside: Sequence[str | Path],
    records: Sequence[str | Path],
    output: str | Path,
    document: str | Path | None = None,
) -> dict[str, Any]:
    """Write the statistics of ``bundled`` traces, of those ``beside`` them and of training ``records`` to ``output``.

    ``beside`` are traces or records that convert reads; traces of one model are taken together. ``document`` is a text
    whose tables, between two marks, are replaced by those of the statistics. Returns what was written. Raises
    InputError for a file that cannot be read, before anything is written.
    """
    groups: dict[str, list[Trace]] = {}
    for path, ours in [(path, True) for path in bundled] + [(path, False) for path in beside]:
        trace = _read(path)
        groups.setdefault(f"{trace.meta['model']['name']}{' (small, trained)' if ours else ''}", []).append(trace)
    trainings = [training_figures(json.loads(Path(path).read_text("utf-8"))) for path in records]
    result = {
        "distances": DISTANCES,
        "windows": WINDOWS,
        "routing": {name: behaviour(traces) for name, traces in groups.items()},
        "sources": {name: [_named(trace) for trace in traces] for name, traces in groups.items()},
        "trainings": trainings,
    }
    result = json.loads(json.dumps(result))  # as it will be read again: keys are texts
    text = None if document is None else replaced(Path(document).read_text("utf-8"), result)
    with atomic_path(output) as part:
        part.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    if document is not None and text is not None:
        with atomic_path(document) as part:
            part.write_text(text, "utf-8")
    return dict(result)


def _read(path: str | Path) -> Trace:
    """A trace, or a record that convert reads as one."""
    if "meta" in read_arrays(path)[0]:
        return Trace.load(path)
    with tempfile.TemporaryDirectory() as folder:
        trace = convert_file(path, Path(folder) / "converted.npz")
    # Sequences of several records of one model are put together and need names of their own.
    return Trace(
        **{name: getattr(trace, name) for name in trace.__dataclass_fields__}
        | {
            "sequence_id": np.array([f"{Path(path).stem}:{name}" for name in trace.sequence_id.tolist()]),
            "source": str(path),
        }
    )


def _named(trace: Trace) -> dict[str, Any]:
    origin = trace.meta.get("converted") or {"file": Path(trace.source).name, "sha256": trace.sha256}
    return {"file": origin["file"], "sha256": origin["sha256"], "decode_rows": int((trace.phase == DECODE).sum())}


def replaced(text: str, result: Mapping[str, Any]) -> str:
    """The document with the tables of ``result`` between its marks."""
    before, mark, rest = text.partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    if not mark or not end:
        raise InputError(f"the document lacks the marks {_MARKS[0]} and {_MARKS[1]}")
    return f"{before}{mark}\n{tables(result)}{end}{after}"


def tables(result: Mapping[str, Any]) -> str:
    """Both tables in Markdown."""
    routing = result["routing"]
    rows = [["", *routing]]
    rows.append(["layers x experts, K", *(f"{r['layers']} x {r['experts']}, {r['top_k']}" for r in routing.values())])
    rows.append(["decode rows / domains", *(f"{r['decode_rows']:,} / {r['domains']}" for r in routing.values())])
    rows.append(["entropy of use (1: even)", *(_cell(r["entropy"]) for r in routing.values())])
    rows.append(["top quarter of experts takes", *(_cell(r["top_quarter"]) for r in routing.values())])
    for d in map(str, result["distances"]):
        rows.append([f"reuse, {d} back", *(_cell(r["reuse"][d]) for r in routing.values())])
    rows.append(["reuse at random (K / E)", *(_cell(r["top_k"] / r["experts"]) for r in routing.values())])
    rows.append(["reuse by popularity alone", *(_cell(r["reuse_by_popularity"]) for r in routing.values())])
    for w in map(str, result["windows"]):
        pairs = ((r["distinct"][w], r["distinct_by_popularity"][w]) for r in routing.values())
        rows.append([f"distinct in {w} rows (by popularity)", *(f"{_cell(a)} ({_cell(b)})" for a, b in pairs)])
    for name in ("own", "pooled", "other"):
        rows.append([f"recall by {name} table", *(_cell((r["tables"] or {}).get(name)) for r in routing.values())])
    return _markdown(rows) + (f"\n{_training_table(result['trainings'])}" if result["trainings"] else "")


def _training_table(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Trained models side by side."""
    lines = [["trained as, with seed", *(f"{t['model']}, {t['seed']}" for t in trainings)]]
    lines.append(["tokens / final loss", *(f"{t['tokens']:,} / {t['final_loss']:.3f}" for t in trainings)])
    for key, what in _RECALLS.items():
        lines.append([what, *(f"{np.mean(list(t[key].values())):.3f}" for t in trainings)])
    for domain in trainings[0]["in_domain_recall"]:
        pairs = [(t["in_domain_recall"][domain], t["cross_domain_recall"][domain]) for t in trainings]
        lines.append([f"{domain}: own / other domains", *(f"{a:.3f} / {b:.3f}" for a, b in pairs)])
    for key, what in (("entropy_bits", "entropy of a layer, bits"), ("adjacent_cosine", "adjacent-layer cosine")):
        spread = [f"{t[key]['min']:.2f} / {t[key]['mean']:.2f} / {t[key]['max']:.2f}" for t in trainings]
        lines.append([f"{what}: min / mean / max", *spread])
    return _markdown(lines)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
