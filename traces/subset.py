"""Smaller traces out of larger ones, labelled as such."""

import dataclasses
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.probabilities import keep_largest
from traces.schema import DECODE
from traces.trace import Trace


def first_sequences(trace: Trace, profile_tokens: int, eval_tokens: int, eval_sequences: int) -> Trace:
    """The first sequences of each domain and split, whole, until they hold the decode tokens (and sequences) wanted.

    Of a split of which no token is wanted nothing stays.
    ``meta["subset"]`` says of what. Raises InputError if the trace holds less than that.
    """
    tokens = np.bincount(trace.sequence[trace.phase == DECODE], minlength=trace.n_sequences)
    keep = np.zeros(trace.n_sequences, bool)
    for split, want, least in (("profile", profile_tokens, 1), ("eval", eval_tokens, eval_sequences)):
        if not want:
            continue
        for domain in np.unique(trace.domain):
            members = np.flatnonzero((trace.split == split) & (trace.domain == domain))
            held = np.cumsum(tokens[members])
            if len(members) < least or not len(held) or held[-1] < want:
                has = held[-1] if len(held) else 0
                raise InputError(
                    f"{trace.source or 'trace'}: {domain} ({split}) has {has} decode tokens in {len(members)} "
                    f"sequences; wanted {want} in at least {least}"
                )
            keep[members[: max(least, int(np.searchsorted(held, want)) + 1)]] = True
    words = {
        "of_sha256": trace.sha256,
        "sequences": f"{int(keep.sum())} of {trace.n_sequences}",
        "which": f"the first of each domain and split, to {profile_tokens} profile and {eval_tokens} evaluation tokens",
    }
    part = "subset" in trace.meta  # its notes say already of what they are
    notes = [note if part else f"the full capture: {note}" for note in trace.meta.get("notes", [])]
    meta = {**trace.meta, "subset": words, "notes": notes}
    return dataclasses.replace(trace.keep(keep), meta=meta, source="", sha256="")


def without_text(trace: Trace) -> Trace:
    """Without token ids and embeddings, from which text could be read: routes, probabilities and predictions alone.

    ``meta["notes"]`` says so.
    """
    note = "left out: token ids and embeddings, since the text may not be passed on"
    meta = {key: value for key, value in trace.meta.items() if key != "embedding"}
    return dataclasses.replace(
        trace, token=np.full_like(trace.token, -1), embeddings=None, embedding_scale=None, prefill_embeddings=None,
        meta=meta | {"notes": [*trace.meta.get("notes", []), note]},
    )  # fmt: skip


def thinned(trace: Trace, probs: int) -> Trace:
    """Without what few policies read: gates, and the look-ahead and probabilities of prefill rows.

    Of decode rows the ``probs`` largest probabilities of each route stay, of predictions the first 2 K, at least 4,
    with probabilities in steps of 8 / 255. ``meta["notes"]`` says so. In prefill rows the look-ahead is -1 and
    probabilities are 0, as where a trace stores none. Raises InputError if ``probs`` is below 1.
    """
    trace = dataclasses.replace(keep_largest(trace, probs), gates=None)
    arrays: dict[str, Any] = {}
    rows, left_out = trace.prefill_rows, ["gates"]
    if trace.lookahead is not None:
        arrays["lookahead"] = trace.lookahead.copy()
        arrays["lookahead"][rows] = -1
        left_out.append("look-ahead of prefill rows")
    if trace.probs is not None:
        arrays["probs"] = trace.probs.copy()
        arrays["probs"][rows] = 0
        if trace.prob_experts is not None:
            arrays["prob_experts"] = trace.prob_experts.copy()
            arrays["prob_experts"][rows] = np.arange(trace.prob_experts.shape[2], dtype=np.int16)
        left_out.append(f"router probabilities but the {probs} largest of decode rows")
    most = max(2 * trace.top_k, 4)
    if trace.predicted_experts is not None and trace.predicted_probs is not None:
        arrays["predicted_experts"] = trace.predicted_experts[:, :, :most].copy()
        arrays["predicted_probs"] = trace.predicted_probs[:, :, :most] // 8 * 8
        left_out.append(f"predictions but the {most} first of a route, whose probabilities are in steps of 8 / 255")
    note = f"left out: {', '.join(left_out)}"
    return dataclasses.replace(trace, **arrays, meta=trace.meta | {"notes": [*trace.meta.get("notes", []), note]})
