"""Worths of a plan's scorer (``sim.scorer``), compiled and called by address."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from sim.compiled.foreign import call
from sim.compiled.jit import inner
from sim.compiled.machine import number_at
from sim.scorer import Observe, Scorer, Worths


@inner
def announce(m: Any, number: int) -> None:
    """The route of a call is known: ``sim.scorer.Scoring.announce``."""
    m.scored_until = max(m.now, m.scored_until) + number_at(m.score_ns, number).n if m.score_beside else m.now
    number_at(m.score_due, number).n = m.scored_until
    m.announced = number + 1


@inner
def refresh(m: Any) -> None:
    """Bring worths up to what is known now: ``sim.scorer.Scoring.refresh``."""
    before = m.observed
    while m.observed < m.announced and number_at(m.score_due, m.observed).n <= m.now:
        call(m.score_observe, (m.score_state, m.observed, m.worths))
        m.observed += 1
    if m.observed > before:
        call(m.score_worths, (m.score_state, m.observed - 1, m.worths))


class Code:
    """A scorer's functions as machine code, for one run's ``state`` and ``values``, which it keeps alive.

    Attributes:
        addresses: those of the state's description and of both functions, as ``sim.compiled.machine`` names them.
    """

    def __init__(self, scorer: Scorer, state: Any, values: np.ndarray) -> None:
        self._kept = state, values
        described = [n for array in state for n in (array.ctypes.data, *array.shape)]
        self._described = np.array([*described, len(values)], np.int64)
        forms = tuple((array.dtype.str, array.ndim) for array in state)
        self._functions = _compiled(scorer.observe, scorer.worths, cast(Hashable, type(state)), forms)
        self._arguments = self._described.ctypes.data, values.ctypes.data
        observe, worths = (function.address for function in self._functions)
        self.addresses = {
            "score_state": self._arguments[0], "worths": self._arguments[1],
            "score_observe": observe, "score_worths": worths,
        }  # fmt: skip

    def observe(self, call: int) -> None:
        """The route of ``call`` is known."""
        self._functions[0].ctypes(self._arguments[0], call, self._arguments[1])

    def worths(self, call: int) -> None:
        """Write what experts are worth after ``call``."""
        self._functions[1].ctypes(self._arguments[0], call, self._arguments[1])


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@lru_cache(maxsize=32)
def _compiled(observe: Observe, worths: Worths, kind: Hashable, forms: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
    """Both functions as C functions of three 64-bit integers: a state's description, a call, where worths go.

    numba compiles a function for arrays of certain types, and these only the state knows: so the text of what makes
    arrays of its description is put together here.
    """
    parts, place = [], 0
    for i, (_, dimensions) in enumerate(forms):
        shape = ", ".join(f"number_at(state, {place + 1 + d}).n" for d in range(dimensions))
        parts.append(f"carray(pointer(number_at(state, {place}).n), ({shape},), t{i})")
        place += 1 + dimensions
    names: dict[str, Any] = {f"t{i}": np.dtype(form) for i, (form, _) in enumerate(forms)}
    names |= {"number_at": number_at, "carray": carray, "pointer": _pointer, "kind": kind, "np": np}
    names |= {"observe": njit(observe), "worths": njit(worths)}
    arrays = f"kind({', '.join(parts)})"
    text = (
        f"def seen(state, call, values):\n    observe({arrays}, call)\n    return 0\n"
        f"def asked(state, call, values):\n"
        f"    worths({arrays}, call, carray(pointer(values), (number_at(state, {place}).n,), np.int64))\n"
        f"    return 0\n"
    )
    exec(text, names)
    form = types.int32(types.int64, types.int64, types.int64)
    made: list[Callable[..., int]] = [names["seen"], names["asked"]]
    return cast(tuple[Any, Any], tuple(cfunc(form)(function) for function in made))
