"""Hosts by name: memory and cores, and what an expert takes on them."""

import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.machine.assembly import Assembly
from sim.machine.hosts import host_kinds, host_of
from sim.machine.unpacking import core_gweights, core_rates, expert_formats
from sim.report.hosts import host_json
from sim.run.prepared import prepare
from sim.run.scene import Scene, scene
from sim.sweep.design import Design
from sim.sweep.identity import identity
from tests.support.places import REPOSITORY
from traces.models.known import model_spec
from traces.models.quantised import quantised

QWEN = REPOSITORY / "traces/qwen3_law.npz"
LINK = 25e9
NAMED = ("ddr5-5600x2", "ddr4-3200x2:16", "epyc-9004x12", "epyc-7003x8", "i9-10900x")
FILE = "host_gbps = 80\nshared_gbps = 55\nfloor_us = 7\ncores = 4\n[core_gweights]\nq4_k = 10\nq6_k = 5\n"


def told(here: Scene, **given: object) -> Mapping[str, float]:
    """What `fiddler` says that it reckons with."""
    return prepare(here, "fiddler", given).parameters


@pytest.mark.parametrize(("name", "gbps", "cores"), [
    ("ddr5-5600x2", 62.72, 8), ("DDR4-3200x2:16", 46.08, 16), ("epyc-9004x12", 377.856, 64),
    ("epyc-7003x8", 188.416, 32), ("i9-10900x", 101.99, 10), ("i9-10900x-2933x2:4", 46.74, 4),
])  # fmt: skip
def test_a_name_says_how_much_memory_gives_and_how_many_cores(name: str, gbps: float, cores: int) -> None:
    host = host_of(name, LINK)
    assert host.host_gbps.value == pytest.approx(gbps, abs=1e-3) and host.cores == cores
    assert host.shared_gbps.value == pytest.approx(max(0.1 * gbps, gbps - 25))
    assert "others' measurement" in host.host_gbps.source and not host.host_gbps.measured


@given(st.sampled_from(["ddr4", "ddr5"]), st.integers(1000, 9000), st.integers(1, 12), st.floats(0, 1e11))
def test_memory_gives_what_its_channels_and_their_speed_give(kind: str, speed: int, channels: int, link: float) -> None:
    host, twice = host_of(f"{kind}-{speed}x{channels}", link), host_of(f"{kind}-{speed}x{2 * channels}", link)
    share = host_kinds()[kind].share.value
    assert host.host_gbps.value == pytest.approx(share * speed * channels * 8 / 1000, abs=1e-3)
    assert twice.host_gbps.value == pytest.approx(2 * host.host_gbps.value, abs=2e-3)
    assert 0 < host.shared_gbps.value <= host.host_gbps.value


@pytest.mark.parametrize("name", [
    "", "ddr5", "ddr5-5600", "ddr5x2", "ddr5-5600x0", "ddr5-5600x99", "ddr5-5600x2:0", "ddr55-5600x2", "epyc-9004",
    "epyc-9004x12x2", "i9-10900xx", "ddr5-5600x2:", "ddr3-1600x2",
])  # fmt: skip
def test_no_host(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="expected memory and channels, such as ddr5-5600x2"):
        host_of(name, LINK)
    assert main(["hosts", name]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_host_of_ones_own(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    host = Assembly("l40", host=str(path)).load().host
    assert host is not None and host.floor_us is not None
    assert (host.host_gbps.value, host.shared_gbps.value, host.floor_us.value, host.cores) == (80, 55, 7, 4)
    path.write_text(FILE.replace("q6_k = 5", "q6_k = 0"))
    assert main(["replay", str(QWEN), "--policy", "fiddler", "--host", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "core_gweights" in error and "0.001 or more" in error


def test_formats_of_experts_are_those_that_are_stored_or_those_that_their_bytes_tell() -> None:
    model = model_spec("qwen3-30b-a3b")
    assert set(expert_formats(model)) == {"bf16"}
    assert sum(expert_formats(model).values()) == 48 * 128 * 3 * 2048 * 768
    mixed = quantised(model, "q4_k_m")
    assert set(expert_formats(mixed)) == {"q4_k", "q6_k"}
    assert sum(expert_formats(mixed).values()) == sum(expert_formats(model).values())
    assert set(expert_formats(model_spec("gpt-oss-20b"))) == {"mxfp4"}


def test_several_formats_take_the_time_of_each() -> None:
    rates, model = core_rates(), quantised(model_spec("qwen3-30b-a3b"), "q4_k_m")
    forms = expert_formats(model)
    rate = core_gweights(model, rates)
    assert rate is not None and min(rates[form].value for form in forms) <= rate <= max(r.value for r in rates.values())
    assert sum(forms.values()) / rate == pytest.approx(sum(n / rates[form].value for form, n in forms.items()))
    assert core_gweights(quantised(model_spec("qwen3-30b-a3b"), "fp8"), rates) is None, "nobody has measured it"


@pytest.mark.parametrize("name", NAMED)
def test_an_expert_of_fewer_bytes_is_read_sooner(name: str) -> None:
    rows = sorted(host_json(name, "qwen3-30b-a3b")["expert"], key=lambda row: row["bytes"])
    for key in ("reading_us", "beside_us", "copy_us"):
        assert [row[key] for row in rows] == sorted(row[key] for row in rows), key
    for row in rows:
        assert row["beside_us"] >= row["reading_us"]
        assert row["one_row_us"] == max(row["reading_us"], row["row_us"]) + row["floor_us"]


@pytest.mark.parametrize(("name", "quant"), [("ddr5-5600x2", "q4_k_m"), ("epyc-9004x12", "bf16")])
def test_fiddler_reckons_with_the_host(name: str, quant: str) -> None:
    here = scene(QWEN, hardware="rtx-3060", host=name, quant=quant)
    row = next(row for row in host_json(name, "qwen3-30b-a3b", quant)["expert"])
    used = told(here)
    assert used["host_gbps"] == host_of(name, LINK).host_gbps.value
    host, bare = (prepare(one, "fiddler").plan.host for one in (here, scene(QWEN, hardware="rtx-3060", quant=quant)))
    assert host is not None and bare is not None
    assert host.row_ns.max() == pytest.approx(row["row_us"] * 1000, rel=1e-3)
    assert host.read_ns.max() == math.ceil(row["bytes"] / used["host_gbps"])
    assert set(host.fixed_ns - bare.fixed_ns) == {5000}, "the least time is charged"
    assert told(here, tokens=3, host_gbps=11)["tokens"] == 3 and told(here, host_gbps=11)["host_gbps"] == 11


def test_a_faster_host_is_never_worse_and_a_report_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for name in ("ddr4-3200x2", "epyc-9004x12"):
        command = ["replay", str(QWEN), "--policy", "fiddler", "--host", name, "--quant", "q4_k_m", "--json", "-"]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        assert f"host {name}" in report["provenance"]["hardware"]
        rates.append(report["tokens_per_s"])
    assert rates == sorted(rates) and rates[0] < rates[-1]
    designs = [Design({"trace": str(QWEN), "host": host}) for host in ("ddr4-3200x2", "ddr5-6000x2")]
    assert len({identity(design) for design in designs}) == 2, "a host is an axis of a sweep"


def test_hosts_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "--json", "-"]) == 0
    kinds = json.loads(capsys.readouterr().out)
    assert [kind["name"] for kind in kinds] == list(host_kinds())
    assert all("others' measurement" in kind["source"] for kind in kinds)
    assert main(["hosts", "ddr5-6000x2", "--quant", "q4_k_m"]) == 0
