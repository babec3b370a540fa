"""The analysis from the command line: tables, figures, pages; whatever is wrong is one line, status 2 and no file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.experiments import EXPERIMENTS
from analysis.pages.report import files_of, listed
from ground.errors import InputError
from tests.support.analysis_worlds import domain_traces
from tests.support.places import REPOSITORY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return domain_traces(tmp_path_factory.mktemp("cli") / "toy")


@pytest.fixture(name="main")
def analysis() -> Any:
    """``said`` runs commands of the analysis here."""
    return main


def test_a_table_is_printed_and_written_as_markdown_and_data(said: Any, folder: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "t.md", tmp_path / "t.json"
    status, out, _ = said("table", "domoe-similarity", "--traces", folder, "-o", page, "--json", data)
    assert status == 0 and "cosine of one token's embeddings" in out
    assert page.read_text("utf-8").startswith("## Figure 2")
    written = json.loads(data.read_text("utf-8"))
    assert written["experiment"] == "domoe-similarity" and written["made"]["clock"] == "simulated"
    again = said("table", "domoe-similarity", "--data", data)
    assert again[0] == 0 and again[1] == out


def test_json_on_standard_output_is_alone(said: Any, folder: Path) -> None:
    status, out, _ = said("table", "domoe-matching", "--traces", folder, "--json", "-")
    assert status == 0 and json.loads(out)["experiment"] == "domoe-matching"


def test_experiments_are_listed_for_people_and_for_programs(said: Any, tmp_path: Path) -> None:
    status, lines, _ = said("experiments")
    assert max(map(len, lines.splitlines())) <= 80
    assert status == 0 and [line.split()[0] for line in lines.splitlines()] == list(EXPERIMENTS)
    assert said("experiments", "--json", tmp_path / "e.json") == (0, lines, "")
    status, out, _ = said("experiments", "--json", "-")
    assert status == 0 and out == (tmp_path / "e.json").read_text("utf-8")
    for entry, line in zip(json.loads(out), lines.splitlines(), strict=True):
        name, kind, title = line.split(None, 2)
        assert entry == {"name": name, "title": title, "figure": kind == "figure"}
    status, out, err = said("experiments", "--json", tmp_path)
    assert status == 2 and out == "" and err.startswith(f"error: --json {tmp_path}: ") and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_figure_is_the_same_bytes_for_the_same_data(said: Any, folder: Path, tmp_path: Path, kind: str) -> None:
    data = tmp_path / "d.json"
    one, two = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
    assert said("figure", "domoe-similarity", "--traces", folder, "-o", one, "--json", data)[0] == 0
    assert said("figure", "domoe-similarity", "--data", data, "-o", two)[0] == 0
    assert one.stat().st_size > 1000 and one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["table", "nothing"], "experiment 'nothing' is unknown; expected one of domoe-overall"),
        (["figure", "domoe-overall"], "domoe-overall is a table"),
        (["figure", "domoe-similarity", "-o", "x.txt"], "a figure is a file ending in .png"),
        (["table", "domoe-overall", "--traces", "no-such.npz"], "no-such.npz"),
        (["table", "domoe-overall", "--hardware", "no-such"], "no-such"),
        (["table", "domoe-overall", "--cache", "much"], "much"),
        (["table", "domoe-overall", "--software", "no-such"], "no-such"),
        (["table", "domoe-overall", "--workers", "0"], "--workers 0; expected at least 1"),
        (["table", "domoe-limits", "--workers", "0"], "--workers 0; expected at least 1"),
        (["table", "domoe-limits", "--software"], "--software: expected at least one"),
        (["table", "domoe-limits", "--traces"], "--traces: expected at least one"),
        (["report", "domoe", "-o", ".", "--routes"], "--routes: expected at least one"),
        (["table", "domoe-similarity", "--data", "no-such.json"], "no-such.json"),
        (["report", "nothing", "-o", "."], "report 'nothing' is unknown; expected one of domoe"),
        (["report", "domoe", "-o", "no-such-folder"], "no-such-folder: is no folder"),
        (["report", "domoe", "-o", ".", "--only", "nothing"], "--only nothing: expected one of domoe-overall"),
    ],
)
def test_what_is_wrong_is_one_line(
    said: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments if {"--traces", "--data"} & set(arguments) else [*arguments, "--traces", str(folder)]
    status, out, err = said(*given, *([] if "--workers" in given else ["--workers", 1]))
    assert status == 2 and out == ""
    message = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(message) == 1 and expected in message[0], err
    assert list(tmp_path.iterdir()) == []


def test_data_of_another_experiment_is_refused(said: Any, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.json"
    assert said("table", "domoe-similarity", "--traces", folder, "--json", data)[0] == 0
    status, _, err = said("table", "domoe-matching", "--data", data)
    assert status == 2 and "holds 'domoe-similarity'; expected the data of domoe-matching" in err
    data.write_text("{", "utf-8")
    status, _, err = said("table", "domoe-similarity", "--data", data)
    assert status == 2 and "not JSON" in err


@pytest.mark.parametrize("value", ["x", None, 3, []])
def test_damaged_data_is_one_line_whatever_is_damaged(said: Any, folder: Path, tmp_path: Path, value: object) -> None:
    data = tmp_path / "d.json"
    assert said("table", "domoe-similarity", "--traces", folder, "--json", data)[0] == 0
    whole = json.loads(data.read_text("utf-8"))
    for key in whole.keys() - {"experiment"}:
        for damaged in (whole | {key: value}, {other: kept for other, kept in whole.items() if other != key}):
            data.write_text(json.dumps(damaged), "utf-8")
            status, _, err = said("figure", "domoe-similarity", "--data", data, "-o", tmp_path / "f.png")
            if key not in damaged or status:
                assert status == 2 and err.startswith(f"error: {data}: not the data of domoe-similarity"), (key, err)
                assert err.count("\n") == 1 and [p.name for p in tmp_path.iterdir()] == ["d.json"]
            else:
                (tmp_path / "f.png").unlink()


def test_data_that_divides_by_nothing_is_one_line(said: Any, tmp_path: Path) -> None:
    whole = json.loads((REPOSITORY / "docs/results/domoe-limits.json").read_text("utf-8"))
    whole["points"][0]["streaming"] = 0.0
    damaged = tmp_path / "d.json"
    damaged.write_text(json.dumps(whole), "utf-8")
    status, _, err = said("table", "domoe-limits", "--data", damaged)
    assert status == 2 and err.startswith(f"error: {damaged}: not the data of domoe-limits") and err.count("\n") == 1


def test_an_output_does_not_overwrite_an_input(said: Any, folder: Path) -> None:
    trace = folder / "toy_law.npz"
    before = trace.read_bytes()
    status, _, err = said("table", "domoe-similarity", "--traces", trace, "--json", trace)
    assert status == 2 and "would overwrite an input" in err
    assert trace.read_bytes() == before


@pytest.mark.parametrize("option", ["--hardware", "--software", "--large"])
def test_a_report_does_not_overwrite_an_input(said: Any, folder: Path, tmp_path: Path, option: str) -> None:
    mine = tmp_path / "domoe-limits.json"
    mine.write_text("mine", "utf-8")
    status, _, err = said("report", "domoe", "-o", tmp_path, "--traces", folder, option, mine)
    assert status == 2 and "domoe-limits.json: would overwrite an input" in err
    assert mine.read_text("utf-8") == "mine" and list(tmp_path.iterdir()) == [mine]


def test_a_report_is_a_page_an_experiment_with_figures_and_data_and_a_list_of_them(
    said: Any, folder: Path, tmp_path: Path
) -> None:
    only = ["--only", "domoe-similarity", "domoe-matching"]
    status, out, _ = said("report", "domoe", "-o", tmp_path, "--traces", folder, *only)
    page = tmp_path / "domoe.md"
    assert status == 0 and out.strip() == str(page)
    assert {p.name for p in tmp_path.iterdir()} == {
        "domoe.md", "domoe-similarity.json", "domoe-similarity.png", "domoe-similarity.md",
        "domoe-matching.json", "domoe-matching.md",
    }  # fmt: skip
    text = page.read_text("utf-8")
    assert "](domoe-similarity.md)" in text and "real-routes is not measured: it needs --routes" in text
    similarity = (tmp_path / "domoe-similarity.md").read_text("utf-8")
    assert similarity.startswith("# Figure 2") and "![Figure 2" in similarity
    assert f"report domoe -o {tmp_path.as_posix()} --only domoe-similarity --traces FILES\n" in similarity
    # What a person writes beside the list stays; what is not asked for again keeps its data.
    page.write_text(text.replace("# domoe:", "My findings.\n\n# domoe:"), "utf-8")
    status, _, _ = said("report", "domoe", "-o", tmp_path, "--show")
    assert status == 0 and page.read_text("utf-8") == "My findings.\n\n" + text
    assert (tmp_path / "domoe-similarity.md").read_text("utf-8") == similarity


def test_a_part_that_cannot_be_measured_is_named_and_what_was_measured_stays(
    said: Any, folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    only = ["--only", "domoe-limits", "real-routes", "--routes", tmp_path_factory.mktemp("empty")]
    status, _, err = said("report", "domoe", "-o", tmp_path, "--traces", folder / "toy_law.npz", *only)
    assert status == 2 and "error: real-routes: " in err and "--only leaves it out" in err
    assert [p.name for p in tmp_path.iterdir()] == ["domoe-limits.json"]
    assert said("report", "domoe", "-o", tmp_path, "--show", "--traces", folder)[0] == 0
    assert "[domoe-limits.json](domoe-limits.json)" in (tmp_path / "domoe-limits.md").read_text("utf-8")


def test_a_page_that_lacks_a_mark_is_refused_before_any_work(said: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "domoe.md").write_text("# mine\n", "utf-8")
    status, _, err = said("report", "domoe", "-o", tmp_path, "--traces", folder)
    assert status == 2 and "lacks the marks <!-- pages -->" in err
    assert [p.name for p in tmp_path.iterdir()] == ["domoe.md"]


def test_the_list_of_pages_is_replaced_between_its_marks_alone() -> None:
    page = "a <!-- pages -->old<!-- end of pages --> b"
    assert listed(page, "- new\n") == "a <!-- pages -->\n- new\n<!-- end of pages --> b"
    with pytest.raises(InputError, match="lacks the marks"):
        listed("a <!-- pages --> b", "new")


def test_experiments_have_a_name_a_place_and_files_that_no_other_has() -> None:
    assert len({one.place for one in EXPERIMENTS.values()}) == len(EXPERIMENTS)
    modules = {path.stem for path in (REPOSITORY / "analysis/experiments").glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in EXPERIMENTS} == modules
    files = files_of("domoe")
    assert len(set(files)) == len(files)


def test_experiments_are_listed(said: Any) -> None:
    status, out, _ = said("experiments")
    assert status == 0 and all(name in out for name in EXPERIMENTS)


def test_help_needs_neither_matplotlib_nor_scipy() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['scipy'] = None\n"
        "from analysis.__main__ import main\n"
        "sys.exit(main(['table', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--traces" in done.stdout


def test_what_is_not_installed_is_said(said: Any, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.json"
    assert said("table", "domoe-similarity", "--traces", folder, "--json", data)[0] == 0
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from analysis.__main__ import main\n"
        "sys.exit(main(['figure', 'domoe-similarity', '-o', sys.argv[2], '--data', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(data), str(tmp_path / "d.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: matplotlib is not installed; pip install 'moe-replay[analysis]'\n"
    assert not (tmp_path / "d.png").exists()
