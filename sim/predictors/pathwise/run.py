"""What the path rule reads of a run, from a policy's view."""

import numpy as np

from sim.view import View
from traces.paths.learn import gate_bytes
from traces.paths.state import Run


def run_of(view: View) -> Run:
    """Rows in the order in which they run, and the place of each sequence among those that run at once."""
    routes = np.ascontiguousarray(view.route(view.n_layers))
    steps = np.arange(view.n_steps + 1)
    slot, active = _places(view.sequence, view.step, view.n_steps)
    return Run(
        routes, gate_bytes(view.gates(view.n_layers), routes), np.searchsorted(view.step, steps), slot[view.sequence],
        _within(view.sequence), active,
    )  # fmt: skip


def _within(sequence: np.ndarray) -> np.ndarray:
    """How many rows of the same sequence stand before each (T,)."""
    order = np.argsort(sequence, kind="stable")
    ordered = sequence[order]
    place = np.empty(len(sequence), np.int64)
    place[order] = np.arange(len(sequence)) - np.searchsorted(ordered, ordered)
    return place


def _places(sequence: np.ndarray, step: np.ndarray, n_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """A place for each sequence, free again in the step after its last, and which places are taken in each step."""
    place = np.zeros(int(sequence.max(initial=-1)) + 1, np.int64)
    numbers, first = np.unique(sequence, return_index=True)
    ends: list[int] = []  # of each place, the last step of the sequence that has it
    last = {number: int(step[sequence == number].max()) for number in numbers.tolist()}
    spans = []
    for row in np.sort(first).tolist():
        number, begin = int(sequence[row]), int(step[row])
        free = next((at for at, end in enumerate(ends) if end < begin), len(ends))
        ends[free : free + 1] = [last[number]]
        place[number] = free
        spans.append((free, begin, last[number]))
    active = np.zeros((n_steps, max(len(ends), 1)), bool)
    for at, begin, end in spans:
        active[begin : end + 1, at] = True
    return place, active
