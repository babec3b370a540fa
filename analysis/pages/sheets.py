"""Tables as data, shown alike in a terminal and in Markdown."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ground.tables import Parts

NOTHING = "–"
_NOTES: dict[str, str] = tomllib.loads((resources.files("analysis") / "notes.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Sheet:
    """One table: cells are text as shown; ``notes`` stand below it.

    On a report's page a ``long`` one stands behind all others, and a ``detail`` is left out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    long: bool = False
    detail: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table and its notes."""
        yield Parts(self.title, self.columns, self.rows)
        for note in self.notes:
            yield Text(note, style="dim")

    def markdown(self) -> str:
        """The table in Markdown, under its title."""
        marks = ["---"] + ["--:"] * (len(self.columns) - 1)
        lines = [self.columns, marks, *self.rows]
        table = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"**{self.title}**\n\n{table}{notes}"


def notes(of: str, **values: object) -> list[str]:
    """The notes called ``of`` in notes.toml, each a line, with ``values`` in the place of its braces."""
    return [" ".join(note.split()).format(**values) for note in _NOTES[of].split("\n\n")]


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for what there is not."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def starred(value: float | None, worked_out: bool) -> str:
    """A published number as it was given, with a star if it was worked out from a factor."""
    return NOTHING if value is None else f"{value}{'*' if worked_out else ''}"


def interval(ratio: Mapping[str, Any], digits: int = 3) -> str:
    """A ratio with its interval: ``1.04 [1.02, 1.06]``."""
    value, low, high = (ratio[name] for name in ("value", "low", "high"))
    if value is None:
        return NOTHING
    return f"{value:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")


_OF_A_RUN: dict[str, tuple[str, Callable[[float | None, int], str], int]] = {
    "tokens/s": ("tokens_per_s", number, 2),
    "hit": ("hit_ratio", percent, 1),
    "late": ("late_ratio", percent, 1),
    "miss": ("miss_ratio", percent, 1),
    "GiB/token": ("gib_per_token", number, 2),
    "wasted": ("wasted", percent, 1),
    "predict ms/token": ("predict_ms_per_token", number, 2),
    "tables MiB": ("tables_mib", number, 0),
    "TTFT ms": ("ttft_ms", number, 0),
    "efficiency": ("efficiency", percent, 1),
}
"""Columns of a table of runs: the key of Replayed.to_json, how it is shown, and digits behind the point."""


def run_cells(run: Mapping[str, Any], columns: Sequence[str], **digits: int) -> list[str]:
    """What a run (Replayed.to_json) has in these columns; ``digits`` of some keys instead of the usual."""
    wanted = [_OF_A_RUN[column] for column in columns]
    return [shown(run[key], digits.get(key, usual)) for key, shown, usual in wanted]
