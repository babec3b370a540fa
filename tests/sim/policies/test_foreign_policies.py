"""Policies of other packages: found by name, and whatever they do is one line."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.policies import policy_classes
from tests.support.replays import refused, reported

# -- other people's policies -------------------------------------------------------------------------------------------

PLUGIN = '''
from sim.plan import Plan
from sim.policies import Parameters, Policy


class Settings(Parameters):
    """Parameters.

    Attributes:
        rule: an eviction rule.
    """

    rule: str = "fifo"


class Mine(Policy):
    """A policy of somebody else."""

    name = "{name}"
    summary = "somebody else's"
    takes = Settings

    def plan(self, view):
        return Plan(eviction=self.parameters.rule)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a package that registers a policy, without pip: a module and its dist-info on the path."""
    folder = tmp_path / "site"

    def install(name: str, value: str = "outsider:Mine") -> None:
        info = folder / "outsider-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "outsider.py").write_text(PLUGIN.format(name=name), encoding="utf-8")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[moe_replay.policies]\n{name} = {value}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        policy_classes.cache_clear()

    yield install
    sys.modules.pop("outsider", None)
    policy_classes.cache_clear()


def test_a_policy_of_another_package_is_found_by_name(said: Any, trace: Path, plugin: Any) -> None:
    plugin("outsider-policy")
    data = reported(said, "replay", trace, "--policy", "outsider-policy", "--set", "rule=lru", "--cache", "9")
    assert data["policy"] == "outsider-policy"
    assert data["parameters"] == {"rule": "lru"}
    assert data["hits"] == reported(said, "replay", trace, "--policy", "lru", "--cache", "9")["hits"]
    assert "outsider-policy" in [p["name"] for p in reported(said, "policies")]
    assert "outsider-policy" in [r["policy"] for r in reported(said, "compare", trace)]
    by_path = reported(said, "replay", trace, "--policy", "outsider:Mine", "--cache", "9")
    assert by_path["parameters"] == {"rule": "fifo"}


def test_a_policy_of_another_package_that_takes_a_taken_name_is_left_out(said: Any, trace: Path, plugin: Any) -> None:
    plugin("lru")
    status, out, err = said("replay", trace, "--policy", "lru", "--json", "-")
    assert status == 0
    assert json.loads(out)["parameters"] == {"scope": "global"}, "the project's own"
    assert "warning: left out: entry point 'lru' (outsider:Mine): the policy name 'lru' is taken" in err


def test_an_entry_point_to_nothing_stops_only_who_names_it(said: Any, trace: Path, plugin: Any, tmp_path: Path) -> None:
    plugin("broken", "outsider:Absent")
    status, _, err = said("replay", trace, "--policy", "lru", "--json", "-")
    assert status == 0
    assert "warning: left out: entry point 'broken': cannot import 'outsider:Absent'" in err
    refused(said, tmp_path, "policy 'broken' is unknown", "replay", trace, "--policy", "broken")


def test_a_policy_with_a_bad_plan_is_named(said: Any, trace: Path, plugin: Any, tmp_path: Path) -> None:
    plugin("outsider-policy")
    for rule, message in (("belady", "eviction 'belady' is unknown"), ("next-use", "is told the future")):
        refused(said, tmp_path, message, "replay", trace, "--policy", "outsider-policy", "--set", f"rule={rule}")


BAD = """
import sys

from sim.plan import Plan
from sim.policies import Policy


class Bad(Policy):
    name = "bad"

    def plan(self, view):
        {body}


{top}
"""
CANNOT = "policy 'bad_policy:Bad': cannot import 'bad_policy:Bad': "
REFUSING = """class Refusing(type(Policy)):
    @property
    def needs(cls):
        raise RuntimeError("never")
Bad = Refusing("Bad", (Bad,), {})"""
FAULTS = [
    ("raise KeyError('boom')", "", "policy bad: plan: KeyError: 'boom' (bad_policy.py, line 12; MOE_REPLAY_DEBUG=1"),
    ("sys.exit(0)", "", "policy bad: plan: SystemExit: 0"),
    ("return None", "", "policy bad: plan returned NoneType; expected a sim.plan.Plan"),
    ("return Plan(gpu_bytes=-1)", "", "policy bad: plan: gpu_bytes is -1; expected"),
    ("return Plan(eviction='belady')", "", "policy bad: plan: eviction 'belady' is unknown; expected one of lru"),
    ("return Plan(eviction='score')", "", "policy bad: plan: values is None; expected Values"),
    ("view.future()", "", "policy bad: plan: PermissionError"),
    ("return Plan(eviction=rule)", "rule = lambda first_call: 1 / 0", "policy bad: eviction: ZeroDivisionError"),
    ("def (:", "", CANNOT + "SyntaxError"),
    ("return Plan()", "sys.exit(0)", CANNOT + "SystemExit: 0"),
    ("return Plan()", "1 / 0", CANNOT + "ZeroDivisionError"),
    ("return Plan()", REFUSING, "policy 'bad_policy:Bad': RuntimeError: never"),
    ("return Plan()", "Bad = 3", "'bad_policy:Bad': is not a sim.policies.Policy"),
]


CLASSES = [
    ("needs = 'lookahead'", "needs is 'lookahead'; expected a set of texts"),
    ("needs = frozenset({1})", "needs is frozenset({1}); expected a set of texts"),
    ("needs = frozenset({'nothing'})", "needs names 'nothing'; expected optional arrays of a trace: gates, "),
    ("takes = dict", "takes is <class 'dict'>; expected a class of parameters"),
    ("takes = 3", "takes is 3; expected a class of parameters"),
    ("plan = Policy.plan", "has no method plan; expected"),
    ("name = ''", "name is ''; expected a text that is not empty"),
    ("del name", "name is None; expected a text that is not empty"),
    ("foresight = '1'", "foresight is '1'; expected a whole number from 0"),
    ("variants = 'fetch=1'", "variants is 'fetch=1'; expected a tuple of texts"),
    ("learns = 1", "learns is 1; expected True or False"),
    ("__init__ = lambda self, setting, parameters: None", "policy bad: __init__ sets no setting"),
    ("view = classmethod(lambda cls, trace, work: 1 / 0)", "policy bad: ZeroDivisionError"),
]
"""A line of the class, and what is said of it."""


@pytest.fixture
def bad_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def write(body: str, top: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "bad_policy.py").write_text(BAD.format(body=body, top=top), encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield write
    sys.modules.pop("bad_policy", None)


@pytest.mark.parametrize(("body", "top", "message"), FAULTS, ids=[message[-40:] for _, _, message in FAULTS])
def test_whatever_a_policy_does_is_one_line(
    said: Any, trace: Path, tmp_path: Path, bad_policy: Any, body: str, top: str, message: str
) -> None:
    bad_policy(body, top)
    refused(said, tmp_path, message, "replay", trace, "--policy", "bad_policy:Bad")


@pytest.mark.parametrize(("line", "message"), CLASSES, ids=[line for line, _ in CLASSES])
def test_a_class_that_is_declared_wrong_is_one_line(
    said: Any, trace: Path, tmp_path: Path, bad_policy: Any, line: str, message: str
) -> None:
    bad_policy(f"return Plan()\n\n    {line}", "")
    refused(said, tmp_path, message, "replay", trace, "--policy", "bad_policy:Bad")


def test_what_a_policy_prints_is_kept_apart_from_the_report(said: Any, trace: Path, bad_policy: Any) -> None:
    bad_policy("print('planning'); return Plan()", "print('imported')")
    status, out, err = said("replay", trace, "--policy", "bad_policy:Bad", "--json", "-")
    assert status == 0
    assert json.loads(out)["policy"] == "bad"
    assert {"imported", "planning"} == set(err.splitlines())


def test_a_policy_that_fails_is_a_row_of_a_comparison(said: Any, trace: Path, bad_policy: Any) -> None:
    bad_policy("raise KeyError('boom')", "")
    command = ("compare", trace, "--policy", "bad_policy:Bad", "lru", "all-in-gpu")
    status, out, err = said(*command)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: 1 of 3 policies failed: bad_policy:Bad: policy bad: plan: KeyError: 'boom'")
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [(row[1], row[2] == "failed") for row in rows] == [
        ("all-in-gpu *", False), ("lru", False), ("bad_policy:Bad", True)
    ]  # fmt: skip
    assert "failed: bad_policy:Bad: policy bad: plan: KeyError: 'boom'" in " ".join(out.split())
    assert "a reference: all-in-gpu ignores the cache size" in " ".join(out.split())
    status, out, _ = said(*command, "--json", "-")
    assert status == 2
    lru, every, bad = json.loads(out)
    assert (lru["policy"], every["policy"], bad["policy"]) == ("lru", "all-in-gpu", "bad_policy:Bad")
    assert [one["settings"]["reference"] for one in (lru, every)] == ["", "ignores the cache size"]
    assert "KeyError: 'boom'" in bad["error"]


def test_a_comparison_of_nothing_that_runs_is_one_line(said: Any, trace: Path, tmp_path: Path, bad_policy: Any) -> None:
    bad_policy("raise KeyError('boom')", "")
    status, out, err = said("compare", trace, "--policy", "bad_policy:Bad", "--json", tmp_path / "out.json")
    assert (status, out, (tmp_path / "out.json").exists()) == (2, "", False)
    assert err.startswith("error: policy bad: plan: KeyError: 'boom'")


def test_the_traceback_of_a_policy_can_be_had(
    said: Any, trace: Path, bad_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_policy("raise KeyError('boom')", "")
    monkeypatch.setenv("MOE_REPLAY_DEBUG", "1")
    with pytest.raises(KeyError, match="boom"):
        said("replay", trace, "--policy", "bad_policy:Bad")


def test_names_are_shown_as_they_are_and_move_no_cursor(said: Any, trace: Path, tmp_path: Path, plugin: Any) -> None:
    plugin("a[red]b")
    odd = tmp_path / "odd \x1b[31m :smile: [bold]name.npz"
    shutil.copy(trace, odd)
    named = "a[red]b"
    for command in (
        ["replay", odd, "--policy", "outsider:Mine"],
        ["compare", odd, "--policy", "outsider:Mine"],
        ["policies"],
    ):
        status, out, err = said(*command)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert named in out
        # Wherever the line breaks: a space there goes, nothing else.
        assert command[0] == "policies" or "odd\\x1b[31m:smile:[bold]name.npz" in "".join(out.split())
