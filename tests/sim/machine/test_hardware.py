"""Profiles: what is refused, and the time of a copy."""

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.machine.figures import Checked, Curve, Figure
from sim.machine.hardware import Ffn, Gpu, Hardware, HostCompute, Layer, Link, Lookups, Measured, builtin_hardware
from sim.machine.loop_overheads import HostFigures, LoopOverheads
from sim.report.catalogue import hardware_json, hardware_table, machine_json, machine_table, models_json, models_table
from tests.support.places import REPOSITORY
from traces.models.known import builtin_models

PROFILE = """
name = "x"
[gpu]
memory_gb = 48
bandwidth_gbps = 800
bandwidth_fraction = 1
tflops = 100
tflops_fraction = 0.5
[link]
name = "a link"
latency_us = 10
gbps = 25
[software]
kind = "eager"
waits_for_route = false
operation_us = 0
expert_floor_us = 0
layer_floor_us = 0
route_wait_us = 0
"""


def plain(latency_us: float, gbps: float) -> Hardware:
    """A profile with that link."""
    text = PROFILE.replace("latency_us = 10", f"latency_us = {latency_us!r}").replace("gbps = 25", f"gbps = {gbps!r}")
    return Hardware.parse(text, "x.toml")


def curved(points: list[list[int]], queued: list[list[int]] | None = None) -> Hardware:
    """A profile with that measured curve, and perhaps one of copies in a row."""
    curve = f'h2d = {{ points = {points}, source = "a test" }}'
    if queued is not None:
        curve += f'\nqueued = {{ points = {queued}, source = "a test" }}'
    return Hardware.parse(PROFILE.replace("latency_us = 10\ngbps = 25", curve), "x.toml")


@st.composite
def curves(draw: st.DrawFn) -> list[list[int]]:
    steps = draw(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**8)), min_size=2, max_size=6))
    size = time = 0
    points = []
    for more_bytes, more_ns in steps:
        size, time = size + more_bytes, time + more_ns
        points.append([size, time])
    return points


machines = st.one_of(
    st.sampled_from(builtin_hardware()).map(Hardware.load),
    st.builds(plain, st.floats(0, 1000).map(lambda us: round(us, 3)), st.floats(0.01, 500).map(lambda g: round(g, 2))),
    curves().map(curved),
)
sizes = st.integers(0, 10**11)


@given(machines, sizes, sizes)
def test_more_bytes_never_take_less_time(hardware: Hardware, a: int, b: int) -> None:
    a, b = sorted((a, b))
    assert hardware.link_latency_ns <= hardware.copy_ns(a) <= hardware.copy_ns(b)


@given(machines, st.integers(1, 10**11))
def test_no_copy_is_faster_than_the_link(hardware: Hardware, size: int) -> None:
    assert Fraction(size * 10**9, hardware.copy_ns(size)) <= Fraction(hardware.link_bytes_per_s)


@given(machines)
def test_the_peak_is_reached(hardware: Hardware) -> None:
    """The bound is tight: a point of the curve, or a copy large enough, comes within a thousandth of it."""
    points = [size for size, _ in hardware.link.h2d.points] if hardware.link.h2d else [1]
    # In a row copies have no start-up: where that was measured the peak is theirs, at a point or in the limit.
    in_a_row = [Fraction(0)]
    if hardware.link.queued:
        row = hardware.link.queued.points
        in_a_row = [Fraction(size * 10**9, ns) for size, ns in row]
        in_a_row.append(Fraction((row[-1][0] - row[-2][0]) * 10**9, row[-1][1] - row[-2][1]))
    # Beyond the last point time is a start, of at most that point's time, and bytes at the last rate: a copy that takes
    # 2,000 times as long comes within a thousandth of the rate.
    large = 2000 * Fraction(hardware.link_bytes_per_s) * hardware.copy_ns(points[-1]) / 10**9
    best = max(Fraction(size * 10**9, hardware.copy_ns(size)) for size in [*points, int(large) + 1])
    best = max(best, *in_a_row)
    assert best >= Fraction(hardware.link_bytes_per_s) * 999 / 1000


@given(curves())
def test_a_curve_passes_its_points(points: list[list[int]]) -> None:
    hardware = curved(points)
    assert [hardware.copy_ns(size) for size, _ in points] == [time for _, time in points]


def test_closed_forms() -> None:
    hardware = plain(10, 25)
    assert hardware.copy_ns(0) == hardware.link_latency_ns == 10_000
    assert hardware.copy_ns(1) == 10_001  # rounded up
    assert hardware.copy_ns(25_000_000) == 1_010_000
    assert hardware.link_bytes_per_s == 25e9
    assert plain(0, 35.2).copy_ns(352_000_000) == 10_000_000
    curve = curved([[100, 1000], [200, 1500], [400, 3500]])
    assert [curve.copy_ns(size) for size in (0, 50, 150, 300, 500)] == [500, 750, 1250, 2500, 4500]
    # A curve steeper than proportional at its beginning has no start-up to speak of.
    assert curved([[100, 100], [200, 1000]]).link_latency_ns == 0
    with pytest.raises(ValueError, match="size is -1"):
        hardware.copy_ns(-1)


def test_many_small_copies_pay_the_latency() -> None:
    """1000 copies of 1 KB at 10 us.

    Seen in kekzl/imp#1409: many small copies are bound by the cost of each, not by bandwidth.
    """
    assert sum(plain(10, 25).copy_ns(1000) for _ in range(1000)) >= 10_000_000


def test_measured_h200_copies() -> None:
    hardware = Hardware.load("h200")
    times = dict(hardware.link.h2d.points)
    # 512 KiB and 32 MiB lie between measured sizes; one Mixtral expert is 336 MiB.
    assert times[2**18] < hardware.copy_ns(2**19) < times[2**20]
    assert times[2**24] < hardware.copy_ns(2**25) < times[2**26]
    assert hardware.copy_ns(352_321_536) == pytest.approx(6_400_000, rel=0.02)
    assert hardware.link_measured and hardware.link_bytes_per_s / 1e9 == pytest.approx(55.3, rel=0.02)


# --- refusals ---


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # A decimal comma, read as thousands or as text in tidyverse/readr#1468 and pandas-dev/pandas#35365.
        ("gbps = 25", 'gbps = "12,5"', "link.gbps is '12,5'; expected a number, with a decimal point"),
        ("gbps = 25", "gbps = 12,5", "not valid TOML"),
        ("gbps = 25", "gbps = 0", "link.gbps is 0; expected above 0"),
        ("gbps = 25", "gbps = -1", "link.gbps.value is -1; expected 0 or more"),
        ("gbps = 25", "gbps = nan", "link.gbps.value is nan; expected a finite number"),  # else SimPy waits NaN
        ("gbps = 25", "gbps = inf", "link.gbps.value is inf; expected a finite number"),
        ("gbps = 25", "gbps = true", "link.gbps is true; expected a number, with"),
        ("gbps = 25", "", "link; expected either h2d points or both latency_us and gbps"),
        ("gbps = 25", "gbps = 25\ngpbs = 3", "link.gpbs is 3; expected no such field"),
        ("gbps = 25", "gbps = 1e-300", "link.gbps is 1e-300; expected above 0"),
        ("latency_us = 10", "latency_us = 1e300", "link.latency_us.value is 1e+300; expected at most 1e9"),
        ("latency_us = 10", "latency_us = -1", "link.latency_us.value is -1; expected 0 or more"),
        ("latency_us = 10", "latency_us = nan", "link.latency_us.value is nan"),
        ("bandwidth_gbps = 800", "bandwidth_gbps = 0", "gpu.bandwidth_gbps is 0; expected above 0"),
        ("bandwidth_gbps = 800", "bandwidth_gbps = nan", "gpu.bandwidth_gbps.value is nan"),
        ("bandwidth_fraction = 1", "bandwidth_fraction = 1.2", "gpu.bandwidth_fraction is 1.2; expected a fraction"),
        ("tflops = 100", "tflops = inf", "gpu.tflops.value is inf"),
        ("tflops = 100", "", "gpu.tflops is missing"),
        ("waits_for_route = false", "waits_for_route = 0", "software.waits_for_route is 0; expected true or false"),
        ("gbps = 25", "gbps = 25\nh2d = { points = [[1, 1], [2, 2]], source = 's' }", "either h2d points or both"),
        ("gbps = 25", "gbps = { value = 25 }", "link.gbps.source is missing"),
        ("operation_us = 0", "operation_us = 0\ncopying_us = -1", "software.copying_us.value is -1"),
        ("operation_us = 0", "operation_us = 0\ncopying_us = true", "copying_us is true; expected a number, with a d"),
        (
            "operation_us = 0",
            "operation_us = [1]",
            "operation_us is [1]; expected a number, with a decimal point, or a table of value and source",
        ),
        ("[gpu]", "[host]\nhost_gbps = 0\nshared_gbps = 1\n[gpu]", "host.host_gbps is 0; expected 0.001 or more"),
        (
            "[gpu]",
            "[host]\nhost_gbps = { value = 0.0, source = 's' }\nshared_gbps = 1\n[gpu]",
            "host.host_gbps is 0.0; expected 0.001 or more",
        ),
        ("[gpu]", "[host]\nhost_gbps = 50\nshared_gbps = 1e-6\n[gpu]", "host.shared_gbps is 1e-06; expected 0.001"),
        ("[gpu]", "host = 'x'\n[gpu]", "host is 'x'; expected a table with host_gbps, shared_gbps"),
        ("[gpu]", "lookups = 3\n[gpu]", "lookups is 3; expected a table with gpu, host"),
        ("[gpu]", "ffn = [3]\n[gpu]", "ffn.0 is 3; expected a table with points, source, hidden, width, matrices"),
        ("[gpu]", "layer = 3\n[gpu]", "layer is 3; expected a list"),
        ("[gpu]", "[details]\n[host]\nhost_gbps = true\nshared_gbps = 1\n[gpu]", "host_gbps is true; expected a n"),
        ("[gpu]", "[host]\nhost_gbps = 50\n[gpu]", "host.shared_gbps is missing"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(old: str, new: str, message: str) -> None:
    assert old in PROFILE
    with pytest.raises(InputError) as error:
        Hardware.parse(PROFILE.replace(old, new), "mine.toml")
    assert str(error.value).startswith("mine.toml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "points", [[[1, 1]], [[1, 1], [1, 2]], [[2, 2], [1, 3]], [[1, 2], [2, 1]], [[0, 1], [1, 2]], [[1, 1], [2]]]
)
def test_a_bad_curve_is_refused(points: list[list[int]]) -> None:
    with pytest.raises(InputError, match=r"^x\.toml: link\.h2d\.points"):
        curved(points)


def test_unknown_name_and_bad_files(tmp_path) -> None:
    with pytest.raises(InputError, match=r"'h20' is unknown; .*rtx-4090"):
        Hardware.load("h20")
    path = tmp_path / "caf\u00e9 \u6a5f.toml"
    path.write_text(PROFILE, encoding="utf-8")
    assert Hardware.load(path).name == "x"
    path.write_bytes(b"# one\nname = \xff")
    with pytest.raises(InputError, match=r"\.toml: line 2: not UTF-8"):
        Hardware.load(path)
    with pytest.raises(OSError):
        Hardware.load(tmp_path / "absent.toml")


# --- the built-in profiles ---


@pytest.mark.parametrize("name", builtin_hardware())
def test_builtin_profiles(name: str) -> None:
    hardware = Hardware.load(name.upper())
    assert hardware.name == name
    rows = json.dumps(machine_json(name), allow_nan=False)
    assert (rows.count('"measured": true') >= 5) == hardware.link_measured
    assert hardware.link_measured or "assumed" in hardware.software.layer_floor_us.source
    assert machine_table(name).row_count > 10


def test_a_machines_page_says_how_fast_its_host_computes(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace("[gpu]", "[host]\nhost_gbps = 41\nshared_gbps = 23.5\n[gpu]"))
    cells = [list(column.cells) for column in machine_table(path).columns]
    told = dict(zip(cells[0], cells[1], strict=True))
    assert (told["host_gbps"], told["shared_gbps"]) == ("41", "23.5")
    assert machine_json(path)["host"]["shared_gbps"]["value"] == 23.5


def test_catalogues_list_everything() -> None:
    assert hardware_table().row_count == len(hardware_json()) == len(builtin_hardware()) > 9
    assert models_table().row_count == len(models_json()) == len(builtin_models()) > 9
    json.dumps(models_json(), allow_nan=False)


def test_a_copy_in_a_row_is_spared_what_the_row_shows() -> None:
    points = [[100, 100], [1100, 1100]]
    alone, row = curved(points), curved(points, queued=[[100, 80], [1100, 1080]])
    assert alone.startup_ns(600) == alone.link_latency_ns == 0
    assert [row.startup_ns(size) for size in (100, 600, 5000)] == [20, 20, 20]
    assert row.link_bytes_per_s > alone.link_bytes_per_s
    assert curved(points, queued=[[100, 200], [1100, 1200]]).startup_ns(100) == 0


# --- profiles of one's own ---


@pytest.mark.parametrize("name", builtin_hardware())
def test_the_file_of_a_profile_can_be_printed_and_loaded(name: str, capsys) -> None:
    assert main(["hardware", name, "--toml"]) == 0
    printed = capsys.readouterr().out
    assert Hardware.parse(printed, "printed") == Hardware.load(name)


def test_figures_have_the_names_that_they_have_in_a_profile() -> None:
    shown = list(machine_table("h200").columns[0].cells)
    assert {"alone_us", "copying_us", "handover_us"} <= set(shown) & set(machine_json("h200")["software"])


def test_what_is_no_profile_is_not_printed(tmp_path, capsys) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace("tflops = 100", ""))
    for arguments in ([str(path)], [], ["h200", "--json", "-"]):
        assert main(["hardware", *arguments, "--toml"]) == 2
        out, error = capsys.readouterr()
        assert not out and error.startswith("error: ") and error.count("\n") == 1


def test_an_error_says_what_the_missing_field_is() -> None:
    for old, message in (
        ("bandwidth_fraction = 1", "gpu.bandwidth_fraction is missing; expected a number: share of the peak bandwidth "
         "that a kernel which only reads weights reaches, 0.01 to 1"),
        ('name = "x"', "name is missing; expected a text: what reports call the machine"),
        ("waits_for_route = false", "expected true or false: whether the host waits for the router's answer"),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            Hardware.parse(PROFILE.replace(old, ""), "mine.toml")
        assert str(error.value).endswith(message)
    with pytest.raises(InputError, match="gpu is missing; expected a table with memory_gb, bandwidth_gbps,"):
        Hardware.parse('name = "x"', "mine.toml")


TABLES: dict[str, type[Checked]] = {
    "": Hardware, "gpu": Gpu, "link": Link, "software": LoopOverheads, "software.host_thread": HostFigures,
    "ffn": Ffn, "layer": Layer, "host": HostCompute,
    "lookups": Measured, "lookups.gpu": Lookups, "figure": Figure, "curve": Curve,
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_the_documentation_names_every_field_of_a_profile_in_its_table(table: str) -> None:
    page = (REPOSITORY / "docs" / "hardware.md").read_text("utf-8")
    headings = {"": "At the top", "figure": "A figure", "curve": "A curve", "lookups.gpu": "`[lookups.gpu]`"}
    section = page.partition(f"### {headings.get(table, f'`[{table}]`')}")[2].partition("\n### ")[0]
    fields = TABLES[table].model_fields
    for name in (field.alias or own for own, field in fields.items()):
        told = re.search(rf"^- `{name}`[^:]*: (.+)", section, re.M)
        assert told is not None and len(told[1]) > 10, f"{table}.{name}"


def test_the_example_in_the_documentation_is_a_profile() -> None:
    page = (REPOSITORY / "docs" / "hardware.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    machine = Hardware.parse(example, "docs/hardware.md")
    assert machine.gpu_bytes == 16_000_000_000 and not machine.link_measured
    assert machine.copy_ns(13_000_000) == 1_014_000
