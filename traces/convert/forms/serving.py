"""Routes of any engine as arrays that a person saved: requests one after another, or padded."""

from collections.abc import Iterator, Sequence

import numpy as np

from ground.errors import InputError
from traces.arrays import integers, refuse
from traces.assemble import lengths_of
from traces.convert.archive import check_others, opened
from traces.convert.form import Form
from traces.convert.model import check_not_flat
from traces.convert.request import Record, Request
from traces.convert.shapes import Given, one_number
from traces.convert.source import Source
from traces.layer_numbers import increasing

ARRAYS = (
    "routed_experts",  # (T, L, k), (T, L) for k = 1, or padded (S, N, L, k); requests one after another
    "offsets",  # (S+1,) request s has rows offsets[s] to offsets[s+1]-1; one request where absent
    "lengths",  # (S,) rows of each request of a padded array
    "n_valid",  # rows of routed_experts that are real, the rest is filler; one number, or (S,) for a padded array
    "prompt_lens",  # (S,) tokens of each request's whole prompt
    "token_ids",  # (T,) or, with the last sampled token of each request, (T+S,)
    "layer_ids",  # (L,) model layer numbers
    "n_experts",  # one number
    "domain",  # (S,) text
    "conversation",  # (S,) requests of one number are turns of one conversation
    "start",  # (S,) position of each turn's first row in its conversation; 0, the whole history, where absent
)


def _read(sources: Sequence[Source], given: Given) -> Record:
    arrays = opened(sources[0])
    if "" in arrays:
        arrays = {"routed_experts": arrays[""]}
    if "routed_experts" not in arrays:
        raise InputError(f"array 'routed_experts' is missing, expected one or more of {', '.join(ARRAYS)}")
    notes = check_others(arrays, ARRAYS)
    layers = arrays.get("layer_ids")
    if layers is not None:
        layers = integers(layers.reshape(-1), np.int32, "array 'layer_ids'")
        increasing(layers.tolist(), "array 'layer_ids'")
    stored, lengths = _lengths(arrays, given)
    return Record(
        _requests(arrays, stored, lengths), layers=layers, count=len(lengths), notes=notes,
        experts=None if "n_experts" not in arrays else one_number("n_experts", arrays["n_experts"]),
    )  # fmt: skip


def _lengths(arrays: dict[str, np.ndarray], given: Given) -> tuple[np.ndarray, np.ndarray]:
    """The routes as stored, 3-D or padded, without rows that the record declares filler, and (S,) rows of requests."""
    stored = arrays["routed_experts"]
    if stored.dtype.kind in "US":
        raise InputError(
            "array 'routed_experts': texts, such as the base64 of an engine's answer, expected integers (rows, layers, "
            "k): save the answers themselves as JSON, which convert reads"
        )
    check_not_flat(stored, given)
    if stored.dtype.kind not in "iu":
        raise InputError(f"array 'routed_experts': dtype {stored.dtype}, expected integers")
    if stored.ndim == 2:
        stored = stored[:, :, None]
    if stored.ndim not in (3, 4) or not stored.size:
        raise InputError(
            f"array 'routed_experts': shape {stored.shape}, expected (rows, layers, k) or (requests, rows, layers, k)"
        )
    padded = stored.ndim == 4
    if padded and "offsets" in arrays:
        raise InputError("array 'offsets': there with a padded routed_experts, expected 'lengths'")
    if "lengths" in arrays and (not padded or "n_valid" in arrays):
        raise InputError("array 'lengths': expected with a padded routed_experts only, and without n_valid")
    count, room = stored.shape[:2] if padded else (1, len(stored))
    name = "lengths" if "lengths" in arrays else "n_valid"
    lengths = _counts(arrays, name, count, 1, room) if name in arrays else np.full(count, room)
    if padded:
        return stored, lengths
    stored = stored[: lengths[0]]
    return stored, lengths_of(arrays["offsets"], len(stored)) if "offsets" in arrays else lengths


def _counts(arrays: dict[str, np.ndarray], name: str, count: int, low: int, high: int = 2**31 - 1) -> np.ndarray:
    """(S,) int64 numbers of a request each, within bounds."""
    array = arrays[name].reshape(-1)
    if len(array) != count or array.dtype.kind not in "iu":
        raise InputError(f"array {name!r}: {array.dtype} of length {len(array)}, expected {count} integers")
    words = f"expected {low} to {high}"
    refuse((array < low) | (array > high), lambda i: f"array {name!r}, request {i}: {array[i]}, {words}")
    return array.astype(np.int64)


def _requests(arrays: dict[str, np.ndarray], stored: np.ndarray, lengths: np.ndarray) -> Iterator[Request]:
    count, padded = len(lengths), stored.ndim == 4
    prompts, start, conversation = (
        _counts(arrays, name, count, low).tolist() if name in arrays else [None] * count
        for name, low in (("prompt_lens", 0), ("start", 0), ("conversation", -(2**31)))
    )
    tokens, domain = _tokens(arrays, lengths), _domains(arrays, count)
    firsts = (np.cumsum(lengths) - lengths).tolist()
    loose = padded and not {"lengths", "n_valid"} & set(arrays)
    for i, n in enumerate(lengths.tolist()):
        rows = stored[i, :n] if padded else stored[firsts[i] : firsts[i] + n]
        yield Request(
            rows, tokens=tokens[i], prompt=prompts[i], start=start[i], conversation=conversation[i], domain=domain[i],
            row=0 if padded else firsts[i], padded=loose,
        )  # fmt: skip


def _tokens(arrays: dict[str, np.ndarray], lengths: np.ndarray) -> Sequence[np.ndarray | None]:
    """Token ids of each request, as many as its rows or one more."""
    if "token_ids" not in arrays:
        return [None] * len(lengths)
    tokens = arrays["token_ids"].reshape(-1)
    rows, count = int(lengths.sum()), len(lengths)
    if len(tokens) not in (rows, rows + count):
        raise InputError(
            f"array 'token_ids': {len(tokens)} tokens for {rows} rows of routed_experts, expected {rows} or, with the "
            f"last sampled token of each request, {rows + count}"
        )
    return np.split(tokens, np.cumsum(lengths + (len(tokens) > rows))[:-1])


def _domains(arrays: dict[str, np.ndarray], count: int) -> Sequence[str | None]:
    if "domain" not in arrays:
        return [None] * count
    domain = arrays["domain"].reshape(-1)
    if len(domain) != count or domain.dtype.kind != "U":
        raise InputError(f"array 'domain': {domain.dtype} of length {len(domain)}, expected {count} texts")
    return domain.tolist()


def _recognises(source: Source) -> bool:
    return source.nature == "npy" or (
        source.nature == "npz" and "routed_experts" in source.arrays and "attention_mask" not in source.arrays
    )


FORM = Form(
    "serving", "arrays: routed_experts (rows, layers, k), and what is known beside", _recognises, _read, arrays=ARRAYS
)  # fmt: skip
