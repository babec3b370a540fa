"""Rows of bfloat16 that lie in a file beside a record, layer by layer: read when they are asked for."""

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ground.errors import InputError
from traces.spool import give_back_pages_of


class Vectors:
    """(n, L, W) float32 of n tokens: those of one step after another, each of which has an (n', W) array a layer."""

    dtype = np.dtype(np.float32)

    def __init__(self, name: str, steps: Sequence[Sequence[np.ndarray]]) -> None:
        self._name, self._steps = name, steps
        self._ends = np.cumsum([len(layers[0]) for layers in steps])
        self.shape = (int(self._ends[-1]), len(steps[0]), int(steps[0][0].shape[1]))
        odd = {array.shape[1] for layers in steps for array in layers} - {self.shape[2]}
        if odd or {len(layers) for layers in steps} != {self.shape[1]}:
            raise InputError(f"{name}: records of {sorted(odd | {self.shape[2]})!s:.60} values, expected one width")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Some rows as an array; raises InputError if one is not finite."""
        start, stop, _ = rows.indices(len(self))
        parts, step = [], int(np.searchsorted(self._ends, start, side="right"))
        while step < len(self._steps) and (first := int(self._ends[step]) - len(self._steps[step][0])) < stop:
            part = slice(max(start - first, 0), stop - first)
            parts.append(np.stack([array[part] for array in self._steps[step]], axis=1))
            step += 1
        if not parts:
            return np.empty((0, *self.shape[1:]), np.float32)
        values = (np.concatenate(parts).astype("<u4") << 16).view("<f4")
        if not np.isfinite(values).all():
            raise InputError(f"{self._name}: a value of rows {start} to {stop - 1} is not finite")
        return values


class Softmax:
    """(n, L, E) float32: the probabilities of logits, made when they are asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, logits: Vectors) -> None:
        self._logits, self.shape = logits, logits.shape

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: slice) -> np.ndarray:
        logits = self._logits[rows].astype(np.float64)
        shifted = np.exp(logits - logits.max(axis=2, keepdims=True, initial=-np.inf))
        return (shifted / shifted.sum(axis=2, keepdims=True)).astype(np.float32)


class Sidecar:
    """A file of bfloat16 numbers, mapped. Raises InputError where it cannot be read."""

    def __init__(self, place: Path, beside: str) -> None:
        self._name = place.name
        self._mapped: mmap.mmap | bytes = b""
        try:
            with place.open("rb") as handle:
                if place.stat().st_size:
                    self._mapped = mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
                    give_back_pages_of(mapped)
        except OSError as error:
            raise InputError(f"{place.name}: cannot be read: {error.strerror}; it lies beside {beside}") from None

    def rows(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        """(n, W) uint16 from byte ``offset`` on; raises InputError where the file ends before."""
        count = shape[0] * shape[1]
        if offset + 2 * count > len(self._mapped):
            raise InputError(f"{self._name}: ends at byte {len(self._mapped)}, expected {2 * count} from {offset}")
        return np.frombuffer(self._mapped, "<u2", count, offset).reshape(shape[0], shape[1])
