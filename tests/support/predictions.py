"""Predicted paths of a chosen accuracy, for traces that no predictor has been trained on."""

import dataclasses

import numpy as np

from traces.trace import Trace, validate


def with_predictions(trace: Trace, right: float, seed: int = 0) -> Trace:
    """``trace`` with a ranking of 2 K experts for each route of its evaluation rows.

    Each of a token's experts is among the first K with the chance ``right``, and nowhere else.
    """
    rng = np.random.default_rng(seed)
    rows, layers, top_k = trace.experts.shape
    most = min(2 * top_k, trace.n_experts)
    taken = np.zeros((rows, layers, trace.n_experts + 1), bool)
    np.put_along_axis(taken, trace.experts.astype(np.int64), True, axis=2)
    taken = taken[:, :, :-1]
    drawn = rng.random(taken.shape)
    known = taken & (rng.random(taken.shape) < right)
    order = np.argsort(np.where(known, drawn - 2, np.where(taken, drawn + 2, drawn)), axis=2)[:, :, :most]
    told = trace.row_split("eval")[:, None, None]
    probs = np.sort(rng.integers(1, 256, order.shape), axis=2)[:, :, ::-1]
    made = dataclasses.replace(
        trace,
        predicted_experts=np.where(told, order, -1).astype(np.int16),
        predicted_probs=np.where(told, probs, 0).astype(np.uint8),
        meta=trace.meta | {"predictor": {"sha256": "1" * 64, "parameters": 1000}},
    )
    validate(made)
    return made
