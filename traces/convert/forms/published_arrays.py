"""Routes that others published as arrays, in a file each: gpt-oss, ESFT, and runs of a device that streams experts."""

from collections.abc import Callable, Sequence

import numpy as np

from ground.errors import InputError
from traces.arrays import integers, refuse
from traces.assemble import lengths_of
from traces.convert.archive import check_others, opened
from traces.convert.form import Form
from traces.convert.request import Record, Request
from traces.convert.shapes import Given, one_number
from traces.convert.source import Source
from traces.models.known import builtin_decoder

GPT_OSS_ARRAYS = ("experts", "probs", "offsets", "dataset", "category", "prompt_len")
ESFT_ARRAYS = ("experts", "weights", "offsets")
DEVICE_ARRAYS = ("routes", "phase", "n_experts", "k", "expert_bytes")


def _required(source: Source, wanted: tuple[str, ...]) -> tuple[dict[str, np.ndarray], list[str]]:
    arrays = opened(source)
    for name in wanted:
        if name not in arrays:
            raise InputError(f"array {name!r} is missing, expected {', '.join(wanted)}")
    return arrays, check_others(arrays, wanted)


def _routes(name: str, array: np.ndarray) -> np.ndarray:
    """(T, L, K) integers; (T, L) is K = 1."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not array.size:
        raise InputError(f"array {name!r}: shape {array.shape}, expected (rows, layers, k)")
    return array


def _finite(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.dtype.kind != "f" or array.shape != shape:
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected floats of shape {shape}")
    refuse(
        ~np.isfinite(array),
        lambda row, layer, slot: (
            f"array {name!r}, row {row}, routed layer {layer}, slot {slot}: "
            f"{array[row, layer, slot]}, expected a finite number"
        ),
    )
    return array


def _per_sequence(name: str, array: np.ndarray, count: int, kind: str) -> np.ndarray:
    if array.shape != (count,) or array.dtype.kind not in kind:
        wanted = "texts" if "U" in kind else "integers"
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected {count} {wanted}")
    return array


def _gpt_oss(sources: Sequence[Source], given: Given) -> Record:
    """Greedy decode of gpt-oss without the prompts' rows: positions start at ``prompt_len``.

    The domain is the category (what a text is about: law, physics, ...), the better stand-in for an application domain
    than the benchmark that it was taken from; that one is in the sequence id. ``probs`` are the softmax over the top k,
    which is what gpt-oss weighs its experts by, so they are the gates.
    """
    arrays, notes = _required(sources[0], GPT_OSS_ARRAYS)
    routes = _routes("experts", arrays["experts"])
    lengths = lengths_of(arrays["offsets"], len(routes))
    count = len(lengths)
    dataset = _per_sequence("dataset", arrays["dataset"], count, "U").tolist()
    category = _per_sequence("category", arrays["category"], count, "U").tolist()
    stored = _per_sequence("prompt_len", arrays["prompt_len"], count, "iu")
    start = integers(stored, np.int32, "array 'prompt_len'")
    refuse(start < 1, lambda i: f"array 'prompt_len', sequence {i}: {start[i]}, expected at least 1 token")
    gates = _finite("probs", arrays["probs"], routes.shape)
    return Record(
        (
            Request(
                routes[end - n : end], gates=gates[end - n : end], start=int(start[i]), prompt=int(start[i]),
                domain=category[i], name=f"{dataset[i]}/{category[i]}/{i}", where="array 'experts'", row=int(end - n),
            )
            for i, (end, n) in enumerate(zip(np.cumsum(lengths), lengths, strict=True))
        ),
        among=("gpt-oss-20b", "gpt-oss-120b"), captured="decode routes as published", decoding="greedy", buffers=False,
        count=count, notes=["prompt rows are absent: decode only, from position prompt_len", *notes],
    )  # fmt: skip


def _esft(sources: Sequence[Source], given: Given) -> Record:
    """Teacher-forced routes of DeepSeek-V2-Lite, whose layer 0 is dense: model layers 1 to 26.

    Where each prompt ends is not recorded. All rows are read as decode: each token's route follows from the tokens
    before it alone, so a token-by-token run of the same text takes the same routes; as prefill nothing would be left
    to replay step by step.
    """
    arrays, notes = _required(sources[0], ESFT_ARRAYS)
    routes = _routes("experts", arrays["experts"])
    lengths = lengths_of(arrays["offsets"], len(routes))
    gates = _finite("weights", arrays["weights"], routes.shape)
    spec = builtin_decoder("deepseek-v2-lite") if given.recorded is None else given.recorded.spec
    parts = [(slice(end - n, end), int(end - n)) for end, n in zip(np.cumsum(lengths), lengths, strict=True)]
    return Record(
        (
            Request(routes[part], gates=gates[part], prompt=0, where="array 'experts'", row=first)
            for part, first in parts
        ),
        layers=None if given.layers or spec is None else np.array(spec.moe_layers), among=("deepseek-v2-lite",),
        captured="routes as published", decoding="teacher-forced", buffers=False, count=len(lengths),
        notes=["teacher-forced; where prompts end is not recorded, so all rows are read as decode", *notes],
    )  # fmt: skip


def _device(sources: Sequence[Source], given: Given) -> Record:
    """One prefill and decode run of a device that streams experts, with the bytes of an expert of each layer.

    Routes of -1 are tokens that the device did not run through a layer (the prompt's last layer needs its last token
    only). The device may run fewer experts a token than the model's config says.
    """
    arrays, notes = _required(sources[0], DEVICE_ARRAYS)
    routes = _routes("routes", arrays["routes"])
    rows, recorded, slots = routes.shape
    if one_number("k", arrays["k"]) != slots:
        raise InputError(f"array 'k': {arrays['k'].tolist()}, expected {slots}, the slots of 'routes'")
    phase = integers(_per_sequence("phase", arrays["phase"], rows, "iu"), np.int16, "array 'phase'")
    refuse(
        ~np.isin(phase, (0, 1)) | (np.diff(phase, prepend=phase[:1]) < 0),
        lambda i: f"array 'phase', row {i}: {phase[i]}, expected 0 (prefill), then 1 (decode)",
    )
    stored = _per_sequence("expert_bytes", arrays["expert_bytes"], recorded, "iu")
    sizes = integers(stored, np.int64, "array 'expert_bytes'")
    skipped = int((routes < 0).all(axis=2).sum())
    if skipped:
        notes.append(f"{skipped} (token, layer) pairs have no route: the device did not run them")
    return Record(
        [Request(routes, prompt=int((phase == 0).sum()), name=sources[0].path.stem, where="array 'routes'")],
        experts=one_number("n_experts", arrays["n_experts"]), expert_bytes=sizes.tolist(), reduced=True, split="eval",
        captured="as a device ran it", hardware="a device streaming experts", buffers=False, count=1, notes=notes,
    )  # fmt: skip


def _holds(arrays: tuple[str, ...]) -> Callable[[Source], bool]:
    return lambda source: source.arrays >= set(arrays) and not source.arrays & {"meta", "routed_experts"}


FORMS = tuple(
    Form(name, f"{what}, as arrays", _holds(arrays), read, arrays=arrays)
    for name, what, arrays, read in (
        ("gpt-oss", "routes of gpt-oss with probabilities", GPT_OSS_ARRAYS, _gpt_oss),
        ("esft", "routes of DeepSeek-V2-Lite with weights", ESFT_ARRAYS, _esft),
        ("device", "one run of a device that streams experts", DEVICE_ARRAYS, _device),
    )
)
