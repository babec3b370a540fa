"""What every command that replays does at its edges: parameters as typed, JSON files and tables on a terminal."""

import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from ground.errors import InputError
from ground.files import atomic_path
from ground.text import printable

WIDTH = 200
"""Characters of a line where no terminal sets a limit."""


def values_of(settings: Sequence[str] | None, where: str) -> dict[str, object]:
    """``key=value`` pairs, ``where`` on the command line; a value is read as JSON where it is JSON, else as text."""
    values: dict[str, object] = {}
    for setting in settings or []:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"{where} {setting!r}: expected key=value")
        if key in values:
            raise InputError(f"{where} {setting!r}: {key} is given twice; expected one value")
        try:
            values[key] = json_module.loads(text)
        except ValueError:
            values[key] = text
        except RecursionError:
            raise InputError(f"{where} {key}: nested too deep; expected a value of fewer brackets") from None
    return values


@contextmanager
def written(target: str | None) -> Iterator[Callable[[object], None]]:
    """Yield what writes JSON to ``target``; a file that cannot be written is refused before any work is done."""
    if target is None:
        yield lambda data: None
    elif target == "-":
        yield lambda data: print(json_module.dumps(data, indent=1, allow_nan=False))
    else:
        with atomic_path(target) as part:
            yield lambda data: _write(part, data)


def _write(path: Path, data: object) -> None:
    path.write_text(json_module.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass
class _Inert:
    """A table of which no character moves a terminal's cursor or changes its colours, whatever names it shows."""

    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.view, options):
            yield Segment("\n".join(map(printable, text.split("\n"))), style, control)


def show(view: RenderableType, target: str | None) -> None:
    """The table to standard output, unless JSON goes there; in a file as wide as COLUMNS says, or else `WIDTH`."""
    if target != "-":
        # Names that people gave may hold brackets and colons, which are neither styles nor smileys.
        plain: dict[str, Any] = {"markup": False, "emoji": False}
        asked = sys.stdout.isatty() or "COLUMNS" in os.environ
        console = Console(width=None if asked else WIDTH, **plain)
        console.print(_Inert(view))
