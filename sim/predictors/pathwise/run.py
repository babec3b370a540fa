"""What the path rule reads of a run, from a policy's view."""

import numpy as np

from sim.view import View
from traces.paths.learn import gate_bytes
from traces.paths.state import Run


def run_of(view: View) -> Run:
    """Rows in the order in which they run, and the place of each sequence among those that run at once."""
    routes = np.ascontiguousarray(view.route(view.n_layers))
    steps = np.arange(view.n_steps + 1)
    place, count = _places(view.sequence, view.step, view.decoding)
    slot = place[view.sequence]
    return Run(
        routes, gate_bytes(view.gates(view.n_layers), routes), np.searchsorted(view.step, steps), slot,
        _within(view.sequence), _active(slot, view.step, view.decoding, view.n_steps, count),
    )  # fmt: skip


def _within(sequence: np.ndarray) -> np.ndarray:
    """How many rows of the same sequence stand before each (T,)."""
    order = np.argsort(sequence, kind="stable")
    ordered = sequence[order]
    place = np.empty(len(sequence), np.int64)
    place[order] = np.arange(len(sequence)) - np.searchsorted(ordered, ordered)
    return place


def _places(sequence: np.ndarray, step: np.ndarray, decoding: np.ndarray) -> tuple[np.ndarray, int]:
    """A place for each sequence, free again once it has decoded its last token, and how many places there are."""
    place = np.zeros(int(sequence.max(initial=-1)) + 1, np.int64)
    numbers, first = np.unique(sequence, return_index=True)
    ends: list[int] = []  # of each place, the last step of the sequence that has it
    never = int(step.max(initial=0)) + 1
    last = {number: int(step[decoding & (sequence == number)].max(initial=-1)) for number in numbers.tolist()}
    for row in np.sort(first).tolist():
        number, begin = int(sequence[row]), int(step[row])
        free = next((at for at, end in enumerate(ends) if end < begin), len(ends))
        ends[free : free + 1] = [never if last[number] < 0 else last[number]]
        place[number] = free
    return place, max(len(ends), 1)


def _active(slot: np.ndarray, step: np.ndarray, decoding: np.ndarray, n_steps: int, places: int) -> np.ndarray:
    """Which places run in each step (N, S) bool, as a step alone shows: that a sequence will go on is not known.

    In a decode step those that have a row; while prompts come, all that have come since the last decode step.
    """
    active, decodes = np.zeros((n_steps, places), bool), np.zeros(n_steps, bool)
    active[step, slot] = True
    decodes[step] = decoding
    for late in range(1, n_steps):
        if not decodes[late] and not decodes[late - 1]:
            active[late] |= active[late - 1]
    return active
