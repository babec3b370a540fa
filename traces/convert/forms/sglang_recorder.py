"""SGLang's expert distribution recorder in mode ``per_token``: a .pt file a rank, with the routes of every pass.

A pass has token ids, positions and physical experts of all its tokens, and no request ids: requests are put together
from positions, in the order of the running batch. Fields are those of ``sglang/srt/eplb/expert_distribution.py`` in
SGLang 0.5.23.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.forms.unreplayable import COUNTS_ONLY
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source
from traces.convert.torch_file import read_torch

_EXTEND, _DECODE, _MIXED, _IDLE = 1, 2, 3, 4
_MODES = {_EXTEND: "extend", _DECODE: "decode", _MIXED: "mixed", _IDLE: "idle"}
_INSTEAD = "record one request at a time (--max-running-requests 1), or ask for return_routed_experts"


@dataclass(frozen=True)
class _Pass:
    """One forward pass of a rank: ids and positions (n,), lengths of its prompts' parts, experts as recorded."""

    number: int
    mode: int
    tokens: np.ndarray
    positions: np.ndarray
    lengths: list[int]
    physical: np.ndarray  # (L, n, k), in the file
    table: np.ndarray  # (L, P) logical experts

    @property
    def routes(self) -> np.ndarray:
        """(n, L, k) int16 logical experts, made when they are asked for: all of a file may be larger than memory."""
        flat = np.maximum(self.physical, 0).reshape(len(self.table), -1)
        logical = np.take_along_axis(self.table, flat, axis=1).reshape(self.physical.shape)
        return np.where(self.physical < 0, -1, logical).astype(np.int16).swapaxes(0, 1)

    def runs(self, other: "_Pass") -> bool:
        """Whether the other one runs the same tokens at the same places."""
        return np.array_equal(self.tokens, other.tokens) and np.array_equal(self.positions, other.positions)


@dataclass
class _Running:
    """A request that is put together: the parts that have come, and where the next one begins."""

    next: int = 0
    prompt: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)

    def add(self, tokens: np.ndarray, routes: np.ndarray, *, prompt: bool) -> None:
        self.tokens.append(tokens)
        self.routes.append(routes)
        self.next += len(tokens)
        self.prompt = self.next if prompt else self.prompt

    def request(self, number: int) -> Request:
        # All of these tokens were run; the one that was sampled last is not recorded.
        tokens, routes = np.concatenate([*self.tokens, [-1]]), np.concatenate(self.routes)
        return Request(routes, tokens=tokens, prompt=self.prompt, where=f"request {number} of the recorder's passes")


def _read(sources: Sequence[Source], given: Given) -> Record:
    ranks: dict[Any, dict[int, _Pass]] = {}
    shared: list[str] = []
    experts: int | None = None
    for source in sources:
        held = read_torch(source.path)
        if not isinstance(held, Mapping) or not isinstance(held.get("records"), list) or not held["records"]:
            raise InputError(f"{source.path.name}: holds no records of passes")
        if "topk_ids_of_layer" not in held["records"][0]:
            raise InputError(f"SGLang's recorder in mode per_pass, {COUNTS_ONLY}")
        table = np.asarray(held["last_physical_to_logical_map"])
        experts = int(table.max()) + 1
        if (table != np.arange(table.shape[1])).any():
            shared.append("experts were placed anew while SGLang recorded: ids are mapped back by its last placement")
        for record in held["records"]:
            rank = record.get("rank", source.path.name)
            _add(ranks.setdefault(rank, {}), _pass(record, table), rank)
    streams = _distinct(ranks, shared)
    every = [one for stream in streams for one in stream]
    if not every:
        raise InputError("holds passes without tokens alone, expected requests")
    routed = np.any([(one.physical >= 0).any(axis=(1, 2)) for one in every], axis=0)
    slots = max(int((one.physical >= 0).any(axis=(0, 1)).sum()) for one in every)
    layers = np.flatnonzero(routed)

    def requests() -> Iterator[Request]:
        number = 0
        for stream in streams:
            for running in _requests(stream):
                request = running.request(number)
                request.routes = request.routes[:, layers, :slots]
                yield request
                number += 1

    return Record(
        requests(), layers=layers, experts=experts, captured="routes as SGLang's recorder wrote them",
        count=sum(int(one.positions[part.start] == 0) for one in every for part in _parts(one)),
        notes=list(dict.fromkeys(shared)),
    )  # fmt: skip


def _pass(record: Mapping[str, Any], table: np.ndarray) -> _Pass:
    """One record of a pass; raises InputError."""
    number, mode = record["forward_pass_id"], record["forward_mode"]
    where = f"pass {number}"
    if mode not in _MODES:
        raise InputError(
            f"{where}: forward mode {mode}, expected {', '.join(_MODES.values())}: rows of drafts that were rejected "
            "cannot be told from others; record without speculative decoding"
        )
    tokens, positions = np.array(record["input_ids"], np.int64), np.array(record["positions"], np.int64)
    physical = np.asarray(record["topk_ids_of_layer"])
    if physical.ndim != 3 or physical.dtype.kind != "i" or tokens.ndim != 1 or positions.shape != tokens.shape:
        raise InputError(f"{where}: routes {physical.shape}, {tokens.shape} tokens, {positions.shape} positions")
    if physical.shape[:2] != (len(table), len(tokens)):
        raise InputError(f"{where}: routes {physical.shape}, expected ({len(table)} layers, {len(tokens)} tokens, k)")
    if physical.size and (physical.min() < -1 or physical.max() >= table.shape[1]):
        raise InputError(f"{where}: an expert of {physical.max()}, expected -1 to {table.shape[1] - 1}")
    lengths = [1] * len(tokens) if mode == _DECODE else [int(n) for n in record["extend_seq_lens"] or []]
    if mode != _IDLE and (sum(lengths) != len(tokens) or min(lengths, default=1) < 1):
        raise InputError(f"{where}: requests of {lengths!s:.60} tokens, {len(tokens)} in all")
    return _Pass(number, mode, tokens, positions, lengths, physical, table)


def _add(passes: dict[int, _Pass], one: _Pass, rank: Any) -> None:
    """Add a pass to those of its rank, by number; raises InputError for another one of its number."""
    if not len(one.tokens):
        return
    before = passes.setdefault(one.number, one)
    if before is not one and not (before.runs(one) and np.array_equal(before.physical, one.physical)):
        raise InputError(
            f"rank {rank!s:.40}: pass {one.number} is there twice, with other tokens or experts, expected one "
            "recording: a server that starts anew counts from 0"
        )


def _distinct(ranks: Mapping[Any, dict[int, _Pass]], notes: list[str]) -> list[list[_Pass]]:
    """The passes of ranks that saw other tokens; those of tensor parallelism see the same, and count once."""
    streams: list[dict[int, _Pass]] = []
    ended = 0
    for passes in sorted(ranks.values(), key=len, reverse=True):
        for stream in streams:
            both = passes.keys() & stream.keys()
            if both and all(passes[number].runs(stream[number]) for number in both):
                if not all(np.array_equal(passes[number].routes, stream[number].routes) for number in both):
                    raise InputError("two ranks have the same tokens and other routes, expected one record of a token")
                ended += passes.keys() != stream.keys()
                stream |= passes
                break
        else:
            streams.append(dict(passes))
    if len(ranks) > len(streams):
        notes.append(f"{len(ranks)} ranks recorded {len(streams)} streams of passes: copies count once")
    if ended:
        notes.append(f"{ended} ranks lack passes that others have, or have passes that others lack: joined by number")
    return [[stream[number] for number in sorted(stream)] for stream in streams]


def _requests(passes: list[_Pass]) -> Iterator[_Running]:
    """Requests in the order in which they end; raises InputError where passes could be put together in two ways."""
    running: list[_Running] = []
    waiting: list[_Running] = []  # that have not decoded yet: more of their prompts may come
    for one in passes:
        if one.mode == _IDLE:
            continue
        decoding = one.mode == _DECODE
        parts = _parts(one)
        places = [int(one.positions[part.start]) for part in parts]
        known = running if decoding else [*running, *waiting]
        matched = _matched(known, places, one)
        taken = {id(known[at]) for at in matched if at is not None}
        if decoding:
            gone = [request for request in running if id(request) not in taken]
            waiting += [request for request in gone if request.prompt == request.next]
            yield from (request for request in gone if request.prompt < request.next)
            running = [request for request in running if id(request) in taken]
        else:
            running += [request for request in waiting if id(request) in taken]
            waiting = [request for request in waiting if id(request) not in taken]
        for part, place, at in zip(parts, places, matched, strict=True):
            if at is None and place:
                raise InputError(
                    f"pass {one.number}: a request begins at position {place}: the rows before are in a prefix "
                    "cache, or their pass was not recorded; record with --disable-radix-cache from the start"
                )
            request = _Running() if at is None else known[at]
            if at is None:
                running.append(request)
            request.add(one.tokens[part], one.routes[part], prompt=one.mode == _EXTEND or part.stop - part.start > 1)
    yield from (*running, *waiting)


def _parts(one: _Pass) -> list[slice]:
    """Where the rows of each request of a pass lie; raises InputError if their positions are not consecutive."""
    parts = [slice(int(a), int(b)) for a, b in pairwise(np.cumsum([0, *one.lengths]))]
    for part in parts:
        if (np.diff(one.positions[part]) != 1).any():
            raise InputError(f"pass {one.number}: positions of a request are not consecutive")
    return parts


def _matched(running: list[_Running], places: list[int], one: _Pass) -> list[int | None]:
    """Which running request each part of a pass continues; None for a new one. A batch keeps its requests' order."""
    if one.mode != _DECODE:
        found: list[int | None] = []
        for place in places:
            fits = [i for i, request in enumerate(running) if request.next == place and i not in found] if place else []
            if len(fits) > 1:
                raise InputError(_unclear(one, place))
            found.append(fits[0] if fits else None)
        return found
    # The earliest and the latest way to find the places in order among the running requests: one, or it is not known.
    early, at = [], 0
    for place in places:
        at = next((i for i in range(at, len(running)) if running[i].next == place), -1)
        if at < 0:
            raise InputError(f"pass {one.number}: no running request is at position {place}; a pass is missing")
        early.append(at)
        at += 1
    late: list[int] = []
    at = len(running) - 1
    for place in reversed(places):
        at = next((i for i in range(at, -1, -1) if running[i].next == place), -1)
        late.insert(0, at)
        at -= 1
    if early != late:
        odd = next(place for place, a, b in zip(places, early, late, strict=True) if a != b)
        raise InputError(_unclear(one, odd))
    return list(early)


def _unclear(one: _Pass, place: int) -> str:
    return (
        f"pass {one.number}: several requests are at position {place} and one of them has ended; request ids are "
        f"missing, by which they could be told apart: {_INSTEAD}"
    )


def _recognises(source: Source) -> bool:
    return source.nature == "torch" and source.torch_keys >= {"records", "forward_pass_id"}


FORM = Form("sglang-recorder", "SGLang's recorder of experts (.pt, per_token)", _recognises, _read, together=True)
