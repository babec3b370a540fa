"""Whose routing an answer goes by: the person's own trace, a bundled one of the model, or one that is made to fit.

Routes of a model of another shape are made from those of a bundled trace, so that what matters to a cache stays as far
as it can: a token that repeats an expert there repeats one here. That is no measurement of the model asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.run.scene import LoadedTraces, bundled_traces
from traces.models.known import builtin
from traces.models.spec import ModelSpec
from traces.schema import OPTIONAL
from traces.trace import Trace

_ASIDE = 7
SEQUENCES = 8
"""Of a trace, the first so many of its evaluation sequences are replayed."""


def nearest(model: ModelSpec) -> Path:
    """The bundled trace of the model, or of the model whose experts a layer and a token are nearest to its own."""
    return min(bundled_traces(), key=lambda path: (_distance(path, model), not path.stem.endswith("mixed"), path.name))


def _distance(path: Path, model: ModelSpec) -> float:
    name = str(Trace.load_meta(path)["model"]["name"])
    other = builtin(name)
    if name == model.name:
        return -1.0
    if other is None or other.encoder_layers:
        return math.inf
    return abs(math.log(other.experts / model.experts)) + abs(math.log(other.top_k / model.top_k))


def routing(path: Path, model: ModelSpec, sequences: int = SEQUENCES) -> tuple[LoadedTraces, str]:
    """The first evaluation sequences of the trace at ``path``, made to fit ``model``, and how, in words.

    Raises InputError for a file that is no trace.
    """
    whole = Trace.load(path)
    fits = whole.n_experts == model.experts and tuple(whole.layers.tolist()) == model.moe_layers
    fits = fits and whole.top_k == model.top_k
    own = str(whole.meta["model"]["name"])
    made = whole if fits and own == model.name else fitted(whole, model)
    split = "eval" if (made.split == "eval").any() else "all"
    chosen = made.select(split)
    chosen = chosen.take(np.arange(min(sequences, chosen.n_sequences)))
    profile = (made.select("profile"),) if (made.split == "profile").any() else ()
    if own == model.name and fits:
        how = f"routing of {own}, {path.name}"
    elif fits:
        how = f"routing of {own}, {path.name}, which has as many layers, experts and experts a token"
    else:
        how = f"no routing of {model.name} is at hand: made to its shape from that of {own}, {path.name}"
    return LoadedTraces(made, chosen, profile, ()), how


def fitted(trace: Trace, model: ModelSpec) -> Trace:
    """``trace`` with routes of the shape of ``model``, and nothing else that a layer has.

    Its layers are spread over the model's. With fewer experts they are folded together; with more each stands for
    several, of which the token's first expert of the next layer chooses one. A token's further experts are those of the
    following layers, moved aside, and at last neighbours of those it has.
    """
    layers, experts, top_k = len(model.moe_layers), model.experts, model.top_k
    source, rows = trace.experts.astype(np.int64), np.arange(trace.n_rows)
    several = -(-experts // trace.n_experts)
    routes = np.full((trace.n_rows, layers, top_k), -1, np.int64)
    for layer in range(layers):
        begin = layer * trace.n_layers // layers
        following = [(begin + step) % trace.n_layers for step in range(trace.n_layers)]
        one_of = np.maximum(source[:, following[1 % len(following)], 0], 0) % several
        taken, count = np.zeros((trace.n_rows, experts), bool), np.zeros(trace.n_rows, np.int64)
        open_rows = (source[:, begin] >= 0).any(axis=1)
        for expert, aside in _candidates(source, following, experts):
            wanted = (expert * several + one_of + aside) % experts
            new = rows[open_rows & (expert >= 0) & ~taken[rows, wanted]]
            routes[new, layer, count[new]] = wanted[new]
            taken[new, wanted[new]] = True
            count[new] += 1
            open_rows &= count < top_k
            if not open_rows.any():
                break
    meta = {key: value for key, value in trace.meta.items() if key not in ("embedding", "predictor", "captured")}
    meta["model"] = {"name": model.name, "experts": experts, "top_k": top_k}
    bare: dict[str, Any] = dict.fromkeys(OPTIONAL)
    layers_there = np.array(model.moe_layers, np.int32)
    return replace(trace, meta=meta, layers=layers_there, experts=routes.astype(np.int16), **bare)


def _candidates(source: np.ndarray, following: Sequence[int], experts: int) -> Iterator[tuple[np.ndarray, int]]:
    """Experts (T,) that tokens may take at a layer, the likeliest first, and by how much they are moved aside."""
    for step, layer in enumerate(following):
        for place in range(source.shape[2]):
            yield source[:, layer, place], _ASIDE * step
    for aside in range(1, experts):
        for place in range(source.shape[2]):
            yield source[:, following[0], place], aside
