"""Where one policy pays over another: how many times as fast it is, and how long the other waits for experts.

Two policies are compared at every *place*: where both ran with as large a cache, on the same card, and everything else
alike. Stall over compute is how long the other policy's decode waits for each second that it computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median

from analysis.html.designs import Designs, axis_title, is_of_policy, said
from analysis.html.plots import AnyPlot, Axis, Curves, HeatMap, Series
from analysis.html.runs import Run
from analysis.html.wording import counted, figure, listed
from ground.errors import InputError

PAYS = 1.05
"""A policy pays where it is so many times as fast as the other."""
BINS = 4
"""Medians are taken over so many bins for each factor of ten; a bin of few places has none."""
_FEW = 5
LEAST = 0.01
"""The least stall over compute that is drawn: below it nothing can be gained."""
_OVER = " over "
_STALL = "stall over compute of the other policy"
_TIMES = "times as fast"


@dataclass(frozen=True)
class Gain:
    """At one place: one policy's run, the other's, and how many times as fast the first is."""

    one: Run
    other: Run

    @property
    def times(self) -> float:
        """Speed over speed."""
        return self.one.speed / self.other.speed

    @property
    def stall(self) -> float | None:
        """How long the other waits for experts for each second that it computes; None if it is not known."""
        parts = [self.other.values.get(f"time_{part}_ms") for part in ("stall_demand", "stall_late", "compute")]
        demand, late, compute = (part or 0.0 for part in parts)
        return (demand + late) / compute if compute else None


Gains = dict[str, list[Gain]]
"""Gains by what they are of: ``domoe over lru``."""


def gains_of(texts: Sequence[str], designs: Designs) -> Gains:
    """The gains that ``texts`` ask for, each ``ONE over OTHER``. Raises InputError if both ran nowhere side by side."""
    apart = [name for name in designs.varying if not is_of_policy(name)]
    places = [{designs.label(run, apart): run for run in runs} for runs in designs.places("").values()]
    found: Gains = {}
    for text in texts:
        one, over, other = (part.strip() for part in text.partition(_OVER))
        gains = [Gain(runs[one], runs[other]) for runs in places if {one, other} <= runs.keys() and runs[other].speed]
        if not over or not gains:
            names = list(dict.fromkeys(name for runs in places for name in runs))
            raise InputError(
                f"--gain {text!r}; expected ONE over OTHER, both alike but for the policy, of {listed(names, 60)}"
            )
        found[text] = gains
    return found


def gain_answers(gains: Gains) -> list[str]:
    """A sentence or two for each pair: where it pays, and where not."""
    return [_answer(name, found) for name, found in gains.items()]


def _answer(name: str, found: Sequence[Gain]) -> str:
    pays = sorted(gain.stall for gain in found if gain.times >= PAYS and gain.stall is not None)
    head = f"{name}: at least {PAYS} times as fast in {len(pays):,} of {counted(len(found), 'place')}"
    if not pays:
        return f"{head}."
    low, high = (pays[round(share * (len(pays) - 1))] for share in (0.05, 0.95))
    best = max(found, key=lambda gain: gain.times)
    return (
        f"{head}, at most {best.times:.2f} times. In the middle nine tenths of these the other waits {figure(low)} to "
        f"{figure(high)} s for each second that it computes."
    )


def gain_plots(gains: Gains, designs: Designs) -> list[AnyPlot]:
    """Gains over stall over compute; in how many places each pays, by each value of each axis; and maps of each."""
    if not gains:
        return []
    axes = _axes(designs)
    maps = [_map(name, found, axes, at) for at, (name, found) in enumerate(gains.items(), 1)]
    return [_scattered(gains, designs), *filter(None, [_by_value(gains, axes), *maps])]


def _scattered(gains: Gains, designs: Designs) -> Curves:
    series = []
    left_out = 0
    policy = [name for name in designs.varying if is_of_policy(name)]
    for name, found in gains.items():
        points = sorted(
            ((stall, gain) for gain in found if (stall := gain.stall or 0) >= LEAST), key=lambda point: point[0]
        )
        left_out += len(found) - len(points)
        xs, ys = [x for x, _ in points], [gain.times for _, gain in points]
        series.append(Series(name, xs, ys, "dots", [designs.label(gain.one, policy) for _, gain in points]))
        middle = _medians(xs, ys)
        series.append(Series(name, [x for x, _ in middle], [y for _, y in middle]))
    every = [x for one in series for x in one.x]
    at = _spread(min(every), max(every)) if every else []
    series.append(Series("most that hiding gives", at, [(1 + x) / max(1.0, x) for x in at], "bound"))
    says = (
        "Each dot is a place, each line the median of its policy. Copies can hide behind computing, and computing "
        "behind copies: at best a token takes as long as the longer of both, which the broken line shows. Above it a "
        "policy copies less as well."
    )
    if left_out:
        says += (
            f" {counted(left_out, 'dot is', 'dots are')} left out, where the other waits less than {LEAST:g} of that."
        )
    title = "What one policy gains over another against stall over compute"
    return Curves("gain-by-stall", title, says, Axis(_STALL, log=True), Axis(_TIMES, zero=False), series)


def _medians(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Median of both over bins of equal factors."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in zip(xs, ys, strict=True):
        bins.setdefault(floor(BINS * log10(x)), []).append((x, y))
    return [(median(x for x, _ in points), median(y for _, y in points))
            for _, points in sorted(bins.items()) if len(points) >= _FEW]  # fmt: skip


def _spread(low: float, high: float, points: int = 60) -> list[float]:
    """So many values from low to high, each the same factor above the one before, and 1 where it is between."""
    found = [low * (high / low) ** (at / (points - 1)) for at in range(points)]
    return sorted({*found, 1.0}) if low < 1 < high else found


AxisValues = dict[str, dict[str, set[int]]]
"""Of each axis its values in words, and the runs (by identity in memory) that have each."""


def _axes(designs: Designs) -> AxisValues:
    """What places differ in, and the size of the model's experts if that differs too."""
    axes: AxisValues = {}
    for name in designs.varying:
        if not is_of_policy(name):
            axes[name] = {said(name, value): {id(run) for run in designs.ok if run.fields.get(name) == value}
                          for value in designs.values(name)}  # fmt: skip
    sizes = sorted({size for run in designs.ok if (size := run.values.get("expert_bytes"))})
    if len(sizes) > 1:
        axes["expert size"] = {f"experts of {size / 2**20:.3g} MiB": {id(run) for run in designs.ok
                               if run.values.get("expert_bytes") == size} for size in sizes}  # fmt: skip
    return axes


def _by_value(gains: Gains, axes: AxisValues) -> HeatMap | None:
    """The share of places in which each pays, for each value of each axis."""
    rows = {value: members for values in axes.values() for value, members in values.items()}
    if not rows:
        return None
    shares = [[_share([gain for gain in found if id(gain.one) in members]) for found in gains.values()]
              for members in rows.values()]  # fmt: skip
    says = f"In how many of the places with this value the policy is at least {PAYS} times as fast as the other."
    return HeatMap(
        "pays-by-value", "Where it pays, by each value of each axis", says, Axis("axis and value"), Axis("policies"),
        [*rows], [*gains], shares, "places (%)", span=(0.0, 100.0),
    )  # fmt: skip


def _share(found: Sequence[Gain]) -> float | None:
    return 100 * sum(gain.times >= PAYS for gain in found) / len(found) if found else None


def _map(name: str, found: Sequence[Gain], axes: AxisValues, number: int) -> HeatMap | None:
    """The median gain over the two axes with the most values, numbers across."""
    two = sorted(axes, key=lambda axis: -len(axes[axis]))[:2]
    if len(two) < 2:
        return None
    across, down = two
    values = [
        [_median([gain.times for gain in found if id(gain.one) in row & column]) for column in axes[across].values()]
        for row in axes[down].values()
    ]
    says = "The median over all other axes. Above 1 the first policy is faster."
    return HeatMap(
        f"gain-map-{number}", f"{name}: {_TIMES}", says, Axis(axis_title(down)), Axis(axis_title(across)),
        [*axes[down]], [*axes[across]], values, _TIMES,
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
