"""Tables on narrow terminals: names and numbers whole, every column somewhere or said to be left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from analysis.experiments import EXPERIMENTS
from analysis.pages.text import read
from ground.tables import Parts, fitting, framed
from sim.policies import policy_classes
from sim.report.catalogue import policies_table, policy_json
from tests.support.places import REPOSITORY
from traces.statistics.routing import show_statistics

RESULTS = REPOSITORY / "docs" / "results"
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
    names = [name + (" *" if r["settings"]["reference"] else "") for name, r in zip(names, reports, strict=True)]
    shown = cells_of(out.splitlines())
    assert len(names) > 10 and sorted(row[0] for row in shown) == sorted(names)
    assert all(all(row) for row in shown)
    assert "or with --json: " in out


def test_the_list_of_policies_has_whole_words_in_80_columns() -> None:
    lines = lines_of(policies_table(), 80)
    assert max(map(len, lines)) <= 80
    shown = {word for line in lines for word in line.split()}
    for name, kind in policy_classes().items():
        assert name in shown and set(kind.summary.split()) <= shown
        assert all(any(word.startswith(f"{key}=") for word in shown) for key in policy_json(name)["parameters"])
    assert {"mode=full|table|trajectory|best,", "loads=early|fewest", "prefill_embeddings,"} <= shown


def test_what_tells_domains_apart_has_whole_words_in_80_columns() -> None:
    names = ["banking", "code", "counselling", "law", "math"]
    each = dict.fromkeys(names, 0.125)
    found = {
        "neighbour_recall": dict.fromkeys(names, each), "popularity_recall": each, "previous_token_recall": each,
        "adjacent_layer_cosine": [0.5], "entropy_bits": [1.0],
    }  # fmt: skip
    console = Console(width=80)
    with console.capture() as page:
        show_statistics(found, console)
    rows = [line.split() for line in page.get().splitlines()]
    assert [row for row in rows if "0.125" in row] == [[name, *["0.125"] * 7] for name in names]
    assert any(row[:5] == names for row in rows)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_of_every_experiment_have_whole_cells_in_80_columns(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for sheet in experiment.sheets(read(RESULTS / f"{name}.json", experiment)):
        lines = lines_of(sheet, 80)
        assert max(map(len, lines)) <= 80
        if sheet.detail:  # sentences and addresses, which go over lines
            continue
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


def test_a_comparison_names_the_fewest_and_charges_predictions_to_a_token(
    said: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    policies = ["fifo", "lru", "lfu", "on-demand", "moe-infinity"]
    status, out, _ = said("compare", trace, "--cache", "3", "--policy", *policies)
    assert status == 0 and out.startswith("5 simulated replays of ")
    assert "note: all but on-demand: the cache is smaller" in out and "note: moe-infinity: activation" in out
    status, data, _ = said("compare", trace, "--cache", "3", "--policy", "moe-infinity", "--json", "-")
    (report,) = json.loads(data)
    heading = next(line for line in out.splitlines() if line.startswith("┃"))
    at = [cell.strip() for cell in heading.split("┃")[1:-1]].index("predict ms/token")
    (shown,) = (float(row[at]) for row in cells_of(out.splitlines()) if row[0] == "moe-infinity")
    assert shown > 0 and shown == pytest.approx(report["time_ms"]["predict"] / report["tokens"], abs=0.005)
