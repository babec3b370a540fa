"""Routes as serving engines return them: one array a request, with the faults that such records are known for.

An engine runs n prompt tokens and m sampled ones but not the last of these, so a request has n + m - 1 rows. Buffers
are padded with -1, zeros or, where they are unsigned 8 bits, 255; the last row of a turn may be a dummy; turns of a
conversation may each contain all earlier ones. Such rows are dropped with a note or the record is refused, never
counted as routing.
"""

from typing import Any

import numpy as np

from ground.errors import InputError
from traces.arrays import at, integers, refuse
from traces.assemble import lengths_of
from traces.convert.shapes import (
    Given,
    RecordedModel,
    one_number,
    recognised,
    resolve_experts,
    resolve_layers,
    unlike_model,
)
from traces.convert.turns import Turn, join_conversations
from traces.layer_numbers import listed
from traces.models.known import builtin_decoder, builtin_models
from traces.trace import narrow_note
from traces.validation import check_distinct, check_ids

SERVING_ARRAYS = (
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

# Rows of this many ids are never equal by chance.
_ROW_IDS = 8

_PADDED_LEFT = (
    "padding at the end: these requests are padded on the left, as verl's batches are; move each one's rows to the "
    "front"
)
_SKIPPED = "its route (an engine's prefix cache skips tokens that it has seen)"


def from_serving(
    record: dict[str, np.ndarray], given: Given, stem: str
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """``meta["model"]``, notes, and the cleaned rest for `assemble`, of a record of the arrays of ``SERVING_ARRAYS``.

    Raises InputError naming array, request or row, and value.
    """
    notes: list[str] = []
    stored, lengths = _rows(record, given)
    model, n_experts, layers, stored = _model(record, given, stored, notes)
    filler = _filler(stored, n_experts)
    routes = _ids(stored, filler, n_experts, notes)
    tokens = _tokens(record, lengths)
    turns = _turns(routes, filler, lengths, tokens, record["routed_experts"].ndim == 4, notes)
    _prompts(record, turns, notes)
    domain = _domains(record, len(turns), given.domain or stem)
    numbers = None if "conversation" not in record else _counts(record, "conversation", len(turns), -(2**31))
    starts = None if "start" not in record else _counts(record, "start", len(turns), 0)
    sequences, last_turn = join_conversations(turns, numbers, starts, notes)
    return model.meta(n_experts, routes.shape[2]), notes, {
        "layers": layers,
        "experts": np.concatenate([s.routes for s in sequences]),
        "lengths": np.array([len(s.routes) for s in sequences]),
        "prefill": np.array([s.prompt for s in sequences]),
        "token": None if tokens is None else np.concatenate([s.tokens for s in sequences if s.tokens is not None]),
        "domain": domain[last_turn],
    }  # fmt: skip


def _rows(record: dict[str, np.ndarray], given: Given) -> tuple[np.ndarray, np.ndarray]:
    """(T, L, K) rows of all requests as stored, without padding that the record declares, and (S,) their lengths."""
    stored = record["routed_experts"]
    if stored.dtype.kind in "US":
        raise InputError(
            "array 'routed_experts': texts, such as the base64 of an engine's answer, expected integers (rows, layers, "
            "k): decode each with numpy.frombuffer(base64.b64decode(text), numpy.int32).reshape(rows, layers, k)"
        )
    if stored.dtype.kind not in "iu":
        raise InputError(f"array 'routed_experts': dtype {stored.dtype}, expected integers")
    _check_not_flat(stored, given)
    if stored.ndim == 2:
        stored = stored[:, :, None]
    if stored.ndim not in (3, 4) or not stored.size:
        raise InputError(
            f"array 'routed_experts': shape {stored.shape}, expected (rows, layers, k) or (requests, rows, layers, k)"
        )
    padded = stored.ndim == 4
    if padded and "offsets" in record:
        raise InputError("array 'offsets': there with a padded routed_experts, expected 'lengths'")
    if "lengths" in record and (not padded or "n_valid" in record):
        raise InputError("array 'lengths': expected with a padded routed_experts only, and without n_valid")
    count, room = stored.shape[:2] if padded else (1, len(stored))
    name = "lengths" if "lengths" in record else "n_valid"
    lengths = _counts(record, name, count, 1, room) if name in record else np.full(count, room)
    if padded:
        return stored[np.arange(room) < lengths[:, None]], lengths
    stored = stored[: lengths[0]]
    return stored, lengths_of(record["offsets"], len(stored)) if "offsets" in record else lengths


def _check_not_flat(stored: np.ndarray, given: Given) -> None:
    """Refuse routes whose layers and slots stand in one axis, or all of them in one, as some engines hand them out."""
    named = None if given.recorded is None else given.recorded.spec
    specs = [named] if named is not None else [spec for name in builtin_models() if (spec := builtin_decoder(name))]
    if stored.ndim == 1 and stored.size:
        wanted = f"(rows, {named.routed_layers}, {named.top_k})" if named is not None else "(rows, layers, k)"
        raise InputError(
            f"array 'routed_experts': a flat buffer of {stored.size} ids, expected {wanted}: reshape it, rows first"
        )
    shapes = {(spec.routed_layers, spec.top_k) for spec in specs if spec.top_k > 1}
    for layers, slots in sorted(shapes) if stored.ndim == 2 else ():
        if stored.shape[1] == layers * slots and (given.recorded is None) == (named is None):
            raise InputError(
                f"array 'routed_experts': shape {stored.shape}, {layers} layers x {slots} slots in one axis, it seems, "
                f"expected (rows, layers, k): reshape it to ({len(stored)}, {layers}, {slots})"
            )


def _counts(record: dict[str, np.ndarray], name: str, count: int, low: int, high: int = 2**31 - 1) -> np.ndarray:
    """(S,) int64 numbers of a request each, within bounds."""
    array = record[name].reshape(-1)
    if len(array) != count or array.dtype.kind not in "iu":
        raise InputError(f"array {name!r}: {array.dtype} of length {len(array)}, expected {count} integers")
    words = f"expected {low} to {high}"
    refuse((array < low) | (array > high), lambda i: f"array {name!r}, request {i}: {array[i]}, {words}")
    return array.astype(np.int64)


def _model(
    record: dict[str, np.ndarray], given: Given, stored: np.ndarray, notes: list[str]
) -> tuple[RecordedModel, int, list[int], np.ndarray]:
    """The model, E, layer numbers, and the routes of these layers and of routed experts alone."""
    recorded, slots = stored.shape[1:]
    n_experts = record.get("n_experts")
    stated = None if n_experts is None else one_number("n_experts", n_experts)
    last = _constant_slots(stored)
    model = recognised(given, recorded, slots - len(last), given.experts or stated)
    experts = resolve_experts(model, given.experts, n_experts)
    # Ids from E on are of shared experts; a constant below E is left to be judged as any other route.
    while last and 0 <= last[0] < experts and last[0] != 2 ** (8 * stored.dtype.itemsize) - 1:
        last.pop(0)
    if last:
        slots -= len(last)
        notes.append(
            f"the last {len(last)} slots hold {', '.join(map(str, last))} in every route, as shared experts that an "
            f"engine runs beside the routed ones: left out, top-{slots} stays"
        )
        stored = stored[:, :, :slots]
    stored, layers = _routed_layers(record, given, model, stored, notes)
    notes += unlike_model(model, slots)
    return model, experts, layers, stored


def _constant_slots(stored: np.ndarray) -> list[int]:
    """The ids of the last slots of (T, L, K) that hold one id each in every real row: none, or above all other ids.

    At least one slot is left.
    """
    real = stored[~(stored == stored[:, :1, :1]).all(axis=(1, 2))]
    real = real[:, ~np.isin(real, (-1, 0, 255)).all(axis=(0, 2))]  # without dense layers, which hold filler
    none = int(np.iinfo(stored.dtype).max) if stored.dtype.kind == "u" else -1
    last: list[int] = []
    while real.size and len(last) < stored.shape[2] - 1:
        slot = real[:, :, stored.shape[2] - 1 - len(last)]
        value = int(slot[0, 0])
        others = real[:, :, : stored.shape[2] - 1 - len(last)]
        if not (slot == value).all() or (value != none and value <= int(others.max())):
            break
        last.insert(0, value)
    return last


def _routed_layers(
    record: dict[str, np.ndarray], given: Given, model: RecordedModel, stored: np.ndarray, notes: list[str]
) -> tuple[np.ndarray, list[int]]:
    """The routes of routed layers alone, and these layers' numbers."""
    recorded, spec = stored.shape[1], model.spec
    sizes = () if spec is None else (spec.routed_layers, spec.layers)
    if sizes and recorded not in sizes and len(stored) in sizes:
        raise InputError(
            f"array 'routed_experts': shape {stored.shape}, expected (rows, {sizes[0]} layers, k); "
            "the first two axes look swapped"
        )
    if sizes and recorded == 1 < sizes[0]:
        raise InputError(f"array 'routed_experts': one layer only, expected the {sizes[0]} of {model.name}")
    layers = resolve_layers(model, recorded, given.layers, record.get("layer_ids"))
    if len(layers) != recorded:
        # A buffer of all model layers: the dense ones hold filler, and only those may be left out.
        others = np.setdiff1d(np.arange(recorded), layers)
        if layers[-1] >= recorded or not len(others) or not np.isin(stored[:, others], (-1, 0, 255)).all():
            raise InputError(f"array 'routed_experts': {recorded} layers, expected {len(layers)}, as many as numbers")
        notes.append(
            f"layers {listed(others.tolist())} of the record are not routed and hold filler; they were left out"
        )
        stored = stored[:, layers]
    if recorded == 1:
        notes.append("one layer only: a real model has more; was the rest of the capture lost?")
    return stored, layers


def _filler(stored: np.ndarray, n_experts: int) -> np.ndarray:
    """(T,) rows that hold one filler value in every layer and slot: -1, 0, or the 255 that -1 becomes in 8 bits.

    A row of zeros is a route only where k is 1 and layers are few; a row of 255 never is one where k is above 1.
    """
    value = stored[:, 0, 0]
    wide = stored.shape[2] > 1 or stored[0].size >= _ROW_IDS
    fillers = [-1] if stored.dtype.kind == "i" else []
    if wide and n_experts > 1:
        fillers.append(0)
    if stored.dtype.kind == "u":
        fillers.append(int(np.iinfo(stored.dtype).max))
    return np.isin(value, fillers) & (stored == value[:, None, None]).all(axis=(1, 2))


def _ids(stored: np.ndarray, filler: np.ndarray, n_experts: int, notes: list[str]) -> np.ndarray:
    """(T, L, K) int16 ids, -1 in filler rows; ids out of range or twice in a route are refused by row and layer."""
    where = "array 'routed_experts'"
    if filler.all():
        value = stored[0, 0, 0]
        raise InputError(f"{where}: every id of {len(stored)} rows is {value} (nothing was captured), expected routes")
    narrow, left_out = stored.dtype.itemsize == 1, filler[:, None, None]
    if narrow and stored.dtype.kind == "u" and n_experts < 256:
        words = f"255 in a model of {n_experts} experts is -1 in unsigned 8 bits, expected ids in 16 bits"
        refuse((stored == 255) & ~left_out, lambda *index: f"{where}{at(*index)}: {words}")
    if narrow and stored.dtype.kind == "i" and n_experts > 128:
        refuse(
            (stored < 0) & ~left_out,
            lambda *index: (
                f"{where}{at(*index)}: {stored[index]} is an id of 128 or more in signed 8 bits "
                f"({int(stored[index]) + 256}?), expected ids in 16 bits"
            ),
        )
    if narrow and n_experts > 256:
        notes.append(narrow_note(n_experts))
    routes = integers(stored if stored.dtype.kind == "i" else np.where(left_out, 0, stored), np.int16, where)
    if filler.any():
        routes = np.where(left_out, np.int16(-1), routes)
    check_ids("routed_experts", routes, n_experts)
    check_distinct("routed_experts", routes)
    return routes


def _tokens(record: dict[str, np.ndarray], lengths: np.ndarray) -> list[np.ndarray] | None:
    """Token ids of each request, as many as its rows or one more."""
    if "token_ids" not in record:
        return None
    tokens = integers(record["token_ids"].reshape(-1), np.int32, "array 'token_ids'")
    rows, count = int(lengths.sum()), len(lengths)
    if len(tokens) not in (rows, rows + count):
        raise InputError(
            f"array 'token_ids': {len(tokens)} tokens for {rows} rows of routed_experts, expected {rows} or, with the "
            f"last sampled token of each request, {rows + count}"
        )
    return np.split(tokens, np.cumsum(lengths + (len(tokens) > rows))[:-1])


def _turns(
    routes: np.ndarray, filler: np.ndarray, lengths: np.ndarray, tokens: list[np.ndarray] | None, padded: bool,
    notes: list[str],
) -> list[Turn]:  # fmt: skip
    """One Turn a request, its filler rows at the end dropped; filler elsewhere is refused."""
    turns, dropped, copied, doubtful = [], 0, 0, 0
    for request, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        start = end - length
        real = np.flatnonzero(~filler[start:end])
        if not len(real):
            raise InputError(f"array 'routed_experts', request {request}: all {length} rows are filler")
        rows = int(real[-1]) + 1
        if len(real) < rows:
            left = padded and int(real[0]) == rows - len(real)
            row = int(np.argmax(filler[start:end])) + (0 if padded else int(start))
            where = f"array 'routed_experts', row {row} (request {request}): filler before real rows"
            raise InputError(f"{where}, expected {_PADDED_LEFT if left else _SKIPPED}")
        mine = routes[start : start + rows]
        dropped += int(length) - rows
        unsure = tokens is not None and len(tokens[request]) == length == rows > 1
        if unsure:
            # As many rows as tokens: the last token was sampled and not run, so its row cannot be real.
            copy = mine[0].size >= _ROW_IDS and bool((mine[-1] == mine[-2]).all())
            copied += copy
            doubtful += not copy
            mine, unsure = mine[: rows - copy], not copy
        turns.append(Turn(mine, None if tokens is None else tokens[request][: len(mine)], 0, unsure))
    if dropped:
        notes.append(f"{dropped} filler rows at the end of requests were dropped")
    if copied:
        notes.append(f"{copied} last rows were copies of the row before, for a token that was never run: dropped")
    if doubtful:
        notes.append(
            f"{doubtful} requests have as many rows as tokens though the last sampled token is not run; rows kept"
        )
    return turns


def _prompts(record: dict[str, np.ndarray], turns: list[Turn], notes: list[str]) -> None:
    """Set each turn's prompt length; without ``prompt_lens`` all rows count as decode, with a note."""
    if "prompt_lens" not in record:
        notes.append("prompt_lens is absent: all rows are read as decode")
        return
    prompts = _counts(record, "prompt_lens", len(turns), 0)
    starts = np.zeros(len(turns), int) if "start" not in record else _counts(record, "start", len(turns), 0)
    for request, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
        rows = int(starts[request]) + len(turn.routes)
        if not 1 <= prompt <= rows:
            what = "a prompt of 0 tokens, " if prompt == 0 else ""
            raise InputError(f"array 'prompt_lens', request {request}: {prompt}, {what}expected 1 to {rows}, its rows")
        turn.prompt = int(prompt)


def _domains(record: dict[str, np.ndarray], count: int, default: str) -> np.ndarray:
    if "domain" not in record:
        return np.full(count, default)
    domain = record["domain"].reshape(-1)
    if len(domain) != count or domain.dtype.kind != "U":
        raise InputError(f"array 'domain': {domain.dtype} of length {len(domain)}, expected {count} texts")
    return domain
