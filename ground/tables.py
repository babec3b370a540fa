"""Tables whose names and numbers stay whole on a narrow terminal: as many columns as fit, the others in parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_FRAME = 3
"""Characters around a cell: a space on either side and the line after it; a table has one more, on its left."""


def fitting(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Columns in parts, each the first column and of the others, in their order, as many as ``width`` characters hold.

    A column is as wide as its widest cell and the longest word of its heading. One whose heading occurs again is told
    by those before it, so it begins no part. However narrow the terminal, a part has one column besides the first.
    """
    wide = [cells + _FRAME for cells in _widths(headings, rows)]
    parts, start, end = [], 1, len(headings)
    while start < end:
        stop = start + 1
        while stop < end and 1 + wide[0] + sum(wide[start : stop + 1]) <= width:
            stop += 1
        stop = next((at for at in range(stop, start, -1) if at == end or headings.count(headings[at]) == 1), stop)
        parts.append([0, *range(start, stop)])
        start = stop
    return parts or [[0]]


def framed(
    headings: Sequence[str], rows: Sequence[Sequence[str]], part: Sequence[int], width: int, **style: Any
) -> Table:
    """One part as a table in this ``style``; headings go over several lines where they do not fit within ``width``."""
    cells = _widths(headings, rows)
    whole = 1 + sum(max(cells[at], cell_len(headings[at])) + _FRAME for at in part) <= width
    table = Table(title_justify="left", **style)
    for at in part:
        justify: Any = "right" if at else "left"
        table.add_column(headings[at], justify=justify, overflow="fold", width=None if whole else cells[at])
    for row in rows:
        table.add_row(*(row[at] for at in part))
    return table


@dataclass(frozen=True)
class Parts:
    """A table of which nothing is left out: where it is too wide, its key is one column and the others are in parts."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts, one below the other."""
        headings, rows, width = self.headings, self.rows, options.max_width
        if len(fitting(headings, rows, width)) > 1:
            headings, rows = self._merged()
        for at, part in enumerate(fitting(headings, rows, width)):
            yield framed(headings, rows, part, width, title=None if at else self.title, title_style="bold")

    def _merged(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows with the columns that tell rows apart in one, as a tree, a line for each of its nodes."""
        depths = range(1, len(self.headings))
        keys = next((n for n in depths if len({tuple(row[:n]) for row in self.rows}) == len(self.rows)), 1)
        lines: list[list[str]] = []
        last: Sequence[str] = ()
        for row in self.rows:
            for depth in range(keys):
                leaf = depth == keys - 1
                if leaf or row[: depth + 1] != last[: depth + 1]:
                    cells = row[keys:] if leaf else [""] * len(row[keys:])
                    lines.append(["  " * depth + row[depth], *cells])
            last = row
        return [" / ".join(self.headings[:keys]), *self.headings[keys:]], lines


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The least width at which each column breaks no cell and no word of its heading."""
    columns = ([row[at] for row in rows] for at in range(len(headings)))
    return [
        max(map(cell_len, (*heading.split(), *column)), default=0)
        for heading, column in zip(headings, columns, strict=True)
    ]
