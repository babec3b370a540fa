"""Route traces of BigMoeOnEdge (https://github.com/Helldez/BigMoeOnEdge, ``--route-trace``).

A CSV with a line for each turn, phase, step, layer and slot; lines before it say what the model is.
"""

import csv
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from itertools import groupby
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.arrays import refuse
from traces.convert.form import Form
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
_ROW = np.dtype([(name, "f4" if name == "weight" else "i4") for name in _COLUMNS])
_MOST_SLOTS = 1024  # more than any model's experts a token


def _read(sources: Sequence[Source], given: Given) -> Record:
    source = sources[0]
    about, sizes = _preamble(source)
    layers, slots = sorted(sizes), int(about.get("n_expert_used", 0))
    record = Record(
        (), experts=int(about["n_expert"]) if "n_expert" in about else None, reduced=True, buffers=False,
        captured="as a device ran it", hardware="a device streaming experts", split="eval",
        expert_bytes=[sizes[layer] for layer in layers] if sizes else None,
    )  # fmt: skip
    if not layers or not slots:
        found = {(row[3], row[4]) for row in _rows(source)}
        layers = layers or sorted({layer for layer, _ in found})
        slots = slots or len({slot for _, slot in found})
    if not 0 < slots <= _MOST_SLOTS:
        raise InputError(f"{slots} experts a token, expected 1 to {_MOST_SLOTS}")
    record.layers = np.array(layers)

    def requests() -> Iterator[Request]:
        start = skipped = 0
        for turn, rows in groupby(_rows(source), lambda row: row[0]):
            request = _turn(turn, np.fromiter(rows, _ROW), np.array(layers), slots, start)
            start += len(request.routes)
            skipped += int((request.routes < 0).all(axis=2).sum())
            yield request
        if skipped:
            record.notes.append(f"{skipped} (token, layer) pairs have no route: the device did not run them")

    record.requests = requests()
    return record


def _turn(turn: int, rows: np.ndarray, layers: np.ndarray, slots: int, start: int) -> Request:
    """One turn: the prompt's new tokens, then those that were generated; it begins where the turn before ended."""
    phase, step, layer, slot = (rows[name].astype(np.int64) for name in ("phase", "step", "layer", "slot"))
    refuse(
        ~np.isin(layer, layers) | (slot < 0) | (slot >= slots) | (phase < 0) | (phase > 1) | (step < 0),
        lambda i: f"turn {turn}, step {step[i]}: phase {phase[i]}, layer {layer[i]}, slot {slot[i]} of {slots}",
    )
    steps, place = np.unique(phase * 2**32 + step, return_inverse=True)
    gaps = np.diff(steps)
    refuse(
        (gaps != 1) & (steps[1:] >> 32 == steps[:-1] >> 32),
        lambda i: (
            f"turn {turn}, phase {steps[i] >> 32}: step {steps[i + 1] % 2**32} after {steps[i] % 2**32}: lines are "
            "missing"
        ),
    )
    shape = len(steps), len(layers), slots
    where = np.ravel_multi_index((place, np.searchsorted(layers, layer), slot), shape)
    _, first, times = np.unique(where, return_index=True, return_counts=True)
    refuse(
        times > 1,
        lambda i: f"turn {turn}, step {step[first[i]]}, layer {layer[first[i]]}: slot {slot[first[i]]} is there twice",
    )
    routes, gates = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    routes.reshape(-1)[where], gates.reshape(-1)[where] = rows["expert"], rows["weight"]
    early = int((steps >> 32 == 0).sum())
    last = np.flatnonzero((routes[:early, -1] >= 0).any(axis=1))
    alone = len(last) == 1 < early  # the last layer needs the prompt's last token only, and may count it as its first
    if alone and len(steps) == 2:
        raise InputError(f"turn {turn}: ends in its prompt's second token: was the file cut off?")
    if alone:
        for array in (routes, gates):
            array[[early - 1, last[0]], -1] = array[[last[0], early - 1], -1]
    taken = (routes >= 0).sum(axis=2)
    may_lack = np.zeros(taken.shape, bool)
    may_lack[: early - 1, -1] = alone
    refuse(
        (taken != slots) & ~((taken == 0) & may_lack),
        lambda row, at: (
            f"turn {turn}, phase {steps[row] >> 32}, step {steps[row] % 2**32}, layer {layers[at]}: {taken[row, at]} "
            f"experts, expected {slots}"
        ),
    )
    known = not np.isnan(gates).any()
    return Request(
        routes, gates=gates if known else None, prompt=start + early, start=start or None, where=f"turn {turn}"
    )


def _preamble(source: Source) -> tuple[dict[str, str], dict[int, int]]:
    """What the lines before the table say of the model, and the bytes of an expert of each layer."""
    about: dict[str, str] = {}
    sizes: dict[int, int] = {}
    with source.path.open(encoding="utf-8") as text:
        for line in text:
            if not line.startswith("#"):
                break
            said = dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
            if "expert_bytes" in said:
                if int(said["expert_bytes"]):  # 0 of a dense layer
                    sizes[int(said["layer"])] = int(said["expert_bytes"])
            else:
                about |= said
    return about, sizes


def _rows(source: Source) -> Iterator[tuple[Any, ...]]:
    """(turn, phase, step, layer, slot, expert, weight) of each line."""
    with TextIOWrapper(source.open(), "utf-8", newline="") as text:
        lines = csv.reader(line for line in text if not line.startswith("#"))
        columns = next(lines)
        places = [columns.index(name) for name in _COLUMNS]
        for number, cells in enumerate(lines):
            if len(cells) != len(columns):
                raise InputError(f"row {number}: {len(cells)} cells, expected {len(columns)}: was the file cut off?")
            try:
                *whole, weight = (cells[place] for place in places)
                yield (*map(int, whole), float(weight))
            except ValueError as error:
                raise InputError(f"row {number}: {error}") from None


FORM = Form(
    "edge", "a route trace of BigMoeOnEdge (CSV)",
    lambda source: source.nature == "csv" and set(_COLUMNS) <= set(source.columns), _read,
)  # fmt: skip
