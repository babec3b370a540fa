"""Policies against each other on the same workloads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import bootstrap
from analysis.options import ExperimentOptions
from analysis.runs import Design, Outcome, replayed_design, spread
from sim.run.scene import SceneOptions

Contestants = Mapping[str, tuple[str, dict[str, Any]]]
"""Policies with their parameters, by the name that tables give them."""


@dataclass(frozen=True)
class Match:
    """Contestants that replayed the same sequences at one place, by name, and the seed of their ratios' intervals."""

    ran: Mapping[str, Outcome]
    seed: int

    def runs(self) -> dict[str, dict[str, Any]]:
        """Every run, as data."""
        return {name: outcome.to_json() for name, outcome in self.ran.items()}

    def ratio(self, metric: str, one: str, other: str) -> bootstrap.Ratio:
        """One of bootstrap.METRICS of the contestant ``one`` over that of ``other``."""
        return bootstrap.compared(metric, self.ran[one].shares, self.ran[other].shares, self.seed)


def contest(
    places: Sequence[SceneOptions],
    contestants: Contestants | Iterable[Contestants],
    options: ExperimentOptions,
    what: str,
    task: Callable[[Design], Outcome | None] = replayed_design,
) -> list[Match]:
    """Replay contestants, the same everywhere or of each place its own: a match a place.

    One for which ``task`` gives None is left out. Raises InputError, and ModuleNotFoundError where scipy is not
    installed, which intervals need.
    """
    bootstrap.check()
    of_each = [contestants] * len(places) if isinstance(contestants, Mapping) else [*contestants]
    designs = [Design(place, *one) for place, those in zip(places, of_each, strict=True) for one in those.values()]
    done = iter(spread(task, designs, options.processes, what))
    outcomes = [{name: outcome for name in those if (outcome := next(done)) is not None} for those in of_each]
    return [Match(ran, options.seed + index) for index, ran in enumerate(outcomes)]
