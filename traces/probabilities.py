"""Router probabilities in fewer bytes: only the largest of each route, with the experts they belong to."""

import dataclasses

import numpy as np

from ground.errors import InputError
from traces.trace import Trace

_ROWS = 1024  # rows sorted at once


def largest(probs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` largest of probabilities (T, L, E) uint8 and their experts, both (T, L, count), largest first.

    Equal ones come by expert number. ``count`` lies in 1..E.
    """
    values = np.empty((*probs.shape[:2], count), np.uint8)
    experts = np.empty(values.shape, np.int16)
    for start in range(0, len(probs), _ROWS):
        block = slice(start, start + _ROWS)
        experts[block] = np.argsort(~probs[block], axis=2, kind="stable")[:, :, :count]
        values[block] = np.take_along_axis(probs[block], experts[block].astype(np.intp), axis=2)
    return values, experts


def keep_largest(trace: Trace, count: int) -> Trace:
    """The trace with at most ``count`` probabilities a route, the largest; unchanged if it holds no more.

    Raises InputError if ``count`` is below 1.
    """
    if count < 1:
        raise InputError(f"probabilities of a route: {count}, expected at least 1")
    if trace.probs is None or trace.probs.shape[2] <= count:
        return trace
    if trace.prob_experts is None:
        values, experts = largest(trace.probs, count)
    else:
        values, place = largest(trace.probs, count)
        experts = np.take_along_axis(trace.prob_experts, place.astype(np.intp), axis=2)
    return dataclasses.replace(trace, probs=values, prob_experts=experts)


def weights_of(trace: Trace) -> np.ndarray | None:
    """How much each expert of a route counts (T, L, K) float32: its gate, else its router's probability; or None."""
    if trace.gates is not None:
        return trace.gates.astype(np.float32)
    if trace.probs is None:
        return None
    if trace.prob_experts is None:
        found = np.take_along_axis(trace.probs, np.maximum(trace.experts, 0).astype(np.intp), axis=2)
    else:
        same = trace.experts[..., None] == trace.prob_experts[:, :, None]
        found = np.where(same, trace.probs[:, :, None], 0).max(axis=3)
    return np.where(trace.experts >= 0, found, 0).astype(np.float32) / np.float32(255)
