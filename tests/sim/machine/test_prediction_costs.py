"""What predicting costs: the profiles, and closed forms of what they charge."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts, builtin_software
from sim.policies import Setting, make_policy, policy_class
from sim.run.kept_plans import declared, kept_or_made
from sim.run.prepared import replay
from sim.run.scene import bundled_traces, scene
from sim.view import View
from tests.support.worlds import toy_machine
from traces.models.known import model_spec

HOST = """
name = "toy"
where = "host"
element_bytes = 4
search_us = 10.0
iteration_us = 3.0
network_us = 2.0
gbps = 4.0
gflops = 8.0
"""


def test_both_are_built_in_and_say_where_figures_are_from() -> None:
    assert builtin_software() == ("fast", "paper")
    for name, where in (("fast", "gpu"), ("paper", "host")):
        software = PredictionCosts.load(name)
        assert (software.name, software.where) == (name, where)
        figures = {name: figure for name, figure in software if hasattr(figure, "measured")}
        assert all(len(figure.source) > 20 for figure in figures.values())
        assert all(figure.measured for figure in figures.values())


def test_what_was_measured_is_what_is_charged() -> None:
    h200 = Hardware.load("h200")
    assert PredictionCosts.load("fast").search_ns(h200, 4000, 4096) == pytest.approx(35_000, rel=0.01)
    wait = h200.software.route_wait_us.value * 1e3 + h200.copy_ns(4 * 4096)
    assert PredictionCosts.load("paper").search_ns(h200, 4000, 4096) == pytest.approx(366_000 + wait, rel=0.01)
    # K-means of 512 x 4,096 on the host: 375 us an iteration with 8 centres, 773 us with 32.
    prompt = h200.software.route_wait_us.value * 1e3 + h200.copy_ns(512 * 4 * 4096)
    for centres, measured in ((8, 375_000), (32, 773_000)):
        charged = (PredictionCosts.load("paper").cluster_ns(h200, 512, 4096, centres, 10) - prompt) / 10
        assert charged == pytest.approx(measured, rel=0.15)


def test_the_host_by_hand() -> None:
    machine, software = toy_machine(), PredictionCosts.parse(HOST)
    wait = machine.software.route_wait_us.value * 1e3
    # 1,000 x 8 numbers of 4 bytes at 4 GB/s are 8 us; 16,000 FLOPs at 8 GFLOP/s are 2 us, for 10 queries 20 us.
    assert software.search_ns(machine, 1000, 8) == wait + machine.copy_ns(32) + 10_000 + 8_000
    assert software.search_ns(machine, 1000, 8, 10) == wait + machine.copy_ns(320) + 10_000 + 20_000
    # Two iterations of 100 x 8 with 3 centres: 0.8 us by bytes, 2 x 800 x 4 FLOPs are 0.8 us too.
    assert software.cluster_ns(machine, 100, 8, 3, 2) == wait + machine.copy_ns(3200) + 2 * 3_800
    assert software.network_ns(machine, 1000) == wait + 2_000 + 1_000
    figures = {"path_us": 7, "regroup_us": 3, "regroup_ns": 2}
    given = {name: {"value": value, "source": "toy"} for name, value in figures.items()}
    other = PredictionCosts.model_validate(software.model_dump() | given)
    assert other.path_ns(machine, 1000, 1) == wait + 7_000 + 1_000
    assert other.path_ns(machine, 1000, 8) == wait + 7_000 + 2_000, "16,000 FLOPs"
    assert other.path_ns(machine, 0, 8) == other.path_ns(machine, 1000, 0) == 0
    assert other.regroup_time_ns(10, 40) == 3_000 + 800
    assert (software.load_ns(machine, 10**9), software.table_bytes(10**9)) == (0, 0)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(0, 64), st.sampled_from(["fast", "paper"]))
def test_more_is_never_cheaper_and_nothing_is_free(entries: int, dims: int, queries: int, name: str) -> None:
    software, machine = PredictionCosts.load(name), Hardware.load("l40")
    one = software.search_ns(machine, entries, dims, queries)
    assert isinstance(one, int)
    assert (one == 0) == (entries == 0 or queries == 0)
    assert software.search_ns(machine, entries + 1, dims, queries) >= one
    assert software.search_ns(machine, entries, dims + 1, queries) >= one
    assert software.search_ns(machine, entries, dims, queries + 1) >= one
    cluster = software.cluster_ns(machine, entries, dims, 8, 10)
    assert software.cluster_ns(machine, entries, dims, 8, 11) >= cluster >= 0
    assert software.network_ns(machine, entries) <= software.network_ns(machine, entries + 1, 2)
    assert software.load_ns(machine, entries) == (machine.copy_ns(entries) if name == "fast" and entries else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("gbps = 4.0", ""), "gbps, which a host has of its own"),
        (("gflops = 8.0", "gflops = 0.0"), "gflops above 0"),
        (('where = "host"', 'where = "disk"'), "where is 'disk'"),
        (("search_us = 10.0", "search_us = -1.0"), "search_us.value is -1.0; expected 0 or more"),
        (("search_us = 10.0", ""), "search_us is missing; expected a number: microseconds that one"),
        (("element_bytes = 4", "element_bytes = 4\nbits = 3"), "bits is 3; expected no such field"),
        (("element_bytes = 4", "element_bytes = ["), "not valid TOML"),
    ],
)
def test_a_wrong_profile_is_one_line(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(HOST.replace(*change), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        PredictionCosts.load(file)
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert message in text
    assert "\n" not in text


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(InputError, match=r"software 'slow' is unknown; expected a .toml profile or one of fast, paper"):
        PredictionCosts.load("slow")


def test_a_report_names_it_and_plans_are_kept_apart_by_it(monkeypatch: Any, tmp_path: Path) -> None:
    here = scene(bundled_traces()[0], software="paper", learns=False)
    assert replay(here, "lru").provenance["software"] == "paper"

    monkeypatch.setenv("MOE_REPLAY_CACHE", str(tmp_path))  # compiled code stays where the run above found it
    kind = policy_class("lru")
    monkeypatch.setattr(kind, "keeps_plan", True)
    for name in ("fast", "paper", "paper"):
        setting = Setting(model_spec("mixtral-8x7b"), 1, (), 0, here.hardware, PredictionCosts.load(name))
        made = make_policy("lru", declared(kind, setting))
        kept_or_made(made, setting, View(here.trace, here.work), {"trace": "t"})
    assert len(list((tmp_path / "plans").glob("lru-*.npz"))) == 2
