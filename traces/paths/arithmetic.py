"""Arithmetic on float32 arrays, as loops that a compiler turns into eight numbers at a time.

Compiled and run by Python they give the same bits. Constants have 32 bits, since one of 64 would make the numbers
around it wider.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba.extending import register_jitable

    def shared(function: F) -> F:
        """A function that compiled functions and Python call; compiled, it divides by 0 as NumPy does."""
        made: F = register_jitable(error_model="numpy")(function)
        return made

except ImportError:  # a plain install

    def shared(function: F) -> F:
        """A function that Python calls."""
        return function


NONE, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
_LOG2_E, _LN_2, _ROOT = np.float32(1.4426950408889634), np.float32(0.6931471805599453), np.float32(1.4142135623730951)
_E2, _E3, _E4, _E5 = (np.float32(1 / n) for n in (2, 6, 24, 120))
_L3, _L5, _L7 = (np.float32(1 / n) for n in (3, 5, 7))
_FARTHEST, _MIDDLE, _HALVES = np.float32(30), np.float32(128.5), np.float32(126.5)
_SHIFT, _BIAS, _MANTISSA = np.int32(128), np.int32(127), np.int32(23)
_FRACTION, _FROM_ONE = np.int32(0x7FFFFF), np.int32(0x3F800000)


@shared
def to_chances(x: np.ndarray) -> None:
    """Put 1 / (1 + e^-x) in the place of x (n,); beyond 30 as at 30. Error below 1e-6."""
    bits = np.empty(len(x), np.int32)
    for i in range(len(x)):
        near = min(max(-x[i], -_FARTHEST), _FARTHEST)
        power = np.int32(near * _LOG2_E + _MIDDLE) - _SHIFT
        rest = near - np.float32(power) * _LN_2
        x[i] = ONE + rest * (ONE + rest * (_E2 + rest * (_E3 + rest * (_E4 + rest * _E5))))
        bits[i] = np.int32(power + _BIAS) << _MANTISSA
    scale = bits.view(np.float32)
    for i in range(len(x)):
        x[i] = ONE / (ONE + x[i] * scale[i])


@shared
def to_logarithms(x: np.ndarray) -> None:
    """Put its natural logarithm in the place of x (n,), all positive. Error below 1e-6 where x is near 1."""
    bits, parts = x.view(np.int32), np.empty(len(x), np.int32)
    for i in range(len(x)):
        parts[i] = (bits[i] & _FRACTION) | _FROM_ONE
    part = parts.view(np.float32)
    for i in range(len(x)):
        ratio = (part[i] - _ROOT) / (part[i] + _ROOT)  # the series is short around the root of 2
        square = ratio * ratio
        series = TWO * ratio * (ONE + square * (_L3 + square * (_L5 + square * _L7)))
        x[i] = (np.float32(np.int32(bits[i] >> _MANTISSA)) - _HALVES) * _LN_2 + series


@shared
def add(into: np.ndarray, x: np.ndarray) -> None:
    """Add x (n,) in place."""
    for i in range(len(into)):
        into[i] += x[i]


@shared
def add_scaled(into: np.ndarray, factor: Any, x: np.ndarray) -> None:
    """Add so many times x (n,) in place."""
    for i in range(len(into)):
        into[i] += factor * x[i]


@shared
def fill(into: np.ndarray, value: Any) -> None:
    """Write one value everywhere."""
    for i in range(len(into)):
        into[i] = value


@shared
def descend(weights: np.ndarray, sums: np.ndarray, rate: Any, slope: np.ndarray) -> None:
    """A step of AdaGrad on weights (n,); ``sums`` are their squared slopes so far."""
    for i in range(len(weights)):
        sums[i] += slope[i] * slope[i]
        weights[i] -= rate * slope[i] / np.sqrt(sums[i])


@shared
def inner(x: np.ndarray, y: np.ndarray) -> Any:
    """The sum of the products of x and y (n,), one after another."""
    total = NONE
    for i in range(len(x)):
        total += x[i] * y[i]
    return total
