"""Store hidden states in a few bytes: one projection a model, then small integers with one scale a level.

Level 0 is the embedding layer's output, level 1 + l the router input of routed layer l. The projection keeps the
directions with the most energy of unit-length states (uncentred PCA, so that cosines survive). The first few, where
what all tokens have in common lies, are kept as they are in 8 bits; the others are turned by a seeded random rotation:
energy is spread over them alike and a uniform quantiser of very few bits serves each. Coordinates are divided by the
level's scale and rounded to -m..m, m = 2^(bits-1) - 1 (127 for the first few); the scale is the step with the least
squared error on a normal variable with the deviation of the turned coordinates.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.files import atomic_path
from traces.array_library import alike, beside, library, numbers, on_host
from traces.arrays import read_arrays

STRONG = 8  # directions kept unturned, in 8 bits
_ROWS = 1024  # rows of states in memory at once
_FIT_ROWS = 4000  # rows that the projection is fitted on, spread evenly over those given


@dataclass(frozen=True, eq=False)
class Basis:
    """A model's projection: ``vectors`` (H, D) float32 with orthonormal columns, ``scale`` (L+1,) float32, ``bits``."""

    vectors: np.ndarray
    scale: np.ndarray
    bits: int

    @property
    def dims(self) -> int:
        """D, dimensions kept."""
        return int(self.vectors.shape[1])

    @property
    def limits(self) -> np.ndarray:
        """(D,) largest stored integer of each dimension."""
        return np.where(np.arange(self.dims) < STRONG, 127, largest(self.bits))

    @property
    def sha256(self) -> str:
        """Hash of all that decides what is stored."""
        parts = (np.ascontiguousarray(array, "<f4").tobytes() for array in (self.vectors, self.scale))
        return hashlib.sha256(b"".join(parts) + bytes([self.bits])).hexdigest()

    def quantise(self, states: Any, level: int | None = None) -> np.ndarray:
        """States (n, L+1, H), or (n, H) of one level, as int8 of the same leading shape and D columns.

        They are worked on where they lie: NumPy arrays, or tensors.
        """
        xp, stored = library(states), np.empty((*states.shape[:-1], self.dims), np.int8)
        scale = self.scale[:, None] if level is None else self.scale[level : level + 1]
        vectors, scale, limits = (beside(one, states) for one in (self.vectors, scale, self.limits))
        for start in range(0, len(states), _ROWS):
            projected = numbers(states[start : start + _ROWS]) @ vectors
            whole = xp.clip(xp.round(projected / scale), -limits, limits)
            stored[start : start + _ROWS] = on_host(numbers(whole, "int8"))
        return stored

    def save(self, path: str | Path) -> None:
        """Write the basis to exactly this name."""
        with atomic_path(path) as part, part.open("wb") as handle:
            np.savez_compressed(handle, vectors=self.vectors, scale=self.scale, bits=np.int32(self.bits))

    @staticmethod
    def load(path: str | Path) -> "Basis":
        """Read a basis; InputError names the file and what is wrong with it."""
        arrays, _ = read_arrays(path)
        if set(arrays) != {"vectors", "scale", "bits"}:
            raise InputError(f"{path}: holds {', '.join(arrays)}; a basis holds vectors, scale and bits")
        basis = Basis(arrays["vectors"].astype(np.float32), arrays["scale"].astype(np.float32), int(arrays["bits"]))
        if basis.vectors.ndim != 2 or basis.scale.ndim != 1 or not 2 <= basis.bits <= 8:
            raise InputError(f"{path}: vectors {basis.vectors.shape}, scale {basis.scale.shape}, bits {basis.bits}")
        if not (np.isfinite(basis.vectors).all() and np.isfinite(basis.scale).all() and (basis.scale > 0).all()):
            raise InputError(f"{path}: vectors and scales must be finite, scales above 0")
        return basis

    def check_for(self, hidden: int, levels: int) -> None:
        """Raise InputError unless this is a basis of states (levels, hidden)."""
        if self.vectors.shape[0] != hidden or len(self.scale) != levels:
            raise InputError(
                f"the basis is for {self.vectors.shape[0]} hidden units and {len(self.scale)} levels; expected "
                f"{hidden} and {levels}"
            )


def check_size(dims: int, bits: int, hidden: int) -> None:
    """Raise InputError unless states of ``hidden`` numbers can be stored as ``dims`` integers of ``bits`` bits."""
    if not 2 <= dims <= hidden or not 2 <= bits <= 8:
        raise InputError(f"embedding {dims}x{bits}: dims lie in 2..{hidden}, bits in 2..8")


def fit(states: Sequence[Any], dims: int, bits: int, seed: int = 0) -> Basis:
    """The basis of a model from the states (n, L+1, H) of one or more texts.

    A function of its arguments. Raises InputError if dims is not in 2..H, bits not in 2..8, or a state is not finite.
    """
    check_size(dims, bits, states[0].shape[2])
    directions = principal_directions(states)
    return narrowed(directions, states, dims, bits, seed)


def principal_directions(states: Sequence[Any]) -> np.ndarray:
    """(H, H) float32, columns by falling energy of the states after each is brought to length 1."""
    hidden, xp = states[0].shape[2], library(states[0])
    moment = beside(np.zeros((hidden, hidden)), states[0])
    for block in _sampled(states):
        flat = block.reshape(-1, hidden)
        if not bool(xp.isfinite(flat).all()):
            raise InputError("a captured state holds a value that is not finite")
        length = xp.linalg.norm(flat, axis=1, keepdims=True)
        unit = flat / xp.where(length > 0, length, 1)
        moment += unit.T @ unit
    vectors = on_host(xp.linalg.eigh(moment)[1])[:, ::-1]
    return np.ascontiguousarray(vectors, np.float32)


def narrowed(directions: np.ndarray, states: Sequence[Any], dims: int, bits: int, seed: int = 0) -> Basis:
    """The basis of the first ``dims`` directions, rotated, with the scales that suit ``states``."""
    vectors = np.array(directions[:, :dims], np.float32)
    weak = min(STRONG, dims - 1)  # the first turned direction; the last one stands for all if there are few
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((dims - weak, dims - weak)))[0]
    vectors[:, weak:] = vectors[:, weak:] @ turn
    levels, xp = states[0].shape[1], library(states[0])
    total, peak, count = np.zeros(levels), np.zeros(levels), 0
    turned = beside(vectors, states[0])
    for block in _sampled(states):
        projected = block @ turned
        total += on_host((numbers(projected[:, :, weak:], "float64") ** 2).mean(axis=2).sum(axis=0))
        peak = np.maximum(peak, on_host(xp.amax(abs(projected[:, :, :weak]), axis=(0, 2))))
        count += len(block)
    # The strong directions must not be cut off for the sake of a fine step: their largest value fits in 8 bits.
    scale = np.maximum(np.sqrt(total / count) * best_step(largest(bits)), peak / 127)
    # A level that is all zero needs some scale; any will do.
    return Basis(vectors, np.where(scale > 0, scale, 1).astype(np.float32), bits)


def largest(bits: int) -> int:
    """Largest integer of a quantiser with 2^bits - 1 levels centred on 0."""
    return 2 ** (bits - 1) - 1


def best_step(limit: int) -> float:
    """Step of the uniform quantiser with levels -limit..limit that has the least squared error on N(0, 1).

    The error of one cell is an integral with a closed form; the best step is found by golden-section search.
    Known: 1.224 for 3 levels, 0.651 for 7 (Max, "Quantizing for minimum distortion", 1960).
    """
    low, high = 1e-3, 3.0
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        if _squared_error(one, limit) < _squared_error(two, limit):
            high = two
        else:
            low = one
    return (low + high) / 2


def _squared_error(step: float, limit: int) -> float:
    """E[(x - round(x))^2] for x ~ N(0, 1): for a cell (a, b) with value c, (1 + c^2) P - 2 c M1 + boundary terms."""
    total = 0.0
    for k in range(-limit, limit + 1):
        a = -math.inf if k == -limit else (k - 0.5) * step
        b = math.inf if k == limit else (k + 0.5) * step
        c = k * step
        mass = (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2
        first = _density(a) - _density(b)
        second = mass + (0 if math.isinf(a) else a * _density(a)) - (0 if math.isinf(b) else b * _density(b))
        total += second - 2 * c * first + c * c * mass
    return total


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _sampled(states: Sequence[Any]) -> list[Any]:
    """At most _FIT_ROWS rows, spread evenly, in blocks that fit in memory."""
    every = max(1, math.ceil(sum(len(array) for array in states) / _FIT_ROWS))
    rows = [array[::every] for array in states]
    return [alike(array[at : at + _ROWS], states[0]) for array in rows for at in range(0, len(array), _ROWS)]
