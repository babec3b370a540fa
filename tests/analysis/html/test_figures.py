"""Files of plots: the same bytes for the same data, numbers beside them, and no input overwritten."""

import csv
from pathlib import Path

import pytest

from analysis.html import figures
from analysis.html.designs import Designs
from analysis.html.gains import gain_plots, gains_of
from analysis.html.of_runs import plots
from analysis.html.plots import AnyPlot, Axis, Curves, Series
from tests.analysis.html.rows import sized
from tests.analysis.html.test_of_runs import GRID

KNEED = [sized(5, "lru", 10), sized(30, "lru", 20), sized(33, "lru", 50), sized(1, "lfu", 50, tokens_per_s_low=0.9)]


def every_kind() -> list[AnyPlot]:
    bars = [plot for plot in plots(Designs.of(GRID[:2])) if plot.name == "throughput"]
    area = Curves("link", "$Link$", "", Axis("s"), Axis("%"), [Series("_a", [1, 2], [3, None], "area")])
    designs = Designs.of(GRID)
    gains = gain_plots(gains_of(["domoe over lru"], designs), designs)
    return [*gains, *plots(designs), *bars, area, *(p for p in plots(Designs.of(KNEED)) if p.name == "front")]


def test_files_are_the_same_for_the_same_data(tmp_path: Path) -> None:
    few = every_kind()[-1:]
    for folder in ("one", "two"):
        figures.write(few, tmp_path / folder)
    made = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert made == sorted(figures.names(few))
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in made)


def test_numbers_beside_a_plot_are_those_that_it_shows(tmp_path: Path) -> None:
    (heat,) = [plot for plot in every_kind() if plot.name == "heat-map"]
    figures.write([heat], tmp_path)
    with (tmp_path / "heat-map.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["policy / cache size: throughput (tokens/s)", "10%", "30%", "50%"]
    assert rows[1:] == [["lru", "2.0", "9.0", "30.0"], ["domoe", "3.0", "8.0", "25.0"]]


@pytest.mark.parametrize("plot", every_kind(), ids=lambda plot: plot.name)
def test_every_axis_says_what_it_is_and_holds_something(plot: AnyPlot) -> None:
    drawn = figures.drawn(plot)
    axes = drawn.axes[0]
    assert axes.get_xlabel() and axes.has_data()
    assert axes.get_ylabel() or axes.get_yticklabels()
    assert all(len(row) == len(plot.header()) for row in plot.rows())
