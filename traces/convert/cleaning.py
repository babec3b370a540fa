"""Requests made into a trace, one after another: what is no routing never counts as routing.

An engine runs n prompt tokens and m sampled ones but not the last of these, so a request has n + m - 1 rows. Buffers
are padded with -1, zeros or, where they are unsigned 8 bits, 255; the last row of a turn may be a dummy; turns of a
conversation may each contain all earlier ones. Such rows are dropped with a note or the record is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.arrays import at, integers, refuse
from traces.assemble import assemble
from traces.convert.model import RecordShape, recorded_shape
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.states import embedded
from traces.convert.turns import Turn, join_conversations
from traces.spool import Spool
from traces.trace import Trace, narrow_note
from traces.validation import repeated

# Rows of this many ids are never equal by chance.
_ROW_IDS = 8
# The model is told from the first requests, of so many rows.
_HEAD_ROWS = 4096
_STORED = {"experts": np.int16, "gates": np.float16, "probs": np.uint8, "states": np.float32}

_SKIPPED = "its route (an engine's prefix cache skips tokens that it has seen)"
_DROPPED = {
    "filler": "{} filler rows at the end of requests were dropped",
    "padding": "{} filler rows before the first real one of a padded request were dropped",
    "copied": "{} last rows were copies of the row before, for a token that was never run: dropped",
    "doubtful": "{} requests have as many rows as tokens though the last sampled token is not run; rows kept",
    "unknown": "no prompt length is known of {} requests: all their rows are read as decode",
    "late": "{} sequences begin after position 0: the rows before are an earlier turn's, or were not recorded",
}


def trace_of(
    record: Record, given: Given, stem: str, *, folder: Path | None = None, seen: Callable[[int], None] | None = None
) -> Trace:
    """The trace of a record. Rows wait in files without a name in ``folder``; ``seen`` is told how many requests came.

    Raises InputError naming request or array, row, and value.
    """
    notes: list[str] = []
    requests = iter(record)
    head = _head(requests)
    shape = recorded_shape(record, given, head, notes)
    cleaning = _Cleaning(record, shape, folder)
    for number, request in enumerate(chain(head, requests)):
        cleaning.add(number, request)
        if seen is not None:
            seen(number + 1)
    turns = cleaning.turns()
    notes += cleaning.notes()
    sequences, last = join_conversations(turns, notes)
    domain = [given.domain or turns[i].domain or stem for i in last]
    arrays = _joined(sequences, turns, cleaning, folder)
    states, probs = arrays.pop("states", None), arrays.pop("probs", None)
    trace = assemble(
        meta=_meta(record, shape, given, [*notes, *record.notes]), layers=shape.layers,
        lengths=np.array([len(s) for s in sequences]), prefill=np.array([s.prefill for s in sequences]),
        start=np.array([s.start or 0 for s in sequences]), domain=np.array(domain),
        sequence_id=np.array([turns[i].name or f"{stem}/{n}" for n, i in enumerate(last)]),
        token=None if sequences[0].tokens is None else np.concatenate([s.tokens for s in sequences]),
        split=None if record.split is None else np.full(len(sequences), record.split), probs=probs, **arrays,
    )  # fmt: skip
    return trace if states is None else embedded(trace, states, folder)


def _head(requests: Iterator[Request]) -> list[Request]:
    """The first requests, until they have enough rows to tell their model by."""
    head: list[Request] = []
    rows = 0
    while rows < _HEAD_ROWS and (request := next(requests, None)) is not None:
        head.append(request)
        rows += len(request.routes)
    if not head:
        raise InputError("holds no request with routes, expected at least one")
    return head


def _meta(record: Record, shape: RecordShape, given: Given, notes: list[str]) -> dict[str, Any]:
    model = shape.model.meta(shape.experts, shape.slots)
    return {
        "schema": 1,
        "model": model if record.expert_bytes is None else model | {"expert_bytes": record.expert_bytes},
        "captured": {"what": f"{model['name']}, {record.captured}"},
        "text": {"source": given.source or "not stated", "licence": given.licence or "not stated"},
        "decoding": {"mode": record.decoding},
        "hardware": record.hardware,
        "notes": notes,
    }


@dataclass
class _Place:
    """A cleaned request: where its rows lie in the spools, and the rest of its turn."""

    first: int
    rows: int
    turn: Turn


class _Cleaning:
    """Cleans requests as they come and keeps their rows in files."""

    def __init__(self, record: Record, shape: RecordShape, folder: Path | None) -> None:
        self._shape, self._buffers, self._folder = shape, record.buffers, folder
        self._places: list[_Place] = []
        self._count: Counter[str] = Counter()
        self._narrow = False
        self.spools = {"experts": Spool(np.int16, folder)}

    def add(self, number: int, request: Request) -> None:
        """Clean one request; raises InputError."""
        stored = self._shape.routed(request)
        filler = self._filler(stored)
        routes = self._ids(stored, filler, request)
        first, end = self._real(number, request, filler)
        tokens = _tokens(request)
        mine, unsure = routes[first:end], False
        if tokens is not None and self._buffers and len(tokens) == len(routes) == end - first > 1:
            # As many rows as tokens: the last token was sampled and not run, so its row cannot be real.
            copy = mine[0].size >= _ROW_IDS and bool((mine[-1] == mine[-2]).all())
            self._count["copied" if copy else "doubtful"] += 1
            end, unsure = end - copy, not copy
        prompt = self._prompt(number, request, end - first)
        rows = {"experts": iter([routes[first:end]])} | {
            name: self._shape.beside(name, request, stored, first, end) for name in request.rows
        }
        place = len(self.spools["experts"])
        self._keep(rows, request)
        turn = Turn(
            {}, None if tokens is None else tokens[first:end], prompt, unsure, request.start, request.conversation,
            request.domain, request.name, self._buffers,
        )  # fmt: skip
        self._count["late"] += request.conversation is None and bool(request.start)
        self._places.append(_Place(place, end - first, turn))

    def _filler(self, stored: np.ndarray) -> np.ndarray:
        """(n,) rows that hold one filler value in every layer and slot: -1, 0, or the 255 that -1 becomes in 8 bits.

        A row of zeros is a route only where k is 1 and layers are few; a row of 255 never is one where k is above 1.
        """
        if not self._buffers:
            return np.zeros(len(stored), bool)
        return filler_rows(stored, self._shape.experts)

    def _ids(self, stored: np.ndarray, filler: np.ndarray, request: Request) -> np.ndarray:
        """(n, L, k) int16 ids, -1 in filler rows; ids out of range or twice in a route are refused."""
        where, experts, left_out = request.where, self._shape.experts, filler[:, None, None]
        narrow, unsigned = stored.dtype.itemsize == 1, stored.dtype.kind == "u"

        def words(row: int, *index: int) -> str:
            return f"{where}{at(request.row + row, *index)}"

        if narrow and unsigned and experts < 256:
            refuse(
                (stored == 255) & ~left_out,
                lambda *index: (
                    f"{words(*index)}: 255 in a model of {experts} experts is -1 in unsigned 8 bits, "
                    "expected ids in 16 bits"
                ),
            )
        if narrow and not unsigned and experts > 128:
            refuse(
                (stored < (0 if self._buffers else -1)) & ~left_out,
                lambda *index: (
                    f"{words(*index)}: {stored[index]} is an id of 128 or more in signed 8 bits "
                    f"({int(stored[index]) + 256}?), expected ids in 16 bits"
                ),
            )
        self._narrow |= narrow and experts > 256
        routes = integers(np.where(left_out, 0, stored) if unsigned else stored, np.int16, where)
        if filler.any():
            routes = np.where(left_out, np.int16(-1), routes)
        refuse(
            (routes < -1) | (routes >= experts),
            lambda *index: (
                f"{words(*index)}: expert {routes[index]}, expected -1 to {experts - 1} ({experts} experts, -1 is none)"
            ),
        )
        refuse(
            repeated(routes),
            lambda *index: f"{words(*index)}: {routes[index].tolist()!s:.80} repeats an expert, expected distinct",
        )
        return routes

    def _real(self, number: int, request: Request, filler: np.ndarray) -> tuple[int, int]:
        """Where the real rows of a request begin and end; filler among them is refused."""
        real = np.flatnonzero(~filler)
        if not len(real):
            raise InputError(f"{request.where}, request {number}: all {len(filler)} rows are filler")
        first, end = int(real[0]) if request.padded else 0, int(real[-1]) + 1
        if len(real) < end - first:
            row = first + int(np.argmax(filler[first:])) + request.row
            raise InputError(
                f"{request.where}, row {row} (request {number}): filler before real rows, expected {_SKIPPED}"
            )
        self._count["filler"] += len(filler) - end
        self._count["padding"] += first
        return first, end

    def _prompt(self, number: int, request: Request, rows: int) -> int:
        """Tokens of the whole prompt; 0, and a note, where it is not known."""
        if request.prompt is None:
            self._count["unknown"] += 1
            return 0
        most = (request.start or 0) + rows
        if self._buffers and not 1 <= request.prompt <= most:
            what = "a prompt of 0 tokens, " if request.prompt == 0 else ""
            where = "" if request.where.startswith("array") else f"{request.where}, "
            raise InputError(
                f"{where}array 'prompt_lens', request {number}: {request.prompt}, {what}expected 1 to {most}, its rows"
            )
        return request.prompt

    def _keep(self, rows: dict[str, Iterator[np.ndarray]], request: Request) -> None:
        if not self._places:
            self.spools |= {name: Spool(_STORED[name], self._folder) for name in rows if name != "experts"}
        if set(rows) != set(self.spools):
            odd = ", ".join(sorted(set(rows) ^ set(self.spools)))
            raise InputError(f"{request.where}: {odd} of some requests only, expected of all or of none")
        for name, parts in rows.items():
            for part in parts:
                self.spools[name].add(part)

    def turns(self) -> list[Turn]:
        """One Turn a request, its rows read from the files."""
        self.arrays = {name: spool.read() for name, spool in self.spools.items()}
        for place in self._places:
            part = slice(place.first, place.first + place.rows)
            place.turn.rows = {name: array[part] for name, array in self.arrays.items()}
        turns = [place.turn for place in self._places]
        if 0 < sum(turn.tokens is None for turn in turns) < len(turns):
            raise InputError("token ids are known of some requests only, expected of all or of none")
        return turns

    def notes(self) -> list[str]:
        """What was dropped, and what is doubtful."""
        found = [words.format(self._count[kind]) for kind, words in _DROPPED.items() if self._count[kind]]
        return [narrow_note(self._shape.experts), *found] if self._narrow else found


def filler_rows(stored: np.ndarray, experts: int) -> np.ndarray:
    """(n,) rows that hold one filler value in every layer and slot, see `_Cleaning._filler`."""
    value = stored[:, 0, 0]
    fillers = [-1] if stored.dtype.kind == "i" else [int(np.iinfo(stored.dtype).max)]
    if (stored.shape[2] > 1 or stored[0].size >= _ROW_IDS) and experts > 1:
        fillers.append(0)
    return np.isin(value, fillers) & (stored == value[:, None, None]).all(axis=(1, 2))


def _tokens(request: Request) -> np.ndarray | None:
    """(n,) or (n + 1,) int32 token ids."""
    if request.tokens is None:
        return None
    tokens = integers(request.tokens.reshape(-1), np.int32, f"{request.where}: token ids")
    if len(tokens) not in (len(request.routes), len(request.routes) + 1):
        raise InputError(
            f"{request.where}: {len(tokens)} tokens for {len(request.routes)} rows of routes, expected as many, or one "
            "more, the last sampled token"
        )
    return tokens


def _joined(
    sequences: list[Turn], turns: list[Turn], cleaning: _Cleaning, folder: Path | None
) -> dict[str, np.ndarray]:
    """The rows of all sequences one after another: as they lie in the files, where no turns were joined."""
    if len(sequences) == len(turns):
        return cleaning.arrays
    spools = {name: Spool(_STORED[name], folder) for name in cleaning.arrays}
    for sequence in sequences:
        for name, spool in spools.items():
            spool.add(sequence.rows[name])
    return {name: spool.read() for name, spool in spools.items()}
