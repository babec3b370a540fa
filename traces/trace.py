"""The Trace: which experts every token of a real run took at every layer, and what they were taken with."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from ground.files import atomic_path
from traces.arrays import at, integers, named, read_arrays, refuse, shown
from traces.npz_writer import write_npz
from traces.schema import (
    DECODE,
    DTYPES,
    FILE_ARRAYS,
    OPTIONAL,
    OPTIONAL_ROW_ARRAYS,
    PREDICTED,
    ROW_ARRAYS,
    SEQUENCE_ARRAYS,
    TraceArrays,
)
from traces.validation import check_meta, validate

if TYPE_CHECKING:
    import pandas

__all__ = ["Trace", "validate"]


class Trace(TraceArrays):
    """The arrays of a trace and what is done with them as a whole: read, write, split, join."""

    def select(self, split: str | None = None, domains: Sequence[str] | None = None) -> Trace:
        """Sequences of one split (None or "all": both) and of some domains (None: all), renumbered from 0.

        ``source`` and ``sha256`` stay, as provenance. Raises InputError for an unknown split and if nothing is left.
        """
        if split not in (None, "all", "profile", "eval"):
            raise InputError(f"split {split!r}: expected profile, eval or all")
        keep = np.ones(self.n_sequences, bool) if split in (None, "all") else self.split == split
        if domains is not None:
            keep = keep & np.isin(self.domain, list(domains))
        if not keep.any():
            have = ", ".join(sorted({f"{d} ({s})" for d, s in zip(self.domain, self.split, strict=True)}))
            wanted = f"split {split or 'all'}" + ("" if domains is None else f" of domains {', '.join(domains)}")
            raise InputError(f"{self.source or 'trace'}: no sequence in {wanted}; it has {have:.200}")
        return self.keep(keep)

    def keep(self, keep: np.ndarray) -> Trace:
        """The sequences for which ``keep`` (S,) bool is True, renumbered from 0; at least one must be."""
        return self if keep.all() else self.take(np.flatnonzero(keep))

    def take(self, order: np.ndarray) -> Trace:
        """The sequences ``order`` (n,), each at most once, whole and in that order, renumbered from 0."""
        lengths = np.diff(self.offsets)[order]
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(lengths.sum()) + np.repeat(self.offsets[order] - starts, lengths)
        arrays = {n: getattr(self, n)[rows] for n in ROW_ARRAYS}
        arrays |= {n: getattr(self, n)[order] for n in SEQUENCE_ARRAYS}
        arrays |= {n: a[rows] for n in OPTIONAL_ROW_ARRAYS if (a := getattr(self, n)) is not None}
        arrays["sequence"] = np.repeat(np.arange(len(order), dtype=np.int32), lengths)
        decoding = self.phase == DECODE
        for name, kind in (("embeddings", decoding), ("prefill_embeddings", ~decoding)):
            if (array := getattr(self, name)) is not None:
                arrays[name] = array[(np.cumsum(kind) - 1)[rows[kind[rows]]]]
        return dataclasses.replace(self, **arrays)

    def to_frame(self) -> pandas.DataFrame:
        """A row for each token and routed layer, T * L, in the trace's order.

        Columns: row (index into the trace's rows), layer (model layer number), token, sequence (its id), position,
        phase, domain, split, the experts e0, e1, ... in router order (-1: none) and, where the trace has them, their
        gates gate0, gate1, ... Raises ModuleNotFoundError where pandas is not installed.
        """
        import pandas

        def each(per_row: np.ndarray) -> np.ndarray:
            return np.repeat(per_row, self.n_layers)

        columns = {
            "row": each(np.arange(self.n_rows)),
            "layer": np.tile(self.layers, self.n_rows),
            "token": each(self.token),
            "sequence": each(self.sequence_id[self.sequence]),
            "position": each(self.position),
            "phase": each(np.array(["prefill", "decode"])[self.phase]),
            "domain": each(self.domain[self.sequence]),
            "split": each(self.split[self.sequence]),
        }
        for name, array in (("e", self.experts), ("gate", self.gates)):
            if array is not None:
                columns |= {f"{name}{place}": array[:, :, place].reshape(-1) for place in range(array.shape[2])}
        return pandas.DataFrame(columns)

    @staticmethod
    def concat(traces: Sequence[Trace]) -> Trace:
        """One trace of all sequences of several traces of the same model, in order.

        An optional array stays where every trace has it in the same form; else it is left out, with a note in
        meta.notes. Raises InputError if model, layers, experts or top_k differ, or a sequence id is there twice.
        """
        if not traces:
            raise InputError("concat: no trace given")
        if len(traces) == 1:
            return traces[0]
        head = traces[0]
        for other in traces[1:]:
            _check_same_model(head, other)
        per_row = (*ROW_ARRAYS, *SEQUENCE_ARRAYS)
        arrays: dict[str, Any] = {n: np.concatenate([getattr(t, n) for t in traces]) for n in per_row}
        starts = np.cumsum([0, *(t.n_sequences for t in traces)])
        arrays["sequence"] = np.concatenate(
            [t.sequence + np.int32(start) for t, start in zip(traces, starts, strict=False)]
        )
        notes = list(dict.fromkeys(note for t in traces for note in t.meta.get("notes", [])))
        embedded: tuple[tuple[str, ...], ...] = (("embeddings",), ("prefill_embeddings",))
        for group in (("gates",), ("probs", "prob_experts"), ("lookahead",), PREDICTED, *embedded):
            values = [[getattr(t, n) for n in group] for t in traces]
            if len({_form(t, group) for t in traces}) == 1:
                columns = zip(group, zip(*values, strict=True), strict=True)
                arrays |= {n: np.concatenate(parts) for n, parts in columns if parts[0] is not None}
            else:
                notes.append(f"{group[0]} left out: the joined traces do not all have it in one form")
        if "embeddings" in arrays or "prefill_embeddings" in arrays:
            arrays["embedding_scale"] = head.embedding_scale
        optional = dict.fromkeys(OPTIONAL) | {n: a for n, a in arrays.items() if n in OPTIONAL}
        meta = head.meta | {"notes": notes, "joined": [_origin(t) for t in traces]}
        joined = dataclasses.replace(head, **(arrays | optional), meta=meta, source="", sha256="")
        validate(joined)
        return joined

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read and validate a trace file.

        Integer arrays of any width and byte order, and float gates, are accepted and converted after a range check;
        ``experts`` of shape (T, L) is read as K = 1. Peak memory stays below twice the arrays as stored. Raises
        InputError, one line with path, array, row and value.
        """
        stored, sha256 = read_arrays(path, known=FILE_ARRAYS)
        name = shown(path)
        with named(name):
            for required in ("meta", "layers", *ROW_ARRAYS, *SEQUENCE_ARRAYS):
                if required not in stored:
                    raise InputError(f"array {required!r} is missing")
            meta = _parse_meta(stored.pop("meta"))
            # Each array is dropped as soon as it is converted, so that wide ids never pile up in memory.
            arrays = {array: _stored(array, stored.pop(array), meta) for array in list(stored)}
        trace = Trace(meta=meta, **arrays, source=name, sha256=sha256)
        validate(trace)
        return trace

    @staticmethod
    def load_meta(path: str | Path) -> dict[str, Any]:
        """``meta`` of a trace file alone, checked as :meth:`load` does: what it is of, without reading the arrays."""
        stored, _ = read_arrays(path, known=FILE_ARRAYS, only=frozenset({"meta"}))
        with named(shown(path)):
            if "meta" not in stored:
                raise InputError("array 'meta' is missing")
            return _parse_meta(stored["meta"])

    def save(
        self, path: str | Path, *, tight: bool = False, seen: Callable[[float], None] = lambda share: None
    ) -> None:
        """Validate, then write the trace to exactly this name; a killed or failed save leaves the old file.

        ``tight`` packs ids in 8 bits where they fit and everything with LZMA: a third smaller, slower to read, and
        still what ``numpy.load`` reads. Equal traces give equal bytes. ``seen`` is told the share that is written, 0 to
        1. Raises InputError if the trace is not valid, OSError if the folder is not there.
        """
        validate(self)
        arrays = {n: a for n in (*DTYPES, *SEQUENCE_ARRAYS) if (a := getattr(self, n)) is not None}
        text = json.dumps(self.meta, allow_nan=False, sort_keys=True)
        with atomic_path(path) as part, part.open("wb") as handle:
            (_pack if tight else write_npz)(handle, {"meta": np.array(text), **arrays}, seen)


def _pack(handle: IO[bytes], arrays: Mapping[str, np.ndarray], seen: Callable[[float], None]) -> None:
    """Write an .npz of LZMA members, as dates and systems do not change it."""
    with zipfile.ZipFile(handle, "w") as archive:
        for name, array in arrays.items():
            narrow = array.dtype == np.int16 and array.max(initial=0) < 128
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_LZMA
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array.astype(np.int8) if narrow else array, allow_pickle=False)
            seen(len(archive.filelist) / len(arrays))


def _parse_meta(stored: np.ndarray) -> dict[str, Any]:
    """The meta object of its stored form: a 0-d text or UTF-8 bytes."""

    def refuse_constant(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if stored.dtype.kind == "U" and stored.ndim == 0:
        text: str | bytes = str(stored)
    elif stored.dtype == np.uint8 and stored.ndim == 1:
        text = stored.tobytes()
    else:
        raise InputError(f"array 'meta': dtype {stored.dtype} of shape {stored.shape}, expected JSON text")
    try:
        meta = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise InputError(f"array 'meta': not JSON: {error}") from None
    except RecursionError:
        raise InputError("array 'meta': nested too deep") from None
    check_meta(meta)
    return dict(meta)


def _stored(name: str, array: np.ndarray, meta: dict[str, Any]) -> np.ndarray:
    """A stored array in the dtype of Trace; values that do not fit are refused, never wrapped."""
    if name in SEQUENCE_ARRAYS:
        return array.astype(array.dtype.newbyteorder("=")) if array.dtype.kind == "U" else array
    if name in ("experts", "gates", "lookahead", *PREDICTED) and array.ndim == 2:
        array = array[:, :, None]
    dtype = np.dtype(DTYPES[name])
    if dtype.kind == "f":
        return _floats(name, array, dtype)
    if name == "experts":
        note_width(array, meta["model"]["experts"], f"array {name!r}", meta)
    if name in ("embeddings", "prefill_embeddings") and array.dtype.kind == "f":
        raise InputError(f"array {name!r}: dtype {array.dtype}, expected int8 (quantised, with embedding_scale)")
    return np.ascontiguousarray(integers(array, dtype, f"array {name!r}"))


def note_width(ids: np.ndarray, experts: int, where: str, meta: dict[str, Any]) -> None:
    """Note in ``meta["notes"]`` that ids of a model of ``experts`` had 8 bits; refuse those that are read in two ways.

    In unsigned 8 bits a filler of -1 reads as 255, in signed 8 bits 255 reads as -1, and ids from 256 have wrapped.
    """
    if ids.dtype.kind not in "iu" or ids.dtype.itemsize > 1 or experts < 256:
        return
    unclear, other = (255, "-1 (none)") if ids.dtype.kind == "u" else (-1, "expert 255")
    words = f"{unclear} in 8 bits may be {other} of {experts} experts, expected 16-bit ids"
    refuse(ids == unclear, lambda *index: f"{where}{at(*index)}: {words}")
    if experts > 256:
        meta["notes"] = list(dict.fromkeys([*meta.get("notes", []), narrow_note(experts)]))


def narrow_note(experts: int) -> str:
    """What to say of 8-bit ids in a model of more than 256 experts."""
    return f"ids were stored in 8 bits though the model has {experts} experts: ids from 256 would have wrapped"


def _floats(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype.kind != "f":
        raise InputError(f"array {name!r}: dtype {array.dtype}, expected floats")
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    refuse(
        np.abs(array) > np.finfo(dtype).max,
        lambda *index: f"array {name!r}{at(*index)}: {array[index]} does not fit in {dtype}",
    )
    return np.ascontiguousarray(array.astype(dtype))


def _check_same_model(one: Trace, other: Trace) -> None:
    """Raise InputError unless both traces record the same layers, experts, top_k and expert sizes of one model."""
    for what, value in {
        "model": lambda t: t.meta["model"]["name"],
        "experts": lambda t: t.n_experts,
        "top_k": lambda t: t.top_k,
        "layers": lambda t: t.layers.tolist(),
        "expert_bytes": lambda t: t.meta["model"].get("expert_bytes"),
    }.items():
        a, b = value(one), value(other)
        if a != b:
            pair = f"{one.source or 'the first'} has {a!s:.60}, {other.source or 'a later one'} has {b!s:.60}"
            raise InputError(f"traces of different {what} cannot be joined: {pair}")


def _form(trace: Trace, group: Sequence[str]) -> str:
    """What must agree before arrays of several traces may stand below each other, as text."""
    arrays = [getattr(trace, name) for name in group]
    shapes = [None if array is None else array.shape[1:] for array in arrays]
    if arrays[0] is not None and group == PREDICTED:
        return repr((shapes, trace.meta["predictor"]["sha256"]))
    if arrays[0] is None or "embeddings" not in group[0]:
        return repr(shapes)
    about = trace.meta.get("embedding", {})
    scale = [] if trace.embedding_scale is None else trace.embedding_scale.tolist()
    return repr((shapes, scale, about.get("basis_sha256"), about.get("prefill_layer")))


def _origin(trace: Trace) -> dict[str, Any]:
    """Where a joined trace came from."""
    about = {key: trace.meta[key] for key in ("captured", "text") if key in trace.meta}
    return {"source": trace.source, "sha256": trace.sha256} | about
