"""The sweep files that the project holds or shows are ones that the command takes."""

import re
import tomllib
from pathlib import Path

import pytest

from sim.sweep.execute import run_design
from sim.sweep.identity import identity
from sim.sweep.run import identified
from sim.sweep.spec import MOST_DESIGNS, load_spec, spec_of
from tests.support.places import REPOSITORY


def shown() -> list[tuple[str, dict[str, object]]]:
    blocks = re.findall(
        r"^```toml\n(.*?)^```", (REPOSITORY / "docs/sweep.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [(f"docs/sweep.md {number}", tomllib.loads(block)) for number, block in enumerate(blocks)]


def test_the_sweep_file_that_the_readme_shows_is_the_one_that_its_command_takes() -> None:
    text = (REPOSITORY / "analysis/cards.toml").read_text("utf-8")
    assert f"```toml\n{text}```" in (REPOSITORY / "README.md").read_text("utf-8")


def test_the_answer_that_the_readme_gives_is_that_of_its_sweep_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    text = " ".join((REPOSITORY / "README.md").read_text("utf-8").split())
    there = {"hardware": "rtx-5080", "quant": "q4_k_m", "cache": "50%"}
    every = load_spec(Path("analysis/cards.toml")).space.grid(MOST_DESIGNS)
    rows = {one.fields["policy"]: run_design(one, identity(one)) for one in every if there.items() <= one.fields.items()
            and one.fields["policy"] in ("domoe,mode=best", "perfect-lfu")}  # fmt: skip
    best, second = (rows[name].values["tokens_per_s"] for name in ("domoe,mode=best", "perfect-lfu"))
    assert f"{best:.1f} tokens/s. That is {best / second:.2f} times the next policy" in text


@pytest.mark.parametrize(("name", "tables"), shown(), ids=[name for name, _ in shown()])
def test_every_sweep_file_of_the_document_can_be_run(
    name: str, tables: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    spec = spec_of(tables, name)
    drawn = spec.space.random(spec.designs or 5, spec.seed)
    assert all(refusal is None for _, _, refusal in identified(drawn))


@pytest.mark.parametrize("name", ["cards", "regimes"])
def test_every_sweep_file_of_the_project_can_be_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    space = load_spec(Path(f"analysis/{name}.toml")).space
    assert all(refusal is None for _, _, refusal in identified(space.random(20, 0)))


def test_the_map_of_regimes_has_every_combination_of_what_it_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    space = load_spec(Path("analysis/regimes.toml")).space
    assert space.size == len(list(space.grid(MOST_DESIGNS))) == 5 * 3 * 6 * 6 * 3 * 2
