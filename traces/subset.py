"""Smaller traces out of larger ones, labelled as such."""

import dataclasses

import numpy as np

from traces.errors import InputError
from traces.trace import DECODE, Trace


def first_sequences(trace: Trace, profile_tokens: int, eval_tokens: int, eval_sequences: int) -> Trace:
    """The first sequences of each domain and split, whole, until they hold the decode tokens (and sequences) wanted.

    ``meta["subset"]`` says of what. Raises InputError if the trace holds less than that.
    """
    tokens = np.bincount(trace.sequence[trace.phase == DECODE], minlength=trace.n_sequences)
    keep = np.zeros(trace.n_sequences, bool)
    for split, want, least in (("profile", profile_tokens, 1), ("eval", eval_tokens, eval_sequences)):
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
    notes = [f"the full capture: {note}" for note in trace.meta.get("notes", [])]
    meta = {**trace.meta, "subset": words, "notes": notes}
    return dataclasses.replace(trace.keep(keep), meta=meta, source="", sha256="")
