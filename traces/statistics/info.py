"""What a trace holds and how its routing behaves, at a glance."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ground.output import written
from ground.text import as_is
from traces.layer_numbers import listed
from traces.plausibility import doubts
from traces.schema import DECODE, PREDICTED, PREFILL
from traces.statistics.against import verdicts
from traces.statistics.routing import show_statistics
from traces.statistics.separation import separation
from traces.statistics.usage import entropy, expert_counts, reuse, shares
from traces.trace import Trace

_OPTIONAL = ("gates", "probs", "prob_experts", "embeddings", "prefill_embeddings", "lookahead", *PREDICTED)
_BESIDE = ("prob_experts", "predicted_probs")  # belong to another array


def describe(trace: Trace) -> dict[str, Any]:
    """The facts of one trace as strict JSON; a figure that is not defined (no decode rows, say) is None.

    ``entropy_bits`` is the Shannon entropy of how often each expert of a layer is used, over all rows: minimum, mean
    and maximum over layers, with log2(E), which uniform routing reaches. ``reused`` is the share of a decode token's
    experts that the previous decode token of its sequence took in the same layer, mean over layers.
    ``distinct_experts`` counts the (layer, expert) pairs used at least once. ``published`` says in a line how the
    routing compares with what is published of the model, None where nothing is.
    """
    counts = expert_counts(trace.experts, trace.n_experts)
    domains: dict[str, dict[str, int]] = {}
    for (domain, split), number in Counter(zip(trace.domain.tolist(), trace.split.tolist(), strict=True)).items():
        domains.setdefault(domain, {"profile": 0, "eval": 0})[split] = number
    lengths = np.diff(trace.offsets)
    # Of layers with any use. Adding 0 turns -0.0, the entropy of a single expert, into 0.0.
    bits = entropy(shares(counts[counts.any(axis=1)])) + 0.0
    meta = trace.meta
    return {
        "file": trace.source,
        "sha256": trace.sha256,
        "model": meta["model"]["name"],
        "layers": trace.n_layers,
        "layer_numbers": trace.layers.tolist(),
        "experts": trace.n_experts,
        "top_k": trace.top_k,
        "expert_bytes": meta["model"].get("expert_bytes"),
        "rows": {
            "prefill": int((trace.phase == PREFILL).sum()),
            "decode": int((trace.phase == DECODE).sum()),
            "all": trace.n_rows,
        },
        "sequences": trace.n_sequences,
        "rows_a_sequence": {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())},
        "domains": domains,
        "arrays": {n: None if (a := getattr(trace, n)) is None else list(a.shape) for n in _OPTIONAL},
        "activations": int(counts.sum()),
        "none_ids": int(trace.experts.size - counts.sum()),
        "entropy_bits": {
            "min": _number(bits, np.min), "mean": _number(bits, np.mean), "max": _number(bits, np.max),
            "uniform": float(np.log2(trace.n_experts)),
        },
        "reused": _number(reuse(trace), np.mean),
        "distinct_experts": {"used": int((counts > 0).sum()), "of": int(counts.size)},
        **{key: meta.get(key) for key in ("captured", "text", "decoding", "software", "hardware", "embedding")},
        "converted": meta.get("converted"),
        "notes": list(meta.get("notes", [])),
        "published": verdicts(trace),
        "doubts": doubts(trace),
    }  # fmt: skip


def _number(values: np.ndarray, reduce: Any) -> float | None:
    defined = values[~np.isnan(values)]
    return float(reduce(defined)) if len(defined) else None


def show(paths: Sequence[str | Path], *, json_to: str | None = None) -> None:
    """Print a table of each trace, and how well the domains of all of them tell a token's experts.

    With ``json_to`` also write a JSON list of :func:`describe` with ``routing``, :func:`separation.separation` of all
    traces together (``-``: print only it). Raises InputError for the first trace that is not valid, before anything is
    printed or written.
    """
    traces = [Trace.load(path) for path in paths]
    together = separation(traces)
    facts = [describe(trace) | {"routing": together} for trace in traces]
    with written(json_to, indent=2, ensure_ascii=False) as write:
        write(facts)
    if json_to == "-":
        return
    console = Console(highlight=False)
    for fact in facts:
        console.print(as_is(fact["file"]), style="underline", soft_wrap=True)
        console.print(_table(fact))
        if len(fact["domains"]) > 1:
            console.print(_domain_table(fact["domains"]))
    if isinstance(together, str):
        console.print(as_is(f"recall and similarity: {together}"))
    else:
        console.print("from the embeddings as stored:")
        show_statistics(together, console)


def _table(fact: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows, lengths, entropy = fact["rows"], fact["rows_a_sequence"], fact["entropy_bits"]
    splits = {s: sum(d[s] for d in fact["domains"].values()) for s in ("profile", "eval")}
    sizes, numbers, distinct = fact["expert_bytes"], fact["layer_numbers"], fact["distinct_experts"]
    lines = {
        "model": f"{fact['model']}: {fact['layers']} routed layers ({listed(numbers)}) x {fact['experts']} experts, "
        f"top-{fact['top_k']}",
        "expert size": None if sizes is None else _sizes(sizes),
        "rows": f"{rows['all']:,}: {rows['prefill']:,} prefill, {rows['decode']:,} decode",
        "sequences": f"{fact['sequences']:,}: {splits['profile']:,} profile, {splits['eval']:,} eval"
        + (f"; {lengths['min']:,} to {lengths['max']:,} rows, mean {lengths['mean']:,.1f}" * (fact["sequences"] > 1)),
        "domains": f"{len(fact['domains'])}" if len(fact["domains"]) > 1 else next(iter(fact["domains"])),
        "also holds": ", ".join(f"{n} {tuple(s)}" for n, s in fact["arrays"].items() if s is not None) or "nothing",
        "lacks": ", ".join(n for n, s in fact["arrays"].items() if s is None and n not in _BESIDE) or None,
        "activations": f"{fact['activations']:,}" + (f" ({fact['none_ids']:,} ids none)" if fact["none_ids"] else ""),
        "entropy, all rows": None
        if entropy["mean"] is None
        else f"{entropy['min']:.2f} / {entropy['mean']:.2f} / {entropy['max']:.2f} bits (min / mean / max over layers; "
        f"uniform {entropy['uniform']:.2f})",
        "reused": "not defined (no two decode rows in a row)"
        if fact["reused"] is None
        else f"{fact['reused']:.1%} of a decode token's experts were the previous token's (mean over layers)",
        "distinct experts": f"{distinct['used']:,} of {distinct['of']:,} (layer, expert) pairs",
        "published figures": fact["published"],
    }
    for key in ("captured", "text", "decoding", "software", "hardware", "embedding", "converted"):
        lines[key] = _words(fact[key])
    lines["sha256"] = fact["sha256"]
    for name, line in lines.items():
        if line:
            table.add_row(name, as_is(line))
    for note in fact["notes"]:
        table.add_row("note", as_is(note))
    for doubt in fact["doubts"]:
        table.add_row("doubtful", as_is(doubt))
    return table


def _domain_table(domains: dict[str, dict[str, int]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("domain")
    table.add_column("profile", justify="right")
    table.add_column("eval", justify="right")
    for domain, splits in domains.items():
        table.add_row(as_is(domain), str(splits["profile"]), str(splits["eval"]))
    return table


def _sizes(sizes: list[int]) -> str:
    low, high = min(sizes) / 2**20, max(sizes) / 2**20
    return f"{low:.2f} MiB" if low == high else f"{low:.2f} to {high:.2f} MiB"


def _words(value: Any) -> str | None:
    """One line for a JSON value of the meta."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(v)}" for key, v in value.items()) or None
    if isinstance(value, list):
        return ", ".join(str(_words(v)) for v in value)
    return None if value is None else str(value)
