"""How a plan is told that a field of it is what no engine could execute."""

from numbers import Integral
from typing import Any

import numpy as np

from ground.errors import InputError


class PlanError(InputError):
    """A plan asks for what cannot be: the policy that made it is at fault. Names the field of the plan."""


def at_fault(field: str, value: object, expected: str) -> PlanError:
    """The error that names a field, what it is and what is expected."""
    return PlanError(f"plan: {field} is {value!r}; expected {expected}")


def check_integers(
    field: str, array: Any, *, dimensions: int = 1, length: int | None = None, end: int | None = None,
    rising: bool = False,
) -> None:  # fmt: skip
    """Raise PlanError, naming the place, unless ``array`` holds integers of up to 64 bits in so many dimensions.

    Where they are given: of ``length`` rows, from 0 to less than ``end``, strictly ``rising``.
    """
    rows = "" if length is None else f" of {length}"
    expected = f"an array{rows} of integers in {dimensions} dimension{'s'[: dimensions - 1]}"
    if not isinstance(array, np.ndarray):
        raise at_fault(field, type(array).__name__, expected)
    fits = array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64)
    if not fits or array.ndim != dimensions or (length is not None and len(array) != length):
        raise at_fault(field, f"{array.dtype} {array.shape}", expected)
    if end is not None and len(wrong := np.flatnonzero((array < 0) | (array >= end))):
        raise at_fault(f"{field}[{wrong[0]}]", int(array[wrong[0]]), f"0 to {end - 1}")
    if rising and len(falls := np.flatnonzero(array[1:] <= array[:-1])):
        i = falls[0] + 1
        raise at_fault(f"{field}[{i}]", int(array[i]), f"more than {array[i - 1]}, the one before")


def check_number(field: str, value: object, least: int = 0, most: int = 2**62) -> None:
    """Raise PlanError unless ``value`` is a whole number from ``least`` to ``most``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise at_fault(field, value, f"a whole number from {least} to {most}")


def check_switch(field: str, value: object) -> None:
    """Raise PlanError unless ``value`` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise at_fault(field, value, "True or False")
