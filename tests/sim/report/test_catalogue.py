"""The page of one policy: what it does, what each parameter means, and how to give it."""

import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from rich.console import Console

from sim.plan import Plan
from sim.policies import Parameters, Policy, policy_classes
from sim.report.catalogue import policy_json, policy_view
from sim.view import View


def printed(name: str) -> str:
    page = StringIO()
    Console(width=200, file=page).print(policy_view(name))
    return page.getvalue()


@pytest.mark.parametrize("name", policy_classes())
def test_every_parameter_has_its_row_with_default_and_meaning(name: str) -> None:
    page = printed(name)
    assert page.splitlines()[0].strip() == name
    assert policy_classes()[name].summary in " ".join(page.split())
    assert "Attributes:" not in page
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in page.splitlines() if line.startswith("│")]
    told: dict[str, Any] = {row[0]: row for row in rows if row[0]}
    schemas = policy_json(name)["parameters"]
    assert set(told) == set(schemas) == set(policy_classes()[name].takes.model_fields)
    for key, schema in schemas.items():
        assert told[key][1] == str(schema["default"])
        assert schema["description"].startswith(told[key][3]) and told[key][3]


@pytest.mark.parametrize("name", policy_classes())
def test_variants_are_shown(name: str) -> None:
    assert policy_json(name)["variants"] == list(policy_classes()[name].variants)
    for variant in policy_classes()[name].variants:
        assert variant in printed(name)


class Odd(Parameters):
    """Of somebody else, who describes one here and one there.

    Attributes:
        share: of what there is,
            and no more.
    """

    share: float = Field(default=0.5, gt=0, le=1)
    name: str = Field(description="what it is called")
    silent: int = 3


class Foreign(Policy):
    """First line.

    A second paragraph
    over two lines.
    """

    name = "foreign"
    takes = Odd

    def plan(self, view: View) -> Plan:
        """Nothing."""
        return Plan()


def test_a_policy_of_others_is_shown_by_what_it_says() -> None:
    lines = [line.strip() for line in printed("tests.sim.report.test_catalogue:Foreign").splitlines()]
    assert lines[:3] == ["foreign", "First line.", "A second paragraph over two lines."]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["share", "0.5", "more than 0, at most 1", "of what there is, and no more."],
        ["name", "must be given", "", "what it is called"],
        ["silent", "3", "", ""],
    ]


def test_the_files_of_built_in_profiles_are_printed_as_they_are(said: Any, tmp_path: Path) -> None:
    for command, name in (("hardware", "l40"), ("software", "paper")):
        status, out, err = said(command, name, "--toml")
        assert (status, err) == (0, "")
        assert tomllib.loads(out)["name"] == name
        mine = tmp_path / f"{name}.toml"
        mine.write_text(out, encoding="utf-8")
        assert said(command, mine, "--toml") == (0, out, "")
        for wrong in ([], [name, "--json", "-"]):
            assert said(command, *wrong, "--toml") == (2, "", WANTED)


WANTED = "error: --toml: expected the name of one profile, and no --json\n"
