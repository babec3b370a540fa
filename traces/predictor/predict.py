"""Write what a path predictor says of a trace's evaluation rows into the trace."""

import dataclasses
from typing import Any

import numpy as np
import torch

from ground.errors import InputError
from ground.progress import Watch
from traces.predictor.network import StoredPredictor, path_batch
from traces.predictor.sequences import path_sequences
from traces.predictor.train import checkpoint_of
from traces.trace import Trace

KNOWN = (
    "when the sequence's prompt and its tokens up to the row's own are known: at the beginning of the row's step, "
    "before its first layer"
)
"""At which point of a run a row's predictions are known."""


def most_kept(top_k: int, experts: int) -> int:
    """How many experts of a route are kept unless one says otherwise: twice as many as a token takes, at least 8."""
    return min(experts, max(8, 2 * top_k))


def predicted(trace: Trace, prompts: Trace, stored: StoredPredictor, most: int | None = None, batch: int = 64) -> Trace:
    """The trace with ``predicted_experts`` and ``predicted_probs`` of its evaluation rows, ``most`` a route.

    ``meta.predictor`` says whose they are. Raises InputError if the predictor is of another model, or the trace has no
    evaluation rows.
    """
    shape, most = stored.net.shape, most or most_kept(trace.top_k, trace.n_experts)
    _check_model(trace, stored)
    if not 1 <= most <= trace.n_experts:
        raise InputError(f"{most} predicted experts a route; expected 1 to {trace.n_experts}")
    sequences = path_sequences(trace, prompts, "eval")
    if not sequences:
        raise InputError(f"{trace.source or 'trace'}: no evaluation split; only its rows are predicted")
    experts = np.full((trace.n_rows, trace.n_layers, most), -1, np.int16)
    probs = np.zeros(experts.shape, np.uint8)
    device = next(stored.net.parameters()).device
    ordered = sorted(sequences, key=lambda one: len(one.tokens))
    with Watch("predictions") as watch, torch.inference_mode():
        for start in range(0, len(ordered), batch):
            together = ordered[start : start + batch]
            one = path_batch(together, shape.vocabulary, device)
            found = stored.net(one.prompt, one.prompt_valid, one.tokens).float().sigmoid().topk(most, dim=-1)
            values, ids = (255 * found.values).round().byte().cpu().numpy(), found.indices.short().cpu().numpy()
            for row, sequence in enumerate(together):
                rows = slice(sequence.start, sequence.start + len(sequence.tokens))
                experts[rows], probs[rows] = ids[row, : len(sequence.tokens)], values[row, : len(sequence.tokens)]
            watch.at(min(1.0, (start + batch) / len(ordered)))
    return dataclasses.replace(
        trace, predicted_experts=experts, predicted_probs=probs,
        meta=trace.meta | {"predictor": _about(stored, most)}, source="", sha256="",
    )  # fmt: skip


def _check_model(trace: Trace, stored: StoredPredictor) -> None:
    """Raise InputError unless the predictor learnt the routes of the very model that the trace is of."""
    record = stored.record
    for what, a, b in (
        ("model", record.get("model"), {k: trace.meta["model"].get(k, "") for k in ("name", "part")}),
        ("layers", record.get("layers"), trace.layers.tolist()),
        ("experts", stored.net.shape.experts, trace.n_experts),
        ("checkpoint", record.get("checkpoint_sha256"), checkpoint_of(trace)),
    ):
        if a != b:
            raise InputError(
                f"{trace.source or 'trace'}: its {what} is {b!s:.80}, the predictor's is {a!s:.80}; expected one "
                f"of this very model"
            )


def _about(stored: StoredPredictor, most: int) -> dict[str, Any]:
    """What the meta of a trace says of its predictions."""
    record = stored.record
    return {
        "sha256": stored.sha256,
        "bytes": stored.size,
        "parameters": record["parameters"],
        "reads": "the prompt (encoder) and the tokens (decoder); no embeddings, no routes",
        "known": KNOWN,
        "probabilities": "of each expert by itself x 255; those of a route need not sum to 255",
        "experts_kept": most,
        "trained_on": record["trained_on"],
    }
