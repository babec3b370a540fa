"""What is shown of names: all of it, wherever lines break, and nothing that moves a cursor."""

from contextlib import redirect_stdout
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ground.output import show
from ground.text import printable

NAMES = st.text(st.sampled_from("ab/.[] :\x1b\x00\x85\u2028\xa0é界"), min_size=1, max_size=60)
"""Letters, what rich reads as styles, and what moves a cursor; no letter that joins the one before it."""


def shown(view: RenderableType, width: int) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        show(view, None)
    return out.getvalue()


def squeezed(text: str) -> str:
    """Without spaces and ends of lines, which go where a line breaks, and without frames."""
    return "".join(text.translate(dict.fromkeys(map(ord, "│┃┡╇┩└┘┌┐├┤─━┏┓╞╡╘╛═"))).split())


@given(name=NAMES, width=st.integers(20, 60))
def test_no_part_of_a_name_is_lost_where_its_line_breaks(name: str, width: int) -> None:
    """An escape was once put in when lines had been broken, and what was then too long was cut off."""
    table = Table(title=name)
    table.add_column()
    table.add_row(name)
    for view in (name, Text(f"note: {name}"), Group(Text(name, style="dim")), table):
        out = shown(view, width)
        assert all(character.isprintable() for character in out.replace("\n", "")), "no cursor moves"
        assert squeezed(printable(name)) in squeezed(out)


def test_what_others_named_is_no_style() -> None:
    assert shown(Text("a[red]b :smile:"), 40) == shown("a[red]b :smile:", 40) == "a[red]b :smile:\n"


@pytest.mark.parametrize("columns", [0, 1, 19])
def test_a_terminal_too_narrow_to_read_counts_as_unknown(columns: int) -> None:
    assert "throughput" in shown(Text("throughput"), columns)
    assert shown(Text("word " * 30), columns).count("\n") == 1
