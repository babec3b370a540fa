"""Policies against each other on the same workloads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis import bootstrap
from analysis.runs import Design, Outcome, replayed_design, spread
from sim.run.scene import SceneOptions

Contestants = Mapping[str, tuple[str, dict[str, Any]]]
"""Policies with their parameters, by the name that tables give them."""


def contest(
    cells: Sequence[tuple[SceneOptions, Contestants]],
    workers: int,
    what: str,
    task: Callable[[Design], Outcome | None] = replayed_design,
) -> list[dict[str, Outcome]]:
    """Replay the contestants of every cell, for ratios with intervals: outcomes by name, a cell a dict.

    One for which ``task`` gives None is left out. Raises InputError, and ModuleNotFoundError where scipy is not
    installed, which intervals need.
    """
    bootstrap.check()
    designs = [Design(place, *one) for place, contestants in cells for one in contestants.values()]
    outcomes = iter(spread(task, designs, workers, what))
    return [
        {name: outcome for name in contestants if (outcome := next(outcomes)) is not None} for _, contestants in cells
    ]
