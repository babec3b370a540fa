"""What the documents say can be followed: links lead somewhere, named files and names are there, examples run."""

import re
import shlex
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("docs/results/*.md")])
ROOMS = ("ground/", "traces/", "sim/", "realrun/", "analysis/", "tests/", "docs/")


def _prose(path: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    """The headings of a document as links name them."""
    headings = re.findall(r"^#+ (.*)$", _prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", _prose(document)):
        name, _, heading = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), target
        assert not heading or heading in _anchors(path), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_file_of_the_project_that_a_document_names_is_there(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return  # it names what is no more
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", _prose(document)):
        if name.startswith(ROOMS):
            assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_name_that_a_document_places_in_a_file_is_defined_there(document: str) -> None:
    placed = re.findall(r"`([\w.]+)`\s+(?:of|in)\s+`([\w/.]+\.py)`", _prose(REPOSITORY / document))
    assert len(placed) >= 3
    for names, file in placed:
        for name in names.split("."):
            defined = rf"^\s*(?:def |class )?{name}\b[(:= ]"
            assert re.search(defined, (REPOSITORY / file).read_text("utf-8"), re.MULTILINE), (name, file)


def test_every_command_in_a_block_of_a_document_is_one_that_its_program_takes() -> None:
    shown = 0
    for document in DOCUMENTS:
        text = re.sub(r"\\\n\s*", " ", document.read_text("utf-8"))
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            if language:
                continue
            for package, rest in re.findall(r"python -m (sim|traces|realrun|analysis) ([^#&|>\n]*)", block):
                if "$" in rest or rest.count('"') % 2:
                    continue  # a part of a shell script
                app = import_module(f"{package}.__main__").app
                app.parse_args(shlex.split(rest), print_error=False, exit_on_error=False)
                shown += 1
    assert shown > 50


def _blocks(name: str) -> list[str]:
    """The blocks of Python in a document, in order."""
    return re.findall(r"^```python\n(.*?)^```", (REPOSITORY / name).read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def beside_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present folder is one that has the bundled traces, as the repository's root has, and no other file."""
    (tmp_path / "traces").symlink_to(REPOSITORY / "traces")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An empty module that can be imported by name, as a person's own is."""
    module = types.ModuleType("script_of_a_document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_examples_of_the_python_guide_run_in_order(
    beside_traces: None, script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    blocks = _blocks("docs/python.md")
    assert len(blocks) >= 5
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/python.md, example {number}", "exec"), script.__dict__)


@pytest.mark.parametrize(("document", "policy"), [("README.md", "SameExperts"), ("docs/policies.md", "NextGate")])
def test_the_example_policy_of_a_document_runs(document: str, policy: str, script: types.ModuleType) -> None:
    from sim.run.prepared import replay
    from sim.run.scene import scene

    (block,) = (block for block in _blocks(document) if f"class {policy}(" in block)
    exec(compile(block, document, "exec"), script.__dict__)
    report = replay(scene(REPOSITORY / "traces/qwen3_law.npz"), f"{script.__name__}:{policy}")
    assert report.policy == script.__dict__[policy].name and report.decode.prefetches["issued"] > 0


def test_the_table_of_the_readme_is_what_the_simulator_says() -> None:
    from sim.run.prepared import replay
    from sim.run.scene import scene

    law = scene(REPOSITORY / "traces/mixtral_law.npz")
    text = (REPOSITORY / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+)(?: \(([^)]+)\))?(?: \*)? \| ([\d.]+) \| ([\d.]+) % \|", text, re.MULTILINE)
    shown = {(name, setting): (speed, hits) for name, setting, speed, hits in rows}
    assert len(shown) >= 10
    for name, setting in (("all-in-gpu", ""), ("lru", "scope=layer"), ("lru", ""), ("perfect-lfu", "")):
        report = replay(law, name, dict([setting.split("=")]) if setting else {})
        assert shown[name, setting] == (f"{report.tokens_per_s:.2f}", f"{100 * (report.decode.hit_ratio or 0):.1f}")
    assert f"link {report.bounds['link_tokens_per_s']:.2f}." in text


def test_the_routes_of_the_guide_to_converting_become_a_trace_by_the_command_shown(
    beside_traces: None, script: types.ModuleType
) -> None:
    from traces.__main__ import main
    from traces.trace import Trace

    block = _blocks("docs/convert.md")[-1]
    exec(compile(block, "docs/convert.md", "exec"), script.__dict__)
    text = (REPOSITORY / "docs/convert.md").read_text("utf-8")
    command = re.findall(r"^python -m traces (convert routed.*)$", text, re.MULTILINE)[-1]
    assert main(command.split()) == 0
    assert Trace.load("chat.npz").n_layers == 26
