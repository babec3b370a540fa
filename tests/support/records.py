"""Routing records as other tools write them."""

import numpy as np

from traces.trace import Trace


def routes(rows: int, layers: int = 2, k: int = 2, experts: int = 8, seed: int = 0) -> np.ndarray:
    """(rows, layers, k) random routes of distinct ids, none of them all zero."""
    return np.random.default_rng(seed).random((rows, layers, experts)).argsort(axis=2)[:, :, :k].astype(np.int16)


def notes(trace: Trace) -> str:
    return "\n".join(trace.meta["notes"])
