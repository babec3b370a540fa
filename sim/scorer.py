"""Worths of being kept that are computed while a run goes, by functions that a plan brings along.

A policy may hand in `Values` for every moment, which is as many numbers as moments times experts. Where worths change
with every call, a plan has a `Scorer` instead: it sees each route as it becomes known, and is asked what experts are
worth only when somebody must leave. Engines know neither its name nor what it reckons by.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.plan_checks import PlanError, at_fault, check_switch

Observe = Callable[[Any, int], None]
Worths = Callable[[Any, int, np.ndarray], None]


@dataclass(frozen=True)
class Scorer:
    """What a plan with ``eviction="scored"`` evicts by: the expert of least worth goes first, ties by recency.

    Both functions are plain Python of the kind that numba compiles; where it is installed every engine calls the same
    machine code, else the functions themselves. They may read rows of the run's routes up to the call that they are
    told, and no others.

    Attributes:
        state: a NamedTuple of arrays, all that the functions know. A run has a copy of those that can be written.
        observe: ``observe(state, call)``: the route of a layer call, ``step * L + layer``, is known. Calls come in
            order, none is left out.
        worths: ``worths(state, call, values)`` writes what each expert is worth after that call into ``values``
            (L * E,) int64, larger for longer. It may be asked after any call, or never.
        ns: what observing each call and reckoning takes (calls,) int64.
        beside: a call's worths hold only when that time has passed, one call after another, and until then older ones
            do; else the step waits for them.
    """

    state: Any
    observe: Observe
    worths: Worths
    ns: np.ndarray
    beside: bool = False

    def check(self, n_calls: int) -> None:
        """Raise PlanError for what no engine could execute in a run of so many calls."""
        check_switch("scorer.beside", self.beside)
        arrays = self.state if isinstance(self.state, tuple) and hasattr(self.state, "_fields") else None
        if arrays is None or not all(isinstance(array, np.ndarray) for array in arrays):
            raise at_fault("scorer.state", type(self.state).__name__, "a NamedTuple of arrays")
        for name, array in zip(self.state._fields, arrays, strict=True):
            if not array.flags.c_contiguous or array.dtype.kind not in "iufb" or not array.ndim:
                raise at_fault(f"scorer.state.{name}", f"{array.dtype}, {array.ndim} dimensions",
                               "a C-contiguous array of numbers")  # fmt: skip
        if not callable(self.observe) or not callable(self.worths):
            raise PlanError("plan: scorer.observe and scorer.worths; expected functions")
        fits = isinstance(self.ns, np.ndarray) and self.ns.dtype == np.int64 and self.ns.shape == (n_calls,)
        if not fits or self.ns.min(initial=0) < 0:
            raise at_fault("scorer.ns", getattr(self.ns, "shape", self.ns), f"({n_calls},) whole numbers, none below 0")

    def after(self, calls: int, n_slots: int) -> np.ndarray:
        """What ``n_slots`` experts are worth once so many calls of a run have been seen (n_slots,) int64."""
        scoring = Scoring(self, n_slots)
        for call in range(calls):
            scoring.announce(call, 0)
        scoring.refresh(int(self.ns.sum()))
        return scoring.values


class Scoring:
    """A scorer in one run: a state of its own, and whose route it has seen.

    Attributes:
        values: (L * E,) int64, what experts are worth as far as that has been reckoned.
    """

    def __init__(self, scorer: Scorer, n_slots: int) -> None:
        self.scorer = scorer
        self.state = type(scorer.state)(*(a.copy() if a.flags.writeable else a for a in scorer.state))
        self.values = np.zeros(n_slots, np.int64)
        self._due: list[int] = []
        self._observed = 0
        self.code = _machine_code(self)
        """Its functions as machine code, where that can be had."""

    def announce(self, call: int, now: int) -> None:
        """The route of ``call`` is known. It counts at once, or, beside the step, once its time has passed."""
        begin = max(now, self._due[-1]) if self._due else now
        self._due.append(begin + int(self.scorer.ns[call]) if self.scorer.beside else now)

    def refresh(self, now: int) -> bool:
        """Bring ``values`` up to what is known at ``now``; whether they have changed."""
        before = self._observed
        while self._observed < len(self._due) and self._due[self._observed] <= now:
            self._observe(self._observed)
            self._observed += 1
        if self._observed == before:
            return False
        if self.code is None:
            self.scorer.worths(self.state, self._observed - 1, self.values)
        else:
            self.code.worths(self._observed - 1)
        return True

    def _observe(self, call: int) -> None:
        if self.code is None:
            self.scorer.observe(self.state, call)
        else:
            self.code.observe(call)


def _machine_code(scoring: Scoring) -> Any:
    """The functions compiled for the run's state, or None where nothing can be compiled."""
    from sim.compiled.availability import no_numba

    if no_numba() is not None:
        return None
    from sim.compiled.scoring import Code

    return Code(scoring.scorer, scoring.state, scoring.values)
