"""What each plot of a page of runs shows, and that what the runs do not hold is left out."""

from dataclasses import replace

from analysis.html.designs import Designs
from analysis.html.of_runs import MOST_BARS, MOST_LINES, plots
from analysis.html.plots import AnyPlot, Bars, Curves, HeatMap
from analysis.html.runs import Run
from tests.analysis.html.rows import run, sized


def drawn(*runs: Run) -> dict[str, AnyPlot]:
    return {plot.name: plot for plot in plots(Designs.of(runs))}


GRID = [
    sized(2.0, "lru", 10), sized(3.0, "domoe", 10), sized(30.0, "lru", 50), sized(25.0, "domoe", 50),
    sized(9.0, "lru", 30), sized(8.0, "domoe", 30),
]  # fmt: skip


def test_throughput_rises_over_the_cache_between_bounds() -> None:
    plot = drawn(*GRID)["throughput-by-cache"]
    assert isinstance(plot, Curves)
    by_name = {one.name: one for one in plot.series}
    assert list(by_name["lru"].x) == [10, 30, 50] and list(by_name["lru"].y) == [2, 9, 30]
    assert list(by_name["link bound"].y) == [5, 15, 25] and by_name["link bound"].style == "bound"
    assert set(by_name["compute bound"].y) == {40}
    assert plot.x.title == "cache (GiB)" and "tokens/s" in plot.y.title and plot.y.log


def test_runs_without_bounds_show_none() -> None:
    bare = [replace(one, values={**one.values, "compute_bound_tokens_per_s": None, "link_bound_tokens_per_s": None,
                                 "min_hit_ratio": None}) for one in GRID]  # fmt: skip
    shown = drawn(*bare)
    assert [one.style for name in ("throughput-by-cache", "misses") for one in shown[name].series] == ["line"] * 4  # type: ignore[union-attr]


def test_misses_are_what_is_not_resident_with_min_on_top() -> None:
    plot = drawn(*GRID)["misses"]
    assert isinstance(plot, Curves)
    by_name = {one.name: one for one in plot.series}
    assert list(by_name["lru"].y) == [95, 85, 75] and list(by_name["MIN"].y) == [90, 70, 50]


def test_one_cache_size_is_bars_without_axes_that_would_be_empty() -> None:
    shown = drawn(sized(2.0, "lru", 10), sized(3.0, "domoe", 10), sized(9.0, "told", 10, reference="knows the future"))
    assert set(shown) == {"throughput", "token-time"}
    bars = shown["throughput"]
    assert isinstance(bars, Bars) and list(bars.names) == ["told *", "domoe", "lru"]
    assert bars.marks == {"compute bound": 40.0, "link bound": 5.0}


def test_time_of_a_token_is_that_of_its_parts() -> None:
    bars = drawn(sized(2.0, "lru", 10))["token-time"]
    assert isinstance(bars, Bars)
    assert bars.parts == {"computing": [10.0], "waiting for missing experts": [5.0]}


def test_front_leaves_out_references_and_what_the_card_cannot_hold() -> None:
    shown = drawn(*GRID, sized(99.0, "told", 10, reference="knows"), sized(98.0, "lfu", 70, beyond=True))
    plot = shown["front"]
    assert isinstance(plot, Curves)
    front = next(one for one in plot.series if one.style == "front")
    assert list(zip(front.x, front.y, strict=True)) == [(12, 3), (32, 9), (52, 30)]
    assert "knee" not in {one.name for one in plot.series}  # it sags: no point lies above the line


def test_heat_map_has_a_cell_for_each_pair_of_two_axes() -> None:
    plot = drawn(*GRID)["heat-map"]
    assert isinstance(plot, HeatMap)
    assert list(plot.rows_of) == ["lru", "domoe"] and list(plot.columns_of) == ["10%", "30%", "50%"]
    assert plot.values == [[2, 9, 30], [3, 8, 25]]


def test_heat_map_full_of_holes_is_left_out() -> None:
    diagonal = [sized(float(at), f"policy{at}", 10 * at) for at in range(1, 7)]
    assert "heat-map" not in drawn(*diagonal)


def test_each_workload_and_card_has_a_plot_of_its_own() -> None:
    both = [replace(one, fields={**one.fields, "trace": trace}) for trace in ("law.npz", "code.npz") for one in GRID]
    shown = drawn(*both)
    assert {"throughput-by-cache", "throughput-by-cache-2", "front", "front-2"} <= set(shown)
    assert {shown["front"].title, shown["front-2"].title} == {
        "Throughput against GPU memory: law", "Throughput against GPU memory: code",
    }  # fmt: skip
    lines = shown["throughput-by-cache"]
    assert isinstance(lines, Curves) and {one.name for one in lines.series if one.style == "line"} == {"lru", "domoe"}


def test_of_many_designs_the_fastest_are_drawn_and_the_page_says_so() -> None:
    many = [sized(float(at + 1), f"p{at:02}", 10 * size) for at in range(30) for size in (1, 2)]
    shown = drawn(*many)
    lines = shown["throughput-by-cache"]
    assert isinstance(lines, Curves) and sum(one.style == "line" for one in lines.series) == MOST_LINES
    assert f"The {MOST_LINES} fastest of 30 policies" in lines.says
    assert f"The {MOST_BARS} fastest of 60" in shown["token-time"].says


def test_other_numbers_are_an_axis_where_the_cache_is_the_same() -> None:
    runs = [run(float(batch), "lru", {"batch": batch}) for batch in (4, 1, 2)]
    plot = drawn(*runs)["throughput-by-batch"]
    assert isinstance(plot, Curves) and list(plot.series[0].x) == [1, 2, 4]


def test_runs_that_failed_are_drawn_nowhere() -> None:
    assert drawn(run(None)) == {}
