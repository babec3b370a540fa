"""A search: designs are asked for a few at a time, each time with what the ones before gave in mind (optuna).

With one goal it looks for the fastest design within the limits (a tree-structured Parzen estimator), with several for
those that no other beats in all of them (NSGA-II). How many are asked for at a time does not depend on the workers, so
the same search asks for the same designs everywhere, and one that was interrupted asks again and finds their rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.sweep.answer import GOALS
from sim.sweep.design import Design
from sim.sweep.fields import fitted
from sim.sweep.log import Log
from sim.sweep.row import Row
from sim.sweep.run import carry_out
from sim.sweep.space import Axis, Space
from sim.sweep.tasks import Runner
from sim.sweep.values import Span

if TYPE_CHECKING:
    from optuna import Study, Trial

AT_ONCE = 16
"""Designs that are asked for at a time."""
_BEYOND = 1e6
"""How far beyond the limits a design counts that gives no answer at all: one that cannot be run, or a reference."""


def check() -> None:
    """Raise ModuleNotFoundError where optuna is not installed: called before any replay."""
    import optuna  # noqa: F401


def search(
    space: Space, goals: Sequence[str], limits: Mapping[str, float], count: int, seed: int, log: Log, runner: Runner,
    progress: Callable[[int, int], None] = lambda done, all: None,
) -> list[tuple[str, Design]]:  # fmt: skip
    """Run up to ``count`` designs and return those that were asked for, each once, with their identities.

    ``progress`` is told how many of ``count`` are done. Raises as `sim.sweep.run.carry_out` does.
    """
    study = _study(goals, seed)
    found: dict[str, Design] = {}
    for begin in range(0, count, AT_ONCE):
        trials = [study.ask() for _ in range(min(AT_ONCE, count - begin))]
        asked = carry_out([_asked(space, trial) for trial in trials], log, runner)
        rows = log.in_order(key for key, _ in asked)
        for trial, (key, design), row in zip(trials, asked, rows, strict=True):
            found.setdefault(key, design)
            values, beyond = _judged(row, goals, limits)
            for number, much in enumerate(beyond):
                trial.set_constraint(str(number), much)
            study.tell(trial, values)
        progress(begin + len(trials), count)
    return list(found.items())


def _study(goals: Sequence[str], seed: int) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler: Any = (
        optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        if len(goals) == 1
        else optuna.samplers.NSGAIISampler(seed=seed, population_size=AT_ONCE)
    )
    directions: list[Any] = ["maximize" if GOALS[goal] else "minimize" for goal in goals]
    return optuna.create_study(directions=directions, sampler=sampler)


def _judged(row: Row, goals: Sequence[str], limits: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """The worth of a row by each goal, and by what part it is beyond each limit; at most 0 is within."""
    values = row.values
    if row.status != "ok" or values["reference"] or any(values[name] is None for name in (*goals, *limits)):
        return [0.0 if GOALS[goal] else 1e18 for goal in goals], [_BEYOND] * max(1, len(limits))
    beyond = [values[name] / most - 1 for name, most in limits.items()]
    return [float(values[goal]) for goal in goals], beyond or [0.0]


def _asked(space: Space, trial: "Trial") -> Design:
    fields = dict(space.base)
    for axis in space.axes:
        fields |= _point(axis, trial)
    return space.design(fields)


def _point(axis: Axis, trial: "Trial") -> dict[str, Any]:
    name, values = " + ".join(axis.names), axis.values
    if isinstance(values, Span):
        return {axis.names[0]: fitted(axis.names[0], values.at(trial.suggest_float(name, 0.0, 1.0)))}
    places = range(len(values))
    ordered = all(isinstance(value, int | float) or str(value)[:1].isdigit() for point in values for value in point)
    place = trial.suggest_int(name, 0, len(values) - 1) if ordered else trial.suggest_categorical(name, list(places))
    return dict(zip(axis.names, values[place], strict=True))
