"""Tables on narrow terminals: names and numbers whole, every column somewhere or said to be left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from analysis.catalogue import EXPERIMENTS
from analysis.pages import read
from sim.fitting import Parts, fitting, framed

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WORDS = st.text("abc", min_size=1, max_size=12)


def lines_of(view: RenderableType, width: int) -> list[str]:
    """What a terminal of this width shows."""
    console = Console(width=width, markup=False, emoji=False)
    with console.capture() as page:
        console.print(view)
    return page.get().splitlines()


def cells_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows without the blanks around them."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    """Headings of up to three words, some of them the same, and rows of single words."""
    headings = draw(st.lists(st.lists(WORDS, min_size=1, max_size=3).map(" ".join), min_size=2, max_size=7))
    row = st.lists(WORDS, min_size=len(headings), max_size=len(headings))
    return headings, draw(st.lists(row, min_size=1, max_size=4))


@given(tables(), st.integers(1, 140))
def test_every_column_is_in_one_part_beside_the_first(table: Any, width: int) -> None:
    headings, rows = table
    parts = fitting(headings, rows, width)
    assert {first for first, *_ in parts} == {0}
    assert [at for _, *others in parts for at in others] == list(range(1, len(headings)))


@given(tables(), st.integers(31, 140))  # two columns of twelve characters and their frame
def test_no_part_is_wider_than_the_terminal_or_breaks_a_cell(table: Any, width: int) -> None:
    headings, rows = table
    for part in fitting(headings, rows, width):
        lines = lines_of(framed(headings, rows, part, width), width)
        assert max(map(len, lines)) <= width
        assert cells_of(lines) == [[row[at] for at in part] for row in rows]


@given(tables())
def test_where_all_fits_there_is_one_part_and_headings_are_whole(table: Any) -> None:
    headings, rows = table
    (part,) = fitting(headings, rows, 400)
    assert part == list(range(len(headings)))
    heading = lines_of(framed(headings, rows, part, 400), 400)[1]
    assert [cell.strip() for cell in heading.split("┃")[1:-1]] == headings


def test_a_heading_that_others_share_begins_no_part() -> None:
    headings = ["name", "one: mean", "least", "two: mean", "least"]
    rows = [["a", "1", "2", "3", "4"]]
    # Beside the name (7 characters and 1) there is room for mean and least (15) and for another mean (7), not for both.
    assert fitting(headings, rows, 31) == [[0, 1, 2], [0, 3, 4]]
    assert fitting(headings, rows, 38) == [[0, 1, 2, 3, 4]]
    assert fitting(headings, rows, 1) == [[0, 1], [0, 2], [0, 3], [0, 4]]


def test_a_comparison_of_all_policies_has_whole_names_in_80_columns(
    said: Any, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = said("compare", trace, "--json", tmp_path / "all.json")
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    reports = json.loads((tmp_path / "all.json").read_text())
    given = [", ".join(f"{key}={value}" for key, value in report["settings"]["set"].items()) for report in reports]
    names = [r["policy"] + (f" ({values})" if values else "") for r, values in zip(reports, given, strict=True)]
    shown = cells_of(out.splitlines())
    assert len(names) > 10 and sorted(row[0] for row in shown) == sorted(names)
    assert all(all(row) for row in shown)
    assert "or with --json: " in out


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_of_every_experiment_have_whole_cells_in_80_columns(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for sheet in experiment.sheets(read(RESULTS / f"{name}.json", experiment)):
        lines = lines_of(sheet, 80)
        assert max(map(len, lines)) <= 80
        shown = {cell for row in cells_of(lines) for cell in row}
        assert shown | {""} == {cell for row in sheet.rows for cell in row} | {""}


def test_what_tells_rows_apart_becomes_a_tree_where_a_table_is_too_wide() -> None:
    rows = [["m", "own", "1"], ["m", "other", "2"], ["n", "own", "3"]]
    table = Parts("t", ["model", "learned from", "found"], rows)
    assert cells_of(lines_of(table, 40)) == rows
    leaves = [line for line in lines_of(table, 26) if line.startswith("│")]
    assert leaves == [
        "│ m       │       │",
        "│   own   │     1 │",
        "│   other │     2 │",
        "│ n       │       │",
        "│   own   │     3 │",
    ]
