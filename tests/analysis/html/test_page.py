"""A page holds all it shows, loads nothing, says names as they are, and can be read in light and dark."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.html.page import Page
from analysis.html.plots import Axis, Bars, Curves, HeatMap, Series
from analysis.html.run_table import Cell, Table

EVIL = "</script><script>alert(1)</script>&\"'<b>"


@pytest.fixture(name="main")
def analysis() -> Any:
    """``said`` runs commands of the analysis here."""
    return main


def a_page(name: str = "a name") -> Page:
    curve = Curves("curve", name, name, Axis(name), Axis("speed (tokens/s)", log=True),
                   [Series(name, [1, 2], [3, None], notes=[name, name])])  # fmt: skip
    bars = Bars("bars", name, name, Axis(name), [name], {name: [2.0]}, [(1.0, 3.0)], {name: 4.0})
    heat = HeatMap("heat", name, name, Axis(name), Axis(name), [name], [name], [[0.5]], name)
    table = Table([name, "n"], [False, True], [[Cell(name, name), Cell("1", 1.0)]])
    return Page(name, name, [name], name, [curve, bars, heat], ([name], [[name]]), table, name, [name])


class Reader(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_names_are_text_whatever_they_hold() -> None:
    plain, evil = parsed(a_page().html()), parsed(a_page(EVIL).html())
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in evil.tags]
    assert EVIL in evil.text


def test_texts_of_plots_hold_no_markup_of_names() -> None:
    text = a_page(EVIL).html()
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert "<" not in re.search(r'id="plots">(.*?)</script>\n', text, re.S)[1]  # type: ignore[index]
    forms = json.dumps([plot["form"] for plot in plots.values()])
    assert "<script" not in forms and "&lt;script" in forms
    assert plots["curve"]["rows"] == [[EVIL, 1, 3, EVIL], [EVIL, 2, None, EVIL]]


def test_page_loads_nothing() -> None:
    reader = parsed(a_page().html())
    assert not [tag for tag, has in reader.tags if tag in ("link", "img", "iframe") or has.keys() & {"src", "href"}]
    (policy,) = [has["content"] for tag, has in reader.tags if tag == "meta" and "http-equiv" in has]
    assert policy is not None and policy.startswith("default-src 'none';") and "http" not in policy


def test_page_is_the_same_for_the_same_content_and_weighs_two_megabytes() -> None:
    assert a_page().html() == a_page().html()
    assert len(a_page().html()) < 2.5e6
    assert len(replace(a_page(), plots=[]).html()) < 50_000


def palettes() -> dict[str, dict[str, str]]:
    css = (resources.files("analysis.html") / "page.css").read_text("utf-8")
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S))
    return {"light": light, "dark": dark}


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    parts = [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in (one, other)]
    linear = [[c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in part] for part in parts]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(theme: str) -> None:
    colours = palettes()[theme]
    for paper in ("paper", "panel"):
        assert all(contrast(colours[ink], colours[paper]) >= 4.5 for ink in ("ink", "soft", "link"))
    lines = [colours[f"c{at}"] for at in range(10)]
    assert len(set(lines)) == 10 and all(contrast(line, colours["paper"]) >= 3 for line in lines)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not what `sim replay --json`"),
        ("[]", "no run that came to an end"),
        ('{"policy": "lru"}', "not what `sim replay --json`"),
        ('[{"policy": "lru", "error": "too small"}]', "no run that came to an end"),
    ],
)
def test_what_is_no_report_is_one_line_and_no_page(said: Any, tmp_path: Path, content: str, expected: str) -> None:
    report, page = tmp_path / "r.json", tmp_path / "p.html"
    report.write_text(content)
    status, out, err = said("page", report, "-o", page)
    assert status == 2 and out == "" and err.count("\n") == 1 and expected in err and not page.exists()


def test_without_plotly_the_extra_is_named(said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    report = tmp_path / "r.json"
    report.write_text("[]")
    status, _, err = said("page", report, "-o", tmp_path / "p.html")
    assert status == 2 and err == "error: plotly is not installed; pip install 'moe-replay[page]'\n"


def test_folder_without_a_table_is_one_line(said: Any, tmp_path: Path) -> None:
    status, _, err = said("page", tmp_path, "-o", tmp_path / "p.html")
    assert status == 2 and "expected the folder of a sweep that has ended" in err and err.count("\n") == 1


def test_page_does_not_overwrite_what_it_is_made_from(said: Any, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    report.write_text("{}")
    status, _, err = said("page", report, "-o", report)
    assert status == 2 and "would overwrite an input" in err and report.read_text() == "{}"
