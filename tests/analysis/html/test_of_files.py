"""Pages of real reports and sweeps: everything read from the files, and every number with its source."""

from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.html.designs import Designs
from analysis.html.of_runs import plots
from analysis.html.run_table import run_table
from analysis.html.runs import read_runs
from analysis.html.sources import sources
from sim.__main__ import main as simulate
from tests.support.analysis_worlds import domain_trace


@pytest.fixture(name="main")
def analysis() -> Any:
    """``said`` runs commands of the analysis here."""
    return main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report, a comparison and a sweep of one small trace."""
    here = tmp_path_factory.mktemp("page")
    domain_trace("law").save(here / "law.npz")
    usual = [str(here / "law.npz"), "--profile", str(here / "law.npz")]
    assert simulate(["replay", *usual, "--json", str(here / "one.json")]) == 0
    compared = ["compare", *usual, "--policy", "lru", "lfu", "clairvoyant", "--json", str(here / "several.json")]
    assert simulate(compared) == 0
    axes = ["--vary", "cache=20%:80%:20%", "policy=lru,lfu,clairvoyant"]
    assert simulate(["sweep", str(here / "law.npz"), "-o", str(here / "out"), *axes, "--workers", "1"]) == 0
    return here


def test_sweep_and_report_of_one_design_have_the_same_figures(folder: Path, tmp_path: Path) -> None:
    lru = [
        "--policy",
        "lru",
        "--cache",
        "40%",
        "--profile",
        str(folder / "law.npz"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert simulate(["replay", str(folder / "law.npz"), *lru]) == 0
    (report,) = read_runs([tmp_path / "r.json"])
    (row,) = [
        run for run in read_runs([folder / "out"]) if run.fields["policy"] == "lru" and run.fields["cache"] == "40%"
    ]
    ours = {name: value for name, value in report.values.items() if name not in ("engine_used", "notes", "status")}
    assert ours == {name: row.values[name] for name in ours}


def test_sweep_has_all_plots_of_its_two_axes(folder: Path) -> None:
    names = [plot.name for plot in plots(Designs.of(read_runs([folder / "out"])))]
    assert names == ["throughput-by-cache", "front", "misses", "token-time", "heat-map"]


def test_comparison_and_single_report_draw_only_what_they_hold(folder: Path) -> None:
    assert [p.name for p in plots(Designs.of(read_runs([folder / "several.json"])))] == ["throughput", "token-time"]
    assert [p.name for p in plots(Designs.of(read_runs([folder / "one.json"])))] == ["token-time"]


def test_every_row_of_the_table_names_its_source(folder: Path) -> None:
    paths = [folder / "several.json", folder / "out", folder / "one.json"]
    designs = Designs.of(read_runs(paths))
    lines, of_run = sources(designs.runs)
    assert {line[1] for line in lines} == set(map(str, paths)) and all(all(line) for line in lines)
    table = run_table(designs, of_run)
    assert len(table.rows) == len(designs.runs) == 3 + 12 + 1
    assert {row[-1].shown for row in table.rows} == {line[0] for line in lines}
    speeds = [row[table.headings.index("tokens/s")].key for row in table.rows]
    assert speeds == sorted(speeds, reverse=True)  # type: ignore[type-var]


def test_page_is_written_and_written_again_into_the_folder_of_its_sweep(said: Any, folder: Path) -> None:
    page = folder / "out" / "report.html"
    assert said("page", folder / "out", "-o", page)[0] == 0
    text = page.read_text("utf-8")
    assert said("page", folder / "out", "-o", page)[0] == 0 and page.read_text("utf-8") == text
    assert "The fastest design is" in text and "95 % interval" in text
