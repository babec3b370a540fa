"""The fewest bytes that a run must load, compiled: ``sim.bounds.fewest_loads``, where it is explained."""

from typing import Any

import numpy as np

from sim.compiled.heap import Heaps, push, remove, top
from sim.compiled.jit import entry, inner
from sim.eviction import NEVER
from sim.workload import next_calls


def fewest_loads(
    offsets: np.ndarray, experts: np.ndarray, sizes: np.ndarray, capacity: int, at_once: int | None
) -> np.ndarray:
    """The same result for the same arguments (all arrays of integers), ``capacity`` in whole experts where equal."""
    most = int(experts.max(initial=0)) + 1
    farthest, kept = Heaps([most], most), np.zeros(most, np.int64)
    columns = (offsets, experts, sizes, next_calls(offsets, experts))
    offsets, experts, sizes, following = (np.ascontiguousarray(column, np.int64) for column in columns)
    loads = np.zeros(len(experts), np.int64)
    _fewest(farthest.heaps[0], offsets, experts, sizes, following, kept, capacity, at_once or 0, loads)
    return loads


@entry
def _fewest(
    farthest: Any, offsets: np.ndarray, experts: np.ndarray, sizes: np.ndarray, following: np.ndarray,
    kept: np.ndarray, capacity: int, at_once: int, loads: np.ndarray,
) -> None:  # fmt: skip
    held = 0
    for call in range(len(offsets) - 1):
        first, last = offsets[call], offsets[call + 1]
        for i in range(first, last):
            expert = experts[i]
            if kept[expert]:
                remove(farthest, expert)
            held -= kept[expert]
            loads[i] = sizes[i] - kept[expert]
            kept[expert] = 0
        if last > first:
            one = sizes[first]
            wave = at_once if at_once else capacity // one
            held = _shrink(farthest, kept, held, capacity - one * min(last - first, wave))
        for i in range(first, last):
            if following[i] != NEVER:
                expert = experts[i]
                kept[expert] = sizes[i]
                held += sizes[i]
                push(farthest, expert, -following[i], expert)
        held = _shrink(farthest, kept, held, capacity)


@inner
def _shrink(farthest: Any, kept: np.ndarray, held: int, room: int) -> int:
    """Drop what is needed farthest in the future until what is held fits ``room``; returns what is then held."""
    while held > room:
        expert = top(farthest).item
        cut = min(kept[expert], held - room)
        held -= cut
        kept[expert] -= cut
        if not kept[expert]:
            remove(farthest, expert)
    return held
