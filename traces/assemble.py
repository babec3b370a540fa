"""Build a trace from routes laid end to end and a few facts about each sequence."""

from typing import Any

import numpy as np

from ground.errors import InputError
from traces.schema import DECODE, PREFILL
from traces.trace import Trace, validate


def split_in_order(domain: np.ndarray) -> np.ndarray:
    """(S,) split: of each domain's sequences, in order, the first 70 % profile, the rest eval.

    Rounded to the nearest with one at least on each side; a lone sequence is eval.
    """
    split = np.full(len(domain), "profile", "<U7")
    for name in np.unique(domain):
        mine = np.flatnonzero(domain == name)
        profile = min(max((7 * len(mine) + 5) // 10, 1), len(mine) - 1)
        split[mine[profile:]] = "eval"
    return split


def lengths_of(offsets: np.ndarray, rows: int) -> np.ndarray:
    """(S,) int64 lengths of ``offsets`` (S+1,): from 0, increasing, to ``rows``; else raises InputError."""
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype.kind not in "iu":
        raise InputError(f"array 'offsets': {offsets.dtype} of shape {offsets.shape}, expected S + 1 integers")
    bounds = offsets.astype(np.int64)
    if bounds[0] != 0:
        raise InputError(f"array 'offsets', entry 0: {bounds[0]}, expected 0")
    falling = np.flatnonzero(np.diff(bounds) <= 0)
    if len(falling):
        i = int(falling[0])
        what = f"sequence {i} has no rows (a prompt of 0 tokens)" if bounds[i + 1] == bounds[i] else "not increasing"
        raise InputError(f"array 'offsets', entry {i + 1}: {bounds[i + 1]} after {bounds[i]}, {what}")
    if bounds[-1] != rows:
        raise InputError(f"array 'offsets', entry {len(bounds) - 1}: {bounds[-1]}, expected {rows}, the number of rows")
    return np.diff(bounds)


def assemble(
    *, meta: dict[str, Any], layers: list[int], experts: np.ndarray, lengths: np.ndarray, domain: np.ndarray,
    sequence_id: np.ndarray, prefill: np.ndarray | None = None, start: np.ndarray | None = None,
    split: np.ndarray | None = None, token: np.ndarray | None = None, gates: np.ndarray | None = None,
    probs: np.ndarray | None = None,
) -> Trace:  # fmt: skip
    """A valid trace of ``experts`` (T, L, K) int16, the rows of S sequences one after another.

    ``lengths`` (S,) rows of each, ``prefill`` (S,) how many of them are prefill (default 0), ``start`` (S,) position of
    each one's first row (default 0), ``split`` default :func:`split_in_order`. Raises InputError if a rule is broken.
    """
    count, rows = len(lengths), len(experts)
    sequence = np.repeat(np.arange(count, dtype=np.int32), lengths)
    within = np.arange(rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = np.zeros(count, np.int64) if start is None else start
    before = np.zeros(count, np.int64) if prefill is None else prefill
    trace = Trace(
        meta=meta,
        layers=np.asarray(layers, np.int32),
        experts=np.ascontiguousarray(experts, np.int16),
        token=np.full(rows, -1, np.int32) if token is None else np.asarray(token, np.int32),
        sequence=sequence,
        position=(within + first[sequence]).astype(np.int32),
        phase=np.where(within < before[sequence], PREFILL, DECODE).astype(np.uint8),
        domain=np.asarray(domain, str),
        split=split_in_order(domain) if split is None else split,
        sequence_id=np.asarray(sequence_id, str),
        gates=None if gates is None else np.ascontiguousarray(gates, np.float16),
        probs=probs,
    )
    validate(trace)
    return trace
