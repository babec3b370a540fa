"""Designs put together for workers: those that share a plan go to one worker, one after another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ground.errors import InputError
from sim.policies import policy_class
from sim.sweep.design import Design
from sim.sweep.row import Row

BATCH = 12
"""Designs of a batch, at most: few, so that workers end at about the same time."""
KEPT_BATCH = 120
"""The same where a plan takes long: many, so that one worker makes it and nobody else does."""
_APART = frozenset({"cache", "discipline", "chunks"})
"""Fields in which designs may differ and share a plan, if their policy says so."""


@dataclass(frozen=True)
class Task:
    """A design to be run, and its identity."""

    key: str
    design: Design


Batch = tuple[Task, ...]

Runner = Callable[[Sequence[Batch]], Iterator[Row]]
"""Runs batches somewhere and gives the rows as they come, in any order."""


def batches(tasks: Iterable[Task]) -> list[Batch]:
    """The tasks in batches, each of designs that may share a plan.

    First come those whose plan takes long, and the first batch of every plan before the second of any: so no plan is
    made by two workers at once as long as there are others to make.
    """
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        shared = {name: value for name, value in task.design.fields.items() if name not in _APART}
        groups.setdefault(repr(shared), []).append(task)
    found: list[tuple[tuple[int, bool], Batch]] = []
    for group in groups.values():
        quick = not _takes_long(group[0].design)
        size = BATCH if quick else KEPT_BATCH
        for turn, begin in enumerate(range(0, len(group), size)):
            found.append(((turn, quick), tuple(group[begin : begin + size])))
    return [batch for _, batch in sorted(found, key=lambda entry: entry[0])]


def _takes_long(design: Design) -> bool:
    try:
        return policy_class(design.policy.name).keeps_plan
    except InputError:
        return False


def singles(tasks: Sequence[Task]) -> list[Batch]:
    """Each task by itself."""
    return [(task,) for task in tasks]
