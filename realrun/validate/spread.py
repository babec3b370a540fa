"""Errors set against the machine's own spread: how far apart the runs of one pair are that was measured several times.

An error is explained by the spread where the simulated value lies between the lowest and the highest run. It is shown
as a multiple of the spread as well, the latter being all that lies between these two.
"""

from collections.abc import Sequence
from statistics import mean

from realrun.validate.agreement import PARTS, PREFILL_PARTS, Component, Unit, matters, named, summarise, worst
from sim.report.tables import percent

HEADINGS = (
    "policy", "cache", "tokens/s sim", "fastest", "error", "median", "error", "runs apart", "in spreads",
    "look-ups off", "largest part error", "largest of prompts",
)  # fmt: skip
SHARES = ("hits", "late", "misses")
CLOSE: dict[Unit, float] = {"tokens/s": 0.05, "share": 0.01, "ms": 0.1}
"""Errors of throughput, of what look-ups find, and of parts of the time that are small enough, whatever the spread."""
NOTE = (
    "Errors are simulated over measured, less 1; of look-ups the largest of hits, late and misses, in points.",
    "Look-ups and parts are against medians. Runs apart: lowest to highest, of the median. In brackets, and under in",
    "spreads: the error over that distance, with a star where the simulated value lies between lowest and highest run.",
    "The largest error of a part leaves out parts below 1 % of the time.",
)
MOST_NAMED = 8
"""Errors that a sentence names."""


def several(rows: Sequence[Component]) -> list[Component]:
    """Those that were measured in several runs."""
    return [row for row in rows if len(row.runs) > 1]


def line(found: dict[str, Component], where: str) -> list[str]:
    """The cells of a pair under `HEADINGS`; ``found`` are its components by name, ``where`` its cache."""
    speed, rows = found["throughput"], list(found.values())
    median = speed.of_median
    values = ["–" if value is None else f"{value:.3f}" for value in (speed.simulated, speed.measured, median.measured)]
    off = max((found[name] for name in SHARES), key=lambda row: row.of_median.size)
    cells = [speed.policy, where, *values[:2], percent(speed.error, "+"), values[2], percent(median.error, "+")]
    cells += [percent(speed.spread), _times(speed), f"{off.component} {_points(off)}{_told(off)}"]
    for components in (PARTS, PREFILL_PARTS):
        part = worst([row.of_median for row in rows], components)
        cells.append("–" if part is None else _part(found[part.component]))
    return cells


def _part(row: Component) -> str:
    name = row.component.removeprefix("prefill ")
    return f"{name} {percent(row.of_median.error, '+')}{_told(row)}"


def _points(row: Component) -> str:
    error = row.of_median.error
    return "–" if error is None else f"{100 * error:+.2f}"


def _times(row: Component) -> str:
    return "–" if row.in_spreads is None else f"{row.in_spreads:.1f}"


def _told(row: Component) -> str:
    """In brackets: how many spreads the error is, with a star where the spread explains it."""
    times = _times(row)
    return "" if times == "–" else f" ({times}{'*' if row.explained else ''})"


def verdict(rows: Sequence[Component]) -> list[str]:
    """What the spread says of all errors, in sentences; nothing where no pair was measured several times."""
    rows = several(rows)
    speeds = [row for row in rows if row.component == "throughput"]
    if not speeds:
        return []
    apart = [row.spread or 0.0 for row in speeds]
    medians = summarise([row.of_median for row in rows])
    counted = {len(row.runs) for row in speeds}
    how_many = "–".join(str(number) for number in sorted({min(counted), max(counted)}))
    parts = [row for row in rows if row.component in PARTS + PREFILL_PARTS and matters(row, list(rows))]
    return [
        f"{how_many} runs of each pair: throughput {percent(mean(apart))} apart on average, {percent(max(apart))} at "
        f"most (lowest to highest, of the median)",
        f"against medians: throughput off by {percent(medians.throughput_mean)} on average, "
        f"{percent(medians.throughput_worst)} at worst; hits, late, misses {100 * medians.shares_worst:.2f} points; "
        f"parts {medians.parts_worst:.1%} ({medians.parts_worst_of or 'none'}), of prompts "
        f"{medians.prefill_worst:.1%} ({medians.prefill_worst_of or 'none'})",
        _explained("throughput", speeds, rows),
        _explained("hits, late, misses", [row for row in rows if row.component in SHARES], rows),
        _explained("parts above 1 % of the time", parts, rows),
    ]


def _explained(what: str, rows: Sequence[Component], every: Sequence[Component]) -> str:
    """How many errors are small enough, how many of the others the spread explains, and which are left."""
    large = [row for row in rows if row.of_median.size > CLOSE[row.unit]]
    left = sorted((row for row in large if not row.explained), key=lambda row: -row.of_median.size)
    said = [f"{named(row, every)}{'' if row.component == 'throughput' else f', {row.component}'} {_error(row)}"
            for row in left[:MOST_NAMED]]  # fmt: skip
    more = f"; and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
    limit = f"{100 * CLOSE[rows[0].unit]:g} {'point' if rows[0].unit == 'share' else '%'}" if rows else "reach"
    return (
        f"{what}: {len(rows) - len(large)} of {len(rows)} errors within {limit}; the spread explains "
        f"{len(large) - len(left)} of the others" + (f", not {'; '.join(said)}{more}" if left else "")
    )


def _error(row: Component) -> str:
    points = _points(row) + " points" if row.unit == "share" else percent(row.of_median.error, "+")
    return points + _told(row)
