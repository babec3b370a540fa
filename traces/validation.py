"""What makes a trace valid; every rule names the array, the row and the value that breaks it."""

import json
from itertools import combinations
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.text import check_name
from traces.arrays import at, named, refuse
from traces.schema import DECODE, DTYPES, PREDICTED, PREFILL, SPLITS, TraceArrays

META_OBJECTS = ("captured", "text", "decoding", "software", "embedding", "subset", "converted", "predictor")
# Enough for any model's config; functions that walk a trace's meta may recurse.
MOST_NESTED = 32

# Rows compared at once: bounds the memory of a check, whatever the length of the trace.
_BLOCK = 8192
# Comparing all pairs of slots beats sorting up to about this many.
_PAIRS = 12


def validate(trace: TraceArrays) -> None:
    """Raise InputError for the first rule that ``trace`` breaks: one line with file, array, row and value.

    Time is linear in the trace; memory beyond it is a block of 8192 rows plus one flag a row.
    """
    with named(trace.source or "trace"):
        check_meta(trace.meta)
        _check_layers(trace)
        _check_sequences(trace)
        _check_rows(trace)
        _check_routes("experts", trace.experts, trace)
        _check_gates(trace)
        _check_probs(trace)
        _check_embeddings(trace)
        _check_lookahead(trace)
        _check_predictions(trace)


def check_meta(meta: Any) -> None:
    """Raise InputError unless ``meta`` is strict JSON of schema 1 that names the model, its experts and top_k.

    The fields of META_OBJECTS are objects where they are there, and ``notes`` is a list of texts.
    """
    if not isinstance(meta, dict):
        raise InputError(f"meta: {type(meta).__name__}, expected a JSON object")
    _check_json(meta)
    if not _is_whole(meta.get("schema"), 1, 1):
        raise InputError(f"meta.schema: {meta.get('schema')!r:.60}, this version reads the number 1")
    model = meta.get("model")
    if not isinstance(model, dict):
        raise InputError(f"meta.model: {model!r:.60}, expected an object with name, experts and top_k")
    if not isinstance(model.get("name"), str):
        raise InputError(f"meta.model.name: {model.get('name')!r:.60}, expected a model's name")
    check_name(model["name"], "meta.model.name")
    for field, most in (("experts", 2**15), ("top_k", 2**15)):
        if not _is_whole(model.get(field), 1, most):
            raise InputError(f"meta.model.{field}: {model.get(field)!r:.60}, expected a whole number from 1 to {most}")
    if model["top_k"] > model["experts"]:
        raise InputError(f"meta.model.top_k: {model['top_k']} experts of {model['experts']}, expected at most all")
    for about, field, kind, wanted in (
        *((meta, field, dict, "an object") for field in META_OBJECTS), (meta, "notes", list, "a list of texts"),
        (model, "config", dict, "an object"), (model, "part", str, "a text"),
        (meta.get("embedding", {}), "basis_sha256", str, "a text"),
        (meta.get("predictor", {}), "sha256", str, "a text"),
    ):  # fmt: skip
        if field in about and not isinstance(about[field], kind):
            raise InputError(f"meta, field {field!r}: {about[field]!r:.60}, expected {wanted}")
    for i, note in enumerate(meta.get("notes", [])):
        if not isinstance(note, str):
            raise InputError(f"meta.notes, entry {i}: {note!r:.60}, expected a text")


def _check_json(meta: dict[str, Any]) -> None:
    """Raise InputError unless ``meta`` can be written as JSON in UTF-8 and is nested no deeper than MOST_NESTED."""
    level: list[Any] = [meta]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list | tuple)
        ]
    if level:
        raise InputError(f"meta: nested too deep, expected at most {MOST_NESTED} levels")
    try:
        json.dumps(meta, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"meta: not strict JSON: {error}") from None


def _is_whole(value: Any, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check_array(name: str, array: Any, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """Raise InputError unless ``array`` has this dtype and shape (None: any length)."""
    if not isinstance(array, np.ndarray):
        raise InputError(f"array {name!r}: {type(array).__name__}, expected a NumPy array")
    if (array.dtype.kind != "U") if dtype is str else (array.dtype != np.dtype(dtype)):
        wanted = "text" if dtype is str else np.dtype(dtype)
        raise InputError(f"array {name!r}: dtype {array.dtype}, expected {wanted}")
    if array.ndim != len(shape) or any(w is not None and w != n for n, w in zip(array.shape, shape, strict=True)):
        wanted_shape = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
        raise InputError(f"array {name!r}: shape {array.shape}, expected {wanted_shape}")


def _check_layers(trace: TraceArrays) -> None:
    layers = trace.layers
    _check_array("layers", layers, np.int32, (None,))
    if not len(layers):
        raise InputError("array 'layers': no routed layer, expected at least one")
    if layers[0] < 0:
        raise InputError(f"array 'layers', entry 0: {layers[0]}, expected a layer number from 0")
    refuse(
        np.diff(layers.astype(np.int64)) <= 0,
        lambda i: f"array 'layers', entry {i + 1}: {layers[i + 1]} after {layers[i]}, expected increasing",
    )
    sizes = trace.meta["model"].get("expert_bytes")
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != len(layers)):
        raise InputError(f"meta.model.expert_bytes: {sizes!r:.80}, expected {len(layers)}, one a routed layer")
    for i, size in enumerate(sizes or ()):
        if not _is_whole(size, 1):
            raise InputError(f"meta.model.expert_bytes, entry {i}: {size!r}, expected a whole number of bytes above 0")


def _check_sequences(trace: TraceArrays) -> None:
    _check_array("sequence_id", trace.sequence_id, str, (None,))
    count = len(trace.sequence_id)
    if not count:
        raise InputError("array 'sequence_id': no sequence, expected at least one")
    _check_array("domain", trace.domain, str, (count,))
    _check_array("split", trace.split, str, (count,))
    for name, texts in (("sequence_id", trace.sequence_id), ("domain", trace.domain)):
        for i, text in enumerate(texts.tolist()):
            check_name(text, f"array {name!r}, sequence {i}")
    refuse(
        ~np.isin(trace.split, SPLITS),
        lambda i: f"array 'split', sequence {i}: {str(trace.split[i])!r}, expected profile or eval",
    )
    _, where, counts = np.unique(trace.sequence_id, return_index=True, return_counts=True)
    if (counts > 1).any():
        i = int(where[counts > 1].min())
        raise InputError(f"array 'sequence_id', sequence {i}: {str(trace.sequence_id[i])!r} is there twice")


def _check_rows(trace: TraceArrays) -> None:
    """Rows ordered by (sequence, position), contiguous, prefill before decode, none missing."""
    sequence, position, phase = trace.sequence, trace.position, trace.phase
    _check_array("sequence", sequence, np.int32, (None,))
    rows, count = len(sequence), len(trace.sequence_id)
    if not rows:
        raise InputError("array 'sequence': no rows, expected at least one token")
    for name, array in (("position", position), ("phase", phase), ("token", trace.token)):
        _check_array(name, array, DTYPES[name], (rows,))
    for name, array, low, high in (
        ("sequence", sequence, 0, count - 1), ("position", position, 0, 2**31 - 1),
        ("phase", phase, PREFILL, DECODE), ("token", trace.token, -1, 2**31 - 1),
    ):  # fmt: skip
        _check_bounds(name, array, low, high)
    step = np.diff(sequence.astype(np.int64), prepend=-1)
    together = "expected each sequence's rows together"
    refuse(step < 0, lambda i: f"array 'sequence', row {i}: {sequence[i]} after {sequence[i - 1]}, {together}")
    refuse(
        np.bincount(sequence, minlength=count) == 0,
        lambda i: f"array 'sequence': sequence {i} ({str(trace.sequence_id[i])!r}) has no rows (a prompt of 0 tokens)",
    )
    refuse(
        (step == 0) & (np.diff(position.astype(np.int64), prepend=0) != 1),
        lambda i: f"array 'position', row {i}: {position[i]} after {position[i - 1]}, expected {position[i - 1] + 1}",
    )
    refuse(
        (step == 0) & (np.diff(phase.astype(np.int8), prepend=np.int8(0)) < 0),
        lambda i: f"array 'phase', row {i}: prefill (0) after decode (1) in one sequence",
    )


def _check_bounds(name: str, array: np.ndarray, low: int, high: int) -> None:
    words = f"expected {low} to {high}"
    refuse((array < low) | (array > high), lambda i: f"array {name!r}, row {i}: {array[i]}, {words}")


def _check_routes(name: str, routes: np.ndarray, trace: TraceArrays, least: int = -1) -> None:
    """Ids of shape (T, L, any) in ``least``..E-1 and distinct within a route, -1 aside."""
    slots = None if name in ("prob_experts", "predicted_experts") else trace.meta["model"]["top_k"]
    _check_array(name, routes, np.int16, (len(trace.sequence), len(trace.layers), slots))
    check_ids(name, routes, trace.meta["model"]["experts"], least)
    check_distinct(name, routes)


def check_ids(name: str, routes: np.ndarray, experts: int, least: int = -1) -> None:
    """Raise InputError, naming row, layer, slot and value, unless ``least`` <= id < ``experts`` in (T, L, K)."""
    if routes.size and (routes.min() < least or routes.max() >= experts):
        wanted = f"{least} to {experts - 1} ({experts} experts{', -1 is none' if least else ''})"
        refuse(
            (routes < least) | (routes >= experts),
            lambda *index: f"array {name!r}{at(*index)}: expert {routes[index]}, expected {wanted}",
        )


def check_distinct(name: str, routes: np.ndarray) -> None:
    """Raise InputError, naming row and layer, if an id but -1 stands twice in a route of (T, L, K)."""

    def words(row: int, layer: int) -> str:
        return f"array {name!r}{at(start + row, layer)}: {block[row, layer].tolist()!s:.80} repeats an expert"

    for start in range(0, len(routes), _BLOCK):
        block = routes[start : start + _BLOCK]
        refuse(repeated(block), lambda *index: f"{words(*index)}, expected distinct")


def repeated(routes: np.ndarray) -> np.ndarray:
    """(rows, L) flags of the routes (rows, L, K) in which an expert stands twice."""
    slots = routes.shape[2]
    if slots > _PAIRS:
        ordered = np.sort(routes, axis=2)
        return ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=2)
    repeated = np.zeros(routes.shape[:2], bool)
    for one, other in combinations(np.ascontiguousarray(np.moveaxis(routes, 2, 0)), 2):
        repeated |= (one == other) & (one >= 0)
    return repeated


def _check_gates(trace: TraceArrays) -> None:
    if trace.gates is None:
        return
    _check_array("gates", trace.gates, np.float16, trace.experts.shape)

    def words(row: int, layer: int, slot: int) -> str:
        return f"array 'gates'{at(start + row, layer, slot)}: {gates[row, layer, slot]}, expected"

    for start in range(0, len(trace.gates), _BLOCK):
        gates, none = trace.gates[start : start + _BLOCK], trace.experts[start : start + _BLOCK] < 0
        refuse(~np.isfinite(gates), lambda *index: f"{words(*index)} a finite number")
        refuse(none & (gates != 0), lambda *index: f"{words(*index)} 0 where the expert is -1")


def _check_probs(trace: TraceArrays) -> None:
    rows, layers, experts = len(trace.sequence), len(trace.layers), trace.meta["model"]["experts"]
    if trace.prob_experts is not None:
        if trace.probs is None:
            raise InputError("array 'prob_experts': there without 'probs'")
        _check_routes("prob_experts", trace.prob_experts, trace, least=0)
        largest = trace.prob_experts.shape[2]
        if not 0 < largest < experts:
            raise InputError(f"array 'prob_experts': {largest} ids a route, expected 1 to {experts - 1}")
        _check_array("probs", trace.probs, np.uint8, trace.prob_experts.shape)
    elif trace.probs is not None:
        _check_array("probs", trace.probs, np.uint8, (rows, layers, experts))


def _check_embeddings(trace: TraceArrays) -> None:
    """Both embedding arrays share dimensions and scale; int8 alone keeps their products exact."""
    decode = int(np.count_nonzero(trace.phase == DECODE))
    levels = len(trace.layers) + 1
    dims = None
    if trace.embeddings is not None:
        _check_array("embeddings", trace.embeddings, np.int8, (decode, levels, None))
        dims = trace.embeddings.shape[2]
    if trace.prefill_embeddings is not None:
        _check_array("prefill_embeddings", trace.prefill_embeddings, np.int8, (len(trace.phase) - decode, dims))
        dims = trace.prefill_embeddings.shape[1]
    if dims is None:
        if trace.embedding_scale is not None:
            raise InputError("array 'embedding_scale': there without 'embeddings' or 'prefill_embeddings'")
        return
    if trace.embedding_scale is None:
        raise InputError("array 'embedding_scale': missing, expected with embeddings")
    _check_array("embedding_scale", trace.embedding_scale, np.float32, (levels,))
    scale = trace.embedding_scale
    refuse(
        ~(np.isfinite(scale) & (scale > 0)),
        lambda i: f"array 'embedding_scale', entry {i}: {scale[i]}, expected finite and above 0",
    )
    about = trace.meta.get("embedding", {})
    if dims == 0 or about.get("dims", dims) != dims:
        raise InputError(f"meta.embedding: {about!r:.80}, expected dims = {dims} as the arrays have")
    if trace.prefill_embeddings is not None and not _is_whole(about.get("prefill_layer"), 0, levels - 1):
        raise InputError(f"meta.embedding.prefill_layer: {about.get('prefill_layer')!r}, expected 0 to {levels - 1}")


def _check_lookahead(trace: TraceArrays) -> None:
    if trace.lookahead is None:
        return
    _check_routes("lookahead", trace.lookahead, trace)
    last, where = trace.lookahead[:, -1], "last routed layer"
    refuse(
        last != -1,
        lambda *row: f"array 'lookahead', row {row[0]}, {where}: expert {last[row]}, expected -1 (no layer follows)",
    )


def _check_predictions(trace: TraceArrays) -> None:
    """Ranked ids with falling probabilities, a whole route or none of it, and none in the profile split."""
    ids, probs = trace.predicted_experts, trace.predicted_probs
    if (ids is None) != (probs is None):
        there, missing = PREDICTED if probs is None else PREDICTED[::-1]
        raise InputError(f"array {there!r}: there without {missing!r}")
    if ids is None or probs is None:
        return
    if "sha256" not in trace.meta.get("predictor", {}):
        raise InputError("meta.predictor: no sha256; expected that of the predictor whose predictions are there")
    _check_routes("predicted_experts", ids, trace)
    if not ids.shape[2]:
        raise InputError("array 'predicted_experts': 0 ids a route, expected at least 1")
    _check_array("predicted_probs", probs, np.uint8, ids.shape)
    told = trace.row_split("eval")
    for start in range(0, len(ids), _BLOCK):
        block = slice(start, start + _BLOCK)
        _check_rankings(ids[block], probs[block], told[block], start)


def _check_rankings(ids: np.ndarray, probs: np.ndarray, told: np.ndarray, start: int) -> None:
    """The same of some rows, the first of which is ``start``; ``told`` (rows,) are those of the evaluation split."""
    none = ids < 0
    for name, bad, wanted in (
        (PREDICTED[0], (none != none[:, :, :1]).any(axis=2), "a whole ranking, or -1 alone"),
        (PREDICTED[0], ~none[:, :, 0] & ~told[:, None], "-1 in the profile split, of which the predictor learns"),
        (PREDICTED[1], (none & (probs != 0)).any(axis=2), "0 where no expert is predicted"),
        (PREDICTED[1], (probs[:, :, 1:] > probs[:, :, :-1]).any(axis=2), "the largest first"),
    ):
        values = ids if name == PREDICTED[0] else probs

        def words(row: int, layer: int, name: str = name, values: np.ndarray = values, wanted: str = wanted) -> str:
            return f"array {name!r}{at(start + row, layer)}: {values[row, layer].tolist()!s:.80}, expected {wanted}"

        refuse(np.asarray(bad), words)
