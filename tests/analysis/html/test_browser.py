"""A page in a real browser, without a window and without a network: it opens, draws, sorts, zooms and shows values.

Skipped where there is no Chromium: CHROMIUM names one, or it is on the path, or playwright's own is installed.
"""

import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.html.answer import answers
from analysis.html.designs import Designs
from analysis.html.gains import gain_plots, gains_of
from analysis.html.of_runs import plots
from analysis.html.page import Page
from analysis.html.run_table import run_table
from tests.analysis.html.rows import run, sized
from tests.analysis.html.test_of_runs import GRID
from tests.analysis.html.test_page import EVIL, a_page

WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium to test pages with: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every kind of plot, a reference, and a run that failed."""
    told = [sized(at * 1.5, "told", 10 * at, reference="knows the future") for at in (1, 3, 5)]
    designs = Designs.of([*GRID, *told, run(None, "a-policy-that-is-refused", reason="too small")])
    gains = gain_plots(gains_of(["domoe over lru", "lru over domoe", "told over lru"], designs), designs)
    page = Page("Runs", "Which?", answers(designs), "Simulated.", [*gains, *plots(designs)], (["file"], [["out"]]),
                run_table(designs, dict.fromkeys(range(len(designs.runs)), 1)))  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page.html(), "utf-8")
    return path.as_uri()


class Opened:
    """The page, drawn once for each width, and everything that it said or asked for beyond itself."""

    def __init__(self, browser: Any, address: str) -> None:
        self._open = cache(lambda size: opened(browser, address, size))

    def __call__(self, size: tuple[int, int] = WIDE, scheme: str = "light") -> tuple[Any, list[str]]:
        page, heard = self._open(size)
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(200)
        return page, heard


@pytest.fixture(scope="module")
def at(browser: Any, address: str) -> Opened:
    return Opened(browser, address)


def opened(browser: Any, address: str, size: tuple[int, int]) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if request.url != address else None)
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]", state="attached", timeout=60_000)
    return page, heard


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_page_draws_everything_in_its_width_without_a_word(at: Opened, size: tuple[int, int], scheme: str) -> None:
    page, heard = at(size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    drawn = page.evaluate("""[...document.querySelectorAll('.plot')].map(plot => [
        plot.id, plot.querySelectorAll('.scatterlayer .trace, .barlayer .point, .hm image').length,
        [...plot.querySelectorAll('.xtitle, .ytitle')].map(title => title.textContent).join(' ')])""")
    names = ["gain-by-stall", "pays-by-value", "throughput-by-cache", "front", "misses", "token-time", "heat-map"]
    assert [name for name, *_ in drawn] == names
    assert all(count > 0 for _, count, _ in drawn)
    units = ["stall over compute", "policies", "(tokens/s)", "(GiB)", "(%)", "(ms)", "cache size"]
    assert all(unit in titles for unit, (_, _, titles) in zip(units, drawn, strict=True))
    paper, ink = page.evaluate("[getComputedStyle(document.body).backgroundColor, "
                               "getComputedStyle(document.querySelector('#front .xtitle')).fill]")  # fmt: skip
    light = [sum(map(int, colour[4:-1].split(","))) > 380 for colour in (paper, ink)]
    assert light == ([True, False] if scheme == "light" else [False, True])
    assert heard == []


def test_names_that_look_like_code_are_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "evil.html"
    path.write_text(a_page(EVIL).html(), "utf-8")
    page, heard = opened(browser, path.as_uri(), WIDE)
    assert EVIL in page.locator("#bars .ytick text").first.text_content()
    assert heard == [] and page.locator("script").count() == 4  # the data, the library packed and unpacked, the page's
    page.close()


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_no_label_of_a_plot_lies_on_another_or_is_cut_off(at: Opened, size: tuple[int, int]) -> None:
    page, _ = at(size)
    boxes = page.evaluate("""[...document.querySelectorAll('.plot')].map(plot => {
        const own = plot.getBoundingClientRect();
        const box = e => { const b = e.getBoundingClientRect();
                           return [b.left - own.left, b.top - own.top, b.right - own.left, b.bottom - own.top]; };
        const texts = '.xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .cbtitle text';
        return { size: [own.width, own.height], texts: [...plot.querySelectorAll(texts)].filter(e => e.textContent)
                 .map(e => [e.textContent, box(e)]) }; })""")
    for plot in boxes:
        width, height = plot["size"]
        for place, (text, (left, top, right, bottom)) in enumerate(plot["texts"]):
            assert left >= -1 and top >= -1 and right <= width + 1 and bottom <= height + 1, text
            for other, (left2, top2, right2, bottom2) in plot["texts"][:place]:
                apart = right - 1 <= left2 or right2 - 1 <= left or bottom - 2 <= top2 or bottom2 - 2 <= top
                assert apart, f"{text} lies on {other}"


def test_table_sorts_by_pointer_and_by_keyboard(at: Opened) -> None:
    page, _ = at()

    def column(heading: str) -> list[str]:
        place = page.locator(".sortable thead th").all_inner_texts().index(heading)
        return page.locator(f".sortable tbody tr td:nth-child({place + 1})").all_inner_texts()

    speeds = column("tokens/s")
    assert speeds[-1] == "–" and [float(s) for s in speeds[:-1]] == sorted(map(float, speeds[:-1]), reverse=True)
    button = page.get_by_role("button", name="tokens/s", exact=True)
    for order in ("descending", "ascending"):
        button.click()
        assert button.locator("xpath=..").get_attribute("aria-sort") == order
    assert [float(s) for s in column("tokens/s")[:-1]] == sorted(map(float, speeds[:-1]))
    assert column("tokens/s")[-1] == "–"  # what has no value stays at the end
    page.get_by_role("button", name="policy", exact=True).focus()
    page.keyboard.press("Enter")
    assert column("policy") == sorted(column("policy"))


def test_values_show_under_the_pointer(at: Opened) -> None:
    page, _ = at()
    page.locator("#throughput-by-cache").scroll_into_view_if_needed()
    page.locator("#throughput-by-cache .points path").first.hover(force=True)
    shown = page.locator("#throughput-by-cache .hoverlayer").text_content()
    assert "cache (GiB): " in shown and "throughput (tokens/s): " in shown and "hits " in shown


def test_zoom_works_without_a_pointer_and_goes_back(at: Opened) -> None:
    page, _ = at()

    def span() -> float:
        low, high = page.evaluate("document.getElementById('misses')._fullLayout.xaxis.range")
        return float(high - low)

    before = span()
    for name, smaller in (("Zoom in: Awaited look-ups", True), ("Show all: Awaited look-ups", False)):
        page.get_by_role("button", name=name).focus()
        page.keyboard.press("Enter")
        page.wait_for_timeout(50)
        assert (span() < before) == smaller
    assert span() == pytest.approx(before)


def test_numbers_of_a_plot_open_as_a_table(at: Opened) -> None:
    page, _ = at()
    details = page.locator("details[data-plot=heat-map]")
    details.locator("summary").focus()
    page.keyboard.press("Enter")
    assert details.locator("tbody tr").first.inner_text().split() == ["lru", "2", "9", "30"]


def test_everything_that_can_be_pressed_has_a_name_and_is_reached_by_tab(at: Opened) -> None:
    page, _ = at(PHONE)
    names = page.evaluate("[...document.querySelectorAll('button')].map(b => b.ariaLabel ?? b.textContent)")
    assert all(names)
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
    assert set(names) <= reached
    assert page.evaluate("[...document.querySelectorAll('[role=img]')].every(plot => plot.ariaLabel)")
