"""What a plot shows, as data: drawn by plotly on a page, by matplotlib as a file, and written as CSV."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cell = str | float | None
Style = Literal["line", "reference", "bound", "points", "dots", "front", "mark", "area"]
"""A ``line`` joins points, a ``bound`` none can pass, a ``front`` goes in steps, an ``area`` lies on the last.

``dots`` have the colour of the line of that name, ``points`` none of their own.
"""


@dataclass(frozen=True)
class Axis:
    """What an axis says, its unit in brackets; ``log``: equal factors are equally far apart; ``zero``: begin at 0."""

    title: str
    log: bool = False
    zero: bool = True


@dataclass(frozen=True)
class Series:
    """Points of one name.

    ``notes`` is more to say of each point, none or as many as there are points. Values of None are gaps.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: Style = "line"
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """What all plots have: a ``name`` for files, a ``title``, and sentences that say how to read it."""

    name: str
    title: str
    says: str


@dataclass(frozen=True)
class Curves(Plot):
    """Series over one pair of axes."""

    x: Axis
    y: Axis
    series: Sequence[Series]

    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        return ["series", self.x.title, self.y.title, "note"]

    def rows(self) -> Iterator[list[Cell]]:
        """The points, one a row."""
        for one in self.series:
            notes = one.notes or [""] * len(one.x)
            for x, y, note in zip(one.x, one.y, notes, strict=True):
                yield [one.name, x, y, note]


@dataclass(frozen=True)
class Bars(Plot):
    """A bar for each of ``names``, made of ``parts`` (a value a name, laid end to end) along an axis.

    ``ends`` are the low and high ends of an interval for each name, None where there is none; ``marks`` are values of
    the axis at which a line is drawn across all bars.
    """

    axis: Axis
    names: Sequence[str]
    parts: Mapping[str, Sequence[float | None]]
    ends: Sequence[tuple[float, float] | None] = ()
    marks: Mapping[str, float] = field(default_factory=dict)

    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        interval = ["95 % interval, low", "95 % interval, high"] if self.ends else []
        return ["design", *(f"{part}, {self.axis.title}" for part in self.parts), *interval]

    def rows(self) -> Iterator[list[Cell]]:
        """The bars, one a row, then the marks."""
        for at, name in enumerate(self.names):
            ends = list(self.ends[at] or (None, None)) if self.ends else []
            yield [name, *(values[at] for values in self.parts.values()), *ends]
        rest = len(self.header()) - 2
        for name, value in self.marks.items():
            yield [name, value, *[None] * rest]


@dataclass(frozen=True)
class HeatMap(Plot):
    """A value for each pair of a name down and a name across; ``unit`` is what the values are.

    ``notes`` is more to say of each cell, of the shape of ``values`` where there is any. ``span`` is what the ends of
    the colours stand for; by default the least and the largest value.
    """

    down: Axis
    across: Axis
    rows_of: Sequence[str]
    columns_of: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str
    notes: Sequence[Sequence[str]] = ()
    span: tuple[float, float] | None = None

    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        return [f"{self.down.title} / {self.across.title}: {self.unit}", *self.columns_of]

    def rows(self) -> Iterator[list[Cell]]:
        """The matrix, a name down in front of each row."""
        for name, values in zip(self.rows_of, self.values, strict=True):
            yield [name, *values]


AnyPlot = Curves | Bars | HeatMap
