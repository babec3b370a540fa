"""A cache driven access by access, on demand alone and without time: ``sim.run.serve``, compiled."""

from typing import Any

import numpy as np

from sim.compiled.jit import entry
from sim.compiled.machine import byte_at, number_at, slot_at
from sim.compiled.order import needed
from sim.compiled.slots import allot, landed
from sim.log import MISS
from sim.run.slots import RESIDENT


@entry
def _serve(m: Any, accesses: int) -> None:
    for i in range(accesses):
        expert = number_at(m.expert, i).n
        needed(m, expert, number_at(m.next_call, i).n if m.foresees else 0)
        if slot_at(m.slots, expert).state != RESIDENT:
            byte_at(m.found, i).n = MISS
            allot(m, expert, True)
            landed(m, expert)


def serve(machine: Any) -> np.ndarray:
    """Access the experts of the machine's calls one after another; returns hits (N,) bool.

    ``machine`` is a fresh ``sim.compiled.machine.Machine``.
    """
    _serve(machine.record, len(machine.arrays["expert"]))
    hits: np.ndarray = machine.arrays["found"] != MISS
    return hits
