"""Turn routing records of other tools into traces.

Kinds: ``gpt-oss`` (decode routes with probabilities over the top 4), ``esft`` (DeepSeek-V2-Lite routes with weights),
``device`` (one prefill and decode run with expert sizes) and ``serving`` (what serving engines return, see serving.py).
"""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.arrays import integers, named, read_arrays, refuse, shown
from traces.assemble import assemble, lengths_of
from traces.convert.serving import SERVING_ARRAYS, from_serving
from traces.convert.shapes import Given, one_number, recognised, resolve_experts, resolve_layers, unlike_model
from traces.models.known import builtin, resolve_model
from traces.trace import Trace

__all__ = ["Given", "convert_file"]

GPT_OSS_ARRAYS = ("experts", "probs", "offsets", "dataset", "category", "prompt_len")
ESFT_ARRAYS = ("experts", "weights", "offsets")
DEVICE_ARRAYS = ("routes", "phase", "n_experts", "k", "expert_bytes")
ARRAYS = {"gpt-oss": GPT_OSS_ARRAYS, "esft": ESFT_ARRAYS, "device": DEVICE_ARRAYS, "serving": SERVING_ARRAYS}


def convert_file(path: str | Path, output: str | Path, *, kind: str | None = None, given: Given | None = None) -> Trace:
    """Read the record at ``path``, write it as a trace to ``output`` and return it.

    ``kind`` is told by the names of the arrays when None. What is doubtful but usable is in ``meta["notes"]``. Raises
    InputError, one line naming file, array, row and value, before anything is written.
    """
    arrays, sha256 = read_arrays(path)
    name = shown(path)
    with named(name):
        kind = kind or recognise(arrays)
        if kind not in KINDS:
            raise InputError(f"kind {kind!r}: expected {', '.join(KINDS)}")
        if "" in arrays and kind == "serving":
            arrays["routed_experts"] = arrays.pop("")
        arrays, passed_over = _set_apart(arrays, kind)
        trace = KINDS[kind](arrays, given or Given(), Path(name).stem)
        trace.meta["notes"] += passed_over
        trace.meta["converted"] = {"file": Path(name).name, "sha256": sha256, "kind": kind}
    trace.save(output)
    return trace


def replay_needs(trace: Trace) -> list[str]:
    """What ``python -m sim replay`` will have to be told of this trace, in a line; none for a model that is known."""
    model = trace.meta["model"]
    try:
        resolve_model(model, trace.layers)
    except InputError as error:
        if builtin(model["name"]) is not None or "config" in model:
            return [f"replay will refuse it: {error}"]
        return [
            f"{model['name']} is not built in: replay will need --model, a built-in name or a config.json; convert "
            "with --model config.json writes it into the trace"
        ]
    return []


def recognise(arrays: Collection[str]) -> str:
    """The kind of record that has arrays of these names; raises InputError."""
    names = set(arrays)
    if {"meta", "experts", "layers"} <= names:
        raise InputError("is a trace already")
    if "" in names or "routed_experts" in names:
        return "serving"
    for kind in ("device", "gpt-oss", "esft"):
        if names >= set(ARRAYS[kind]):
            return kind
    raise InputError(
        f"arrays {', '.join(sorted(names))[:120]}: of no known kind; expected {', '.join(DEVICE_ARRAYS)} (device) or "
        f"{', '.join(GPT_OSS_ARRAYS)} (gpt-oss) or {', '.join(ESFT_ARRAYS)} (esft) or routed_experts (serving)"
    )


def _set_apart(arrays: dict[str, np.ndarray], kind: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of a record of this kind, and a note that names the others.

    Raises InputError if one is missing, or if another is an array of any kind, or nearly: it would be lost.
    """
    wanted = ARRAYS[kind]
    for name in wanted if kind != "serving" else ():
        if name not in arrays:
            raise InputError(f"array {name!r} is missing, expected {', '.join(wanted)}")
    others = sorted(set(arrays) - set(wanted))
    known = sorted({name for each in ARRAYS.values() for name in each})
    for name in others:
        if get_close_matches(name.lower(), known, cutoff=0.8):
            raise InputError(f"unknown array {name!r}, expected {', '.join(wanted)}")
    notes = [f"arrays that are no part of such a record were passed over: {', '.join(others):.200}"] if others else []
    return {name: arrays[name] for name in wanted if name in arrays}, notes


def _routes(name: str, array: np.ndarray) -> np.ndarray:
    """(T, L, K) int16 ids; (T, L) is K = 1."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not array.size:
        raise InputError(f"array {name!r}: shape {array.shape}, expected (rows, layers, k)")
    return integers(array, np.int16, f"array {name!r}")


def _finite(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.dtype.kind != "f" or array.shape != shape:
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected floats of shape {shape}")
    return array


def _per_sequence(name: str, array: np.ndarray, count: int, kind: str) -> np.ndarray:
    if array.shape != (count,) or array.dtype.kind not in kind:
        wanted = "texts" if "U" in kind else "integers"
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected {count} {wanted}")
    return array


def _meta(
    model: dict[str, Any], given: Given, captured: str, decoding: str, notes: list[str], hardware: str = "not stated"
) -> dict[str, Any]:
    return {
        "schema": 1,
        "model": model,
        "captured": {"what": captured},
        "text": {"source": given.source or "not stated", "licence": given.licence or "not stated"},
        "decoding": {"mode": decoding},
        "hardware": hardware,
        "notes": notes,
    }


def from_gpt_oss(arrays: dict[str, np.ndarray], given: Given, stem: str) -> Trace:
    """Greedy decode of gpt-oss without the prompts' rows: positions start at ``prompt_len``.

    The domain is the category (what a text is about: law, physics, ...), the better stand-in for an application domain
    than the benchmark that it was taken from; that one is in the sequence id. ``probs`` are the softmax over the top k,
    which is what gpt-oss weighs its experts by, so they are the gates.
    """
    experts, probs, offsets, dataset, category, prompt_len = arrays.values()
    routes = _routes("experts", experts)
    model = recognised(given, routes.shape[1], routes.shape[2], among=("gpt-oss-20b", "gpt-oss-120b"))
    lengths = lengths_of(offsets, len(routes))
    count = len(lengths)
    dataset = _per_sequence("dataset", dataset, count, "U")
    category = _per_sequence("category", category, count, "U")
    start = integers(_per_sequence("prompt_len", prompt_len, count, "iu"), np.int32, "array 'prompt_len'")
    refuse(start < 1, lambda i: f"array 'prompt_len', sequence {i}: {start[i]}, expected at least 1 token")
    notes = ["prompt rows are absent: decode only, from position prompt_len", *unlike_model(model, routes.shape[2])]
    return assemble(
        meta=_meta(
            model.meta(resolve_experts(model, given.experts, None), routes.shape[2]), given,
            f"{model.name}, decode routes as published", "greedy", notes,
        ),
        layers=resolve_layers(model, routes.shape[1], given.layers, None),
        experts=routes, gates=_finite("probs", probs, routes.shape), lengths=lengths, start=start,
        domain=category if given.domain is None else np.full(count, given.domain),
        sequence_id=np.array([f"{d}/{c}/{i}" for i, (d, c) in enumerate(zip(dataset, category, strict=True))]),
    )  # fmt: skip


def from_esft(arrays: dict[str, np.ndarray], given: Given, stem: str) -> Trace:
    """Teacher-forced routes of DeepSeek-V2-Lite, whose layer 0 is dense: model layers 1 to 26.

    Where each prompt ends is not recorded. All rows are read as decode: each token's route follows from the tokens
    before it alone, so a token-by-token run of the same text takes the same routes; as prefill nothing would be left
    to replay step by step.
    """
    experts, weights, offsets = arrays.values()
    routes = _routes("experts", experts)
    model = recognised(given, routes.shape[1], routes.shape[2], among=("deepseek-v2-lite",))
    layers = None if given.layers or model.spec is None else np.array(model.spec.moe_layers)
    lengths = lengths_of(offsets, len(routes))
    notes = [
        "teacher-forced; where prompts end is not recorded, so all rows are read as decode",
        *unlike_model(model, routes.shape[2]),
    ]
    return assemble(
        meta=_meta(
            model.meta(resolve_experts(model, given.experts, None), routes.shape[2]), given,
            f"{model.name}, routes as published", "teacher-forced", notes,
        ),
        layers=resolve_layers(model, routes.shape[1], given.layers, layers),
        experts=routes, gates=_finite("weights", weights, routes.shape), lengths=lengths,
        domain=np.full(len(lengths), given.domain or stem),
        sequence_id=np.array([f"{stem}/{i}" for i in range(len(lengths))]),
    )  # fmt: skip


def from_device(arrays: dict[str, np.ndarray], given: Given, stem: str) -> Trace:
    """One prefill and decode run of a device that streams experts, with the bytes of an expert of each layer.

    Routes of -1 are tokens that the device did not run through a layer (the prompt's last layer needs its last token
    only). Recognised models are qwen3-30b-a3b and gpt-oss-120b, by layers and experts: the device may run fewer
    experts a token than the model's config says, which is noted.
    """
    stored, phase, n_experts, k, expert_bytes = arrays.values()
    routes = _routes("routes", stored)
    rows, recorded, slots = routes.shape
    if one_number("k", k) != slots:
        raise InputError(f"array 'k': {k.tolist()}, expected {slots}, the slots of 'routes'")
    model = recognised(given, recorded, experts=one_number("n_experts", n_experts))
    phase = integers(_per_sequence("phase", phase, rows, "iu"), np.int16, "array 'phase'")
    refuse(
        ~np.isin(phase, (0, 1)) | (np.diff(phase, prepend=phase[:1]) < 0),
        lambda i: f"array 'phase', row {i}: {phase[i]}, expected 0 (prefill), then 1 (decode)",
    )
    sizes = integers(_per_sequence("expert_bytes", expert_bytes, recorded, "iu"), np.int64, "array 'expert_bytes'")
    said = model.meta(resolve_experts(model, given.experts, n_experts), slots) | {"expert_bytes": sizes.tolist()}
    notes = unlike_model(model, slots)
    skipped = int((routes < 0).all(axis=2).sum())
    if skipped:
        notes.append(f"{skipped} (token, layer) pairs have no route: the device did not run them")
    return assemble(
        meta=_meta(said, given, f"{model.name} as a device ran it", "not stated", notes, "a device streaming experts"),
        layers=resolve_layers(model, recorded, given.layers, None),
        experts=routes, lengths=np.array([rows]), prefill=np.array([int((phase == 0).sum())]),
        domain=np.array([given.domain or stem]), sequence_id=np.array([stem]), split=np.array(["eval"]),
    )  # fmt: skip


def _from_serving(arrays: dict[str, np.ndarray], given: Given, stem: str) -> Trace:
    if "routed_experts" not in arrays:
        raise InputError(f"array 'routed_experts' is missing, expected one or more of {', '.join(SERVING_ARRAYS)}")
    model, notes, served = from_serving(arrays, given, stem)
    captured = f"{model['name']}, routes as a serving engine returned them"
    names = np.array([f"{stem}/{i}" for i in range(len(served["lengths"]))])
    return assemble(meta=_meta(model, given, captured, "not stated", notes), sequence_id=names, **served)


KINDS: dict[str, Callable[[dict[str, np.ndarray], Given, str], Trace]] = {
    "gpt-oss": from_gpt_oss,
    "esft": from_esft,
    "device": from_device,
    "serving": _from_serving,
}
