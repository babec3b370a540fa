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
