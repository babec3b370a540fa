"""Policies against each other on the same workloads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import bootstrap
from analysis.experiment import Data
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING
from analysis.published import Claim
from analysis.runs import Design, Replayed, replayed_design, spread
from sim.policies.named import NamedPolicy
from sim.run.scene import SceneOptions


@dataclass(frozen=True)
class Match:
    """Contestants that replayed the same sequences at one place, by name, and the seed of their ratios' intervals."""

    ran: Mapping[str, Replayed]
    seed: int

    def runs(self) -> dict[str, dict[str, Any]]:
        """Every run, as data."""
        return {name: outcome.to_json() for name, outcome in self.ran.items()}

    def ratio(self, metric: str, one: str, other: str) -> bootstrap.Ratio:
        """One of bootstrap.METRICS of the contestant ``one`` over that of ``other``."""
        return bootstrap.compared(metric, self.ran[one].shares, self.ran[other].shares, self.seed)


def contest(
    places: Sequence[SceneOptions],
    contestants: Sequence[Sequence[NamedPolicy]],
    options: ExperimentOptions,
    what: str,
    task: Callable[[Design], Replayed | None] = replayed_design,
) -> list[Match]:
    """Replay the contestants of each place there: a match a place.

    One for which ``task`` gives None is left out. Raises InputError, and ModuleNotFoundError where scipy is not
    installed, which intervals need.
    """
    bootstrap.check()
    designs = [Design(place, one) for place, those in zip(places, contestants, strict=True) for one in those]
    outcomes = iter(spread(task, designs, options.processes, what))
    matches = []
    for index, those in enumerate(contestants):
        ran = {one.label: next(outcomes) for one in those}
        matches.append(Match({label: one for label, one in ran.items() if one is not None}, options.seed + index))
    return matches


def verdict(claim: Claim, ratio: Data) -> str:
    """Whether the claim lies inside the simulated interval, and if not on which side, or beyond what is possible."""
    if ratio["low"] is None:
        return NOTHING
    if ratio.get("most") is not None and claim.least > ratio["most"]:
        return "impossible"
    if claim.meets(ratio["low"], ratio["high"]):
        return "inside"
    return "lower" if claim.most < ratio["low"] else "higher"
