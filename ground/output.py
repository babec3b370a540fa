"""What a command leaves behind: JSON, in a file or on standard output, and tables on a terminal."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ground.files import atomic_path
from ground.text import printable_lines

WIDTH = 200
"""Characters of a line where no terminal sets a limit."""
LEAST_WIDTH = 20
"""What COLUMNS must say at least: in less, nothing can be read."""


@contextmanager
def written(target: str | None, *, indent: int = 1, ensure_ascii: bool = True) -> Iterator[Callable[[object], None]]:
    """Yield what writes JSON to ``target``; a file that cannot be written is refused before any work is done.

    ``indent`` and ``ensure_ascii`` are those of `json.dumps`.
    """

    def text(data: object) -> str:
        return json.dumps(data, indent=indent, allow_nan=False, ensure_ascii=ensure_ascii) + "\n"

    if target is None:
        yield lambda data: None
    elif target == "-":
        yield lambda data: print(text(data), end="")
    else:
        with atomic_path(target) as part:
            yield lambda data: _write(part, text(data))


def by_entries(data: Mapping[str, object], *, ensure_ascii: bool = True) -> str:
    """``data`` as a JSON text with a line a field, and a line an entry of a field that is a list of objects."""
    compact = json.JSONEncoder(ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":")).encode

    def listed(value: object) -> str:
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            return compact(value)
        return "[\n" + ",\n".join(map(compact, value)) + "\n]"

    lines = ",\n".join(f"{compact(key)}: {listed(value)}" for key, value in data.items())
    return f"{{\n{lines}\n}}\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


class _Inert(Console):
    """Shows nothing that moves a terminal's cursor or changes its colours, whatever names are shown.

    An escape is longer than what it stands for, so it is put in before lines are broken: rich cuts longer ones off.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Text whose control characters are escapes."""
        return super().render_str(printable_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of ``renderable``, whose control characters are escapes."""
        if isinstance(renderable, Text) and (plain := printable_lines(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(plain)
        return super().render(renderable, options)


def show(view: RenderableType, target: str | None) -> None:
    """The table to standard output, unless JSON goes there; in a file as wide as COLUMNS says, or else `WIDTH`."""
    if target != "-":
        # Names that people gave may hold brackets and colons, which are neither styles nor smileys.
        plain: dict[str, Any] = {"markup": False, "emoji": False}
        columns = os.environ.get("COLUMNS", "")
        asked = int(columns) >= LEAST_WIDTH if columns.isdecimal() else sys.stdout.isatty() or bool(columns)
        _Inert(width=None if asked else WIDTH, **plain).print(view)
