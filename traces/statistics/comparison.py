"""How the routing of the bundled traces compares with that of large published models, and one training with another.

A small trained model stands in for a large one only where its routing behaves alike. This puts the same statistics of
both side by side, each beside what routing at random with the same popularity of experts would give.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ground.files import atomic_path
from traces.arrays import read_arrays
from traces.convert.kinds import convert_file
from traces.schema import DECODE
from traces.statistics.marked_document import between_marks, markdown
from traces.statistics.usage import chances, entropy, expert_counts, neighbours, reuse, reuse_by_popularity, shares
from traces.trace import Trace

DISTANCES = (1, 2, 4, 8, 16)
WINDOWS = (2, 4, 8, 16)
_RECALLS = {
    "in_domain_recall": "recall by neighbours of the own domain",
    "cross_domain_recall": "recall by neighbours of another domain",
    "popularity_recall": "recall by the own domain's popularity",
    "previous_token_recall": "recall by the previous token",
}


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
    decoded = whole.experts[whole.decode_rows]
    counts = expert_counts(decoded, whole.n_experts)
    used = chances(decoded, whole.n_experts)
    share = shares(counts)
    evenness = entropy(share) / np.log2(whole.n_experts)
    quarter = max(1, whole.n_experts // 4)
    return {
        "model": whole.meta["model"]["name"],
        "layers": layers,
        "experts": whole.n_experts,
        "top_k": top_k,
        "sequences": whole.n_sequences,
        "decode_rows": len(decoded),
        "domains": len(set(whole.domain.tolist())),
        "entropy": _rounded(evenness.mean()),
        "top_quarter": _rounded(np.sort(share, axis=1)[:, -quarter:].sum(axis=1).mean()),
        "reuse": {d: _rounded(reuse(whole, d).mean()) for d in DISTANCES},
        "reuse_by_popularity": _rounded(reuse_by_popularity(used).mean()),
        "distinct": {w: _rounded(_distinct(whole, w)) for w in WINDOWS},
        "distinct_by_popularity": {
            w: _rounded((1 - (1 - used) ** w).sum(axis=1).mean() / (w * top_k)) for w in WINDOWS
        },
        "tables": _tables(whole),
        "entropy_profile": np.round(evenness, 3).tolist(),
    }


def _rounded(value: Any) -> float | None:
    return None if not np.isfinite(value) else round(float(value), 4)


def _distinct(trace: Trace, window: int) -> float:
    """Distinct experts of ``window`` rows in a row, over window x K, mean over windows and layers."""
    earlier, _ = neighbours(trace, window - 1)
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
    return expert_counts(trace.experts[rows], trace.n_experts)


def training_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a routing record (``capture --statistics``) says of one training, with its spread over domains."""
    routing, trained = record["routing"], record["captured"]["trained"]
    matrix = routing["neighbour_recall"]
    recalls = {
        "in_domain_recall": {one: row[one] for one, row in matrix.items()},
        "cross_domain_recall": {
            one: float(np.mean([value for name, value in row.items() if name != one])) for one, row in matrix.items()
        },
        "popularity_recall": routing["popularity_recall"],
        "previous_token_recall": routing["previous_token_recall"],
    }
    return {
        "model": record["captured"]["topology"]["name"],
        "seed": trained["seed"],
        "tokens": trained["trained_tokens"],
        "final_loss": trained["final_loss"],
        **{what: {one: round(value, 4) for one, value in row.items()} for what, row in recalls.items()},
        "entropy_bits": _spread(routing["entropy_bits"]),
        "adjacent_cosine": _spread(routing["adjacent_layer_cosine"]),
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
    for kind, paths in ((" (small, trained)", bundled), ("", beside)):
        for trace in map(read_trace, paths):
            groups.setdefault(f"{trace.meta['model']['name']}{kind}", []).append(trace)
    result = {
        "distances": DISTANCES,
        "windows": WINDOWS,
        "routing": {name: behaviour(traces) for name, traces in groups.items()},
        "sources": {name: [_named(trace) for trace in traces] for name, traces in groups.items()},
        "trainings": [training_figures(json.loads(Path(path).read_text("utf-8"))) for path in records],
    }
    result = json.loads(json.dumps(result))  # as it will be read again: keys are texts
    text = None if document is None else replaced(Path(document).read_text("utf-8"), result)
    with atomic_path(output) as part:
        part.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    if document is not None and text is not None:
        with atomic_path(document) as part:
            part.write_text(text, "utf-8")
    return dict(result)


def read_trace(path: str | Path) -> Trace:
    """A trace, or a record that convert reads as one."""
    if "meta" in read_arrays(path)[0]:
        return Trace.load(path)
    with tempfile.TemporaryDirectory() as folder:
        trace = convert_file(path, Path(folder) / "converted.npz")
    # Sequences of several records of one model are put together and need names of their own.
    names = np.array([f"{Path(path).stem}:{name}" for name in trace.sequence_id.tolist()])
    return replace(trace, sequence_id=names, source=str(path))


def _named(trace: Trace) -> dict[str, Any]:
    origin = trace.meta.get("converted") or {"file": Path(trace.source).name, "sha256": trace.sha256}
    return {"file": origin["file"], "sha256": origin["sha256"], "decode_rows": len(trace.decode_rows)}


def replaced(text: str, result: Mapping[str, Any]) -> str:
    """The document with the tables of ``result`` between its marks."""
    return between_marks(text, "comparison", tables(result))


def tables(result: Mapping[str, Any]) -> str:
    """Both tables in Markdown."""
    columns = [{"": name, **_column(found)} for name, found in result["routing"].items()]
    return _markdown(columns) + (f"\n{_training_table(result['trainings'])}" if result["trainings"] else "")


def _column(found: Mapping[str, Any]) -> dict[str, str]:
    """One model's cells of the first table, by their rows' headings."""
    spread = found["distinct_by_popularity"]
    return {
        "layers x experts, K": f"{found['layers']} x {found['experts']}, {found['top_k']}",
        "decode rows / domains": f"{found['decode_rows']:,} / {found['domains']}",
        "entropy of use (1: even)": _cell(found["entropy"]),
        "top quarter of experts takes": _cell(found["top_quarter"]),
        **{f"reuse, {d} back": _cell(value) for d, value in found["reuse"].items()},
        "reuse at random (K / E)": _cell(found["top_k"] / found["experts"]),
        "reuse by popularity alone": _cell(found["reuse_by_popularity"]),
        **{
            f"distinct in {w} rows (by popularity)": f"{_cell(value)} ({_cell(spread[w])})"
            for w, value in found["distinct"].items()
        },
        **{f"recall by {name} table": _cell((found["tables"] or {}).get(name)) for name in ("own", "pooled", "other")},
    }


def _training_table(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Trained models side by side."""
    spreads = {"entropy_bits": "entropy of a layer, bits", "adjacent_cosine": "adjacent-layer cosine"}
    return _markdown(
        [
            {
                "trained as, with seed": f"{t['model']}, {t['seed']}",
                "tokens / final loss": f"{t['tokens']:,} / {t['final_loss']:.3f}",
                **{what: f"{np.mean(list(t[key].values())):.3f}" for key, what in _RECALLS.items()},
                **{
                    f"{domain}: own / other domains": f"{own:.3f} / {t['cross_domain_recall'][domain]:.3f}"
                    for domain, own in t["in_domain_recall"].items()
                },
                **{
                    f"{what}: min / mean / max": " / ".join(f"{t[key][part]:.2f}" for part in ("min", "mean", "max"))
                    for key, what in spreads.items()
                },
            }
            for t in trainings
        ]
    )


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _markdown(columns: Sequence[Mapping[str, str]]) -> str:
    """Cells by the headings of their rows, which the first column names; the first row is the table's head."""
    head, *body = [[row, *(column[row] for column in columns)] for row in columns[0]]
    return markdown(head, body)
