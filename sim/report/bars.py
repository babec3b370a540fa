"""Speeds as bars in a terminal, for a person on a server who wants to see their shape."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.bar import Bar
from rich.table import Table

from ground.text import as_is
from sim.report.metrics import Report
from sim.report.tables import marked, number

_WIDTH = 50
"""Characters of the longest bar, where there is room."""


@dataclass(frozen=True)
class Speed:
    """One bar: what it is of, decode tokens a second, and the bound on these where there is one."""

    label: str
    tokens_per_s: float
    bound: float | None = None


def bars(title: str, speeds: Sequence[Speed], most: float | None = None) -> Table:
    """Bars of speeds, the longest of ``most`` tokens/s (default: the fastest); the bound stands behind each."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(min_width=10, max_width=_WIDTH)
    table.add_column(justify="right", no_wrap=True)
    longest = most or max((speed.tokens_per_s for speed in speeds), default=0.0) or 1.0
    for speed in speeds:
        bound = "" if speed.bound is None else f" of {number(speed.bound)}"
        bar = Bar(longest, 0, min(speed.tokens_per_s, longest))
        table.add_row(as_is(speed.label), bar, f"{number(speed.tokens_per_s)}{bound}")
    return table


def comparison_bars(reports: Sequence[Report]) -> Table:
    """The policies of a comparison, the fastest first."""
    speeds = []
    for report in sorted(reports, key=lambda each: -(each.tokens_per_s or 0)):
        bounds = [b for name in ("compute", "link") if (b := report.bounds[f"{name}_tokens_per_s"]) is not None]
        speeds.append(Speed(marked(report), report.tokens_per_s or 0.0, min(bounds, default=None)))
    return bars("tokens/s, of the bound", speeds)
