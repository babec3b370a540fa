"""Calibrating: what is written is what was measured, and the simulator charges it."""

import tomllib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from ground.errors import InputError
from realrun.__main__ import main
from realrun.calibrate.block_tables import Blocks, ffn_tables, layer_tables, not_charged
from realrun.calibrate.ffn_times import Ffn, ffn_times, ffns
from realrun.calibrate.layer_times import charged, in_bf16, kind, layer_times, layers_of
from realrun.calibrate.lookup_costs import lookup_costs
from realrun.calibrate.loop_times import LoopTimes, loop_times, without_loop
from realrun.calibrate.machine import Machine
from realrun.calibrate.machine_profile import _eager, _loops, _rounded, _software, calibrate, calibrate_command
from realrun.calibrate.parts import Parts
from realrun.calibrate.products import launches
from realrun.calibrate.profile_text import to_toml
from realrun.calibrate.thoroughness import TINY
from realrun.calibrate.timing import Timing
from sim.machine.cost import Costs, along
from sim.machine.figures import Curve, Figure
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import LOOP_FIGURES
from sim.machine.prediction_costs import PredictionCosts
from tests.support.real_worlds import TINY_MOE
from traces.models.known import builtin_models, model_spec
from traces.models.spec import ModelSpec


@pytest.fixture(scope="module")
def profile() -> str:
    return calibrate(Machine("cpu"), [], TINY, "here")


def measured(profile: str, **tables: object) -> Hardware:
    return Hardware.from_dict(tomllib.loads(profile) | tables)


def test_the_profile_loads_and_says_where_everything_is_from(profile: str) -> None:
    machine = measured(profile)
    assert machine.link_measured and machine.link.queued is not None
    assert machine.host is not None and machine.host.host_gbps.value > 0 and machine.host.shared_gbps.value > 0
    figures = [figure for part in (machine.gpu, machine.software) for _, figure in part if hasattr(figure, "measured")]
    assert figures and all(figure.measured and "torch" in figure.source for figure in figures)
    facts = machine.details["machine"]
    assert {"date", "device", "python", "torch", "host", "code", "seconds"} <= facts.keys()
    sizes = [size for size, _ in machine.link.h2d.points]
    assert tuple(sizes) == TINY.copies
    for size, ns in machine.link.h2d.points:
        assert machine.copy_ns(size) == ns


def test_look_ups_are_charged_as_measured(profile: str) -> None:
    machine = measured(profile)
    for name, where in (("measured", "gpu"), ("measured-host", "host")):
        software = PredictionCosts.load(name, machine)
        costs = getattr(machine.lookups, where)
        assert software.where == where
        assert software.search_ns(machine, 200, 64) > 0
        if where == "gpu":
            numbers = 200 * 64
            longer = max(numbers * costs.element_bytes / costs.gbps.value, 2 * numbers / costs.gflops.value)
            assert software.search_ns(machine, 200, 64) == pytest.approx(costs.search_us.value * 1e3 + longer, abs=2)
    with pytest.raises(InputError, match="l40 has no measured look-ups"):
        PredictionCosts.load("measured", Hardware.load("l40"))


def test_measured_blocks_take_the_place_of_the_formula(profile: str) -> None:
    ffn = {"hidden": 64, "width": 32, "matrices": 3, "source": "seen", "measured": True, "points": [[1, 500], [9, 900]]}
    layer = {
        "hidden": 64, "attention": TINY_MOE.attention.shape, "experts": TINY_MOE.experts,
        "decode": {"source": "seen", "points": [[8, 1000], [16, 2000]]},
        "prefill": {"source": "seen", "points": [[1, 3000], [11, 13000]]},
    }  # fmt: skip
    machine = measured(profile, ffn=[ffn], layer=[layer])
    costs, formula = Costs(TINY_MOE, machine), Costs(TINY_MOE, measured(profile))
    assert costs.expert_ns(np.array([0, 1, 5, 9, 17])).tolist() == [0, 500, 700, 900, 1300]
    wait = round(machine.software.route_wait_us.value * 1e3)
    decode = costs.layer_ns([1, 1, 1], [4, 12, 24])[:, 1] - wait
    assert decode.tolist() == pytest.approx([1000, 1500, 3000], abs=1)
    assert costs.layer_ns([6], [6])[0, 1] - wait == pytest.approx(8000, abs=1)
    assert costs.shared_ns([1]).tolist() == formula.shared_ns([1]).tolist()
    other = Costs(replace(TINY_MOE, expert_bytes=(99,) * 3), machine)
    assert other.expert_ns(1) == Costs(replace(TINY_MOE, expert_bytes=(99,) * 3), measured(profile)).expert_ns(1)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_more_rows_never_take_less(rows: list[int]) -> None:
    shape = Curve(points=[[2, 10], [5, 40], [9, 41]], source="seen")
    times = along(shape, sorted(rows))
    assert (np.diff(times) >= 0).all() and times.min() >= 10


def test_every_built_in_model_has_its_ffns_and_layers() -> None:
    models = [model_spec(name) for name in builtin_models()]
    found = {used.ffn: used for used in ffns(models)}
    assert found[Ffn(4096, 14336, 3)].use == "routed"
    assert found[Ffn(2048, 5632, 3)].use == "shared"
    assert found[Ffn(2048, 10944, 3)].use == "dense"
    assert not any(used.use == "routed" and used.model.name == "deepseek-v3" for used in found.values())
    layers = {kind(m) for m in layers_of(filter(charged, models))}
    assert (4096, "GQA 32/8/128", 8) in layers and not any(hidden == 2880 for hidden, _, _ in layers)
    timed = found.keys() | {used.ffn for used in ffns(map(in_bf16, models))}
    for model in models:
        widths = {model.expert_ffn, model.shared_ffn, model.dense_ffn if model.routed_layers < model.layers else 0}
        assert {Ffn(model.hidden, width, model.expert_matrices) for width in widths if width} <= timed
    assert {kind(m) for m in layers_of(map(in_bf16, models))} == {kind(m) for m in models}


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "deepseek-v3", "kimi-k2"])
def test_curves_of_models_that_are_not_in_bf16_would_not_be_charged(name: str) -> None:
    """Nor are they: they lie under details. But a curve's dimensions may be those of another model of the profile."""
    model, machine = model_spec(name), Hardware.load("h200")
    bf16 = in_bf16(model)
    points = {"source": "seen", "points": [[1, 1], [2, 2]]}
    taken = [{"hidden": u.ffn.hidden, "width": u.ffn.width, "matrices": u.ffn.matrices} | points for u in ffns([bf16])]
    layer = {"hidden": model.hidden, "attention": model.attention.shape, "experts": model.experts}
    tables = machine.model_dump()
    more = Hardware.from_dict(
        tables
        | {"ffn": tables["ffn"] + taken, "layer": [*tables["layer"], layer | {"decode": points, "prefill": points}]}
    )
    rows = [1, 7, 300]
    before, after = Costs(model, machine), Costs(model, more)
    assert after.expert_ns(rows).tolist() == before.expert_ns(rows).tolist()
    assert after.shared_ns(rows).tolist() == before.shared_ns(rows).tolist()
    assert after.layer_ns(rows, [64, 9, 300]).tolist() == before.layer_ns(rows, [64, 9, 300]).tolist()
    assert Costs(bf16, more).expert_ns(1) == 1


def test_ffns_and_layers_are_timed_by_the_code_that_runs_them() -> None:
    machine = Machine("cpu", 3)
    found = ffn_times(machine, ffns([TINY_MOE]), (1, 4))
    assert set(found) == {Ffn(64, 32, 3), Ffn(64, 48, 3)}
    assert all(set(times.charged) == {1, 4} for times in found.values())
    assert set(found[Ffn(64, 32, 3)].waited) == {4} and not found[Ffn(64, 48, 3)].waited
    assert set(found[Ffn(64, 32, 3)].others) == {"eager", "graph", "one_alone"}
    assert set(found[Ffn(64, 48, 3)].others) == {"eager", "graph", "launched"}
    times = layer_times(machine, TINY_MOE, (8, 16), (1, 8))
    assert set(times.decode) == {8, 16} and set(times.prefill) == {1, 8} == set(times.launched)


def loop(resident_us: float, waiting_us: float, alone_us: float = 0.0, prefetching_us: float = 0.0) -> LoopTimes:
    return LoopTimes(resident_us, waiting_us, alone_us, 0.0, prefetching_us, link_busy=1.0, top_k=2)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 100))
def test_a_loop_charges_a_resident_layer_what_it_took(resident: float, waiting: float, alone: float) -> None:
    found = loop(resident, waiting, alone)
    assert found.route_wait_us + found.launch_us == pytest.approx(resident)
    assert found.route_wait_us >= 0 and found.launch_us >= 0
    assert loop(resident, waiting, alone, resident + alone).beside_copy_us == pytest.approx(alone, abs=1e-6)
    assert loop(resident, waiting, alone, resident / 2).beside_copy_us == 0
    if 2 * alone <= waiting <= resident + 2 * alone:
        assert found.route_wait_us + 2 * found.awaited_extra_us == pytest.approx(waiting)


@given(st.lists(st.floats(0, 1e3), min_size=5, max_size=5), st.lists(st.floats(0, 1e3), min_size=5, max_size=5))
def test_of_two_times_of_a_loop_the_quieter_runs_count(one: list[float], other: list[float]) -> None:
    first, second = (LoopTimes(*times, link_busy=times[0], top_k=2) for times in (one, other))
    both = first.or_quieter(second)
    assert both.resident_us == min(first.resident_us, second.resident_us)
    assert both.prefetching_us == min(first.prefetching_us, second.prefetching_us)
    waited = [(loop.waiting_us, loop.awaited_extra_us, loop.handover_us) for loop in (first, second)]
    assert (both.waiting_us, both.awaited_extra_us, both.handover_us) in waited
    assert both.waiting_us + 2 * both.handover_us == min(us + 2 * handover for us, _, handover in waited)
    assert first.or_quieter(first) == first


def test_the_loop_is_timed_by_the_engine_itself(profile: str) -> None:
    machine = measured(profile)
    # Kernels are charged as on a GPU, whatever the processor was busy with when its own were timed: much is left.
    found = loop_times(Machine("cpu", 3), TINY_MOE, Hardware.load("h200"), calls=9)
    assert min(found.resident_us, found.waiting_us, found.prefetching_us, found.link_busy) > 0
    assert found.top_k == TINY_MOE.top_k
    all_figures = dict.fromkeys(LOOP_FIGURES, Figure(value=9, source="seen"))
    given_all = machine.model_copy(update={"software": machine.software.model_copy(update=all_figures)})
    assert Costs(TINY_MOE, given_all).beside_copy_ns == 9000
    nothing = Costs(TINY_MOE, without_loop(given_all))
    assert (nothing.launch_ns, nothing.awaited_extra_ns, nothing.beside_copy_ns, nothing.handover_ns) == (0, 0, 0, 0)
    assert nothing.layer_ns([1], [1])[0, 1] + 9000 == Costs(TINY_MOE, given_all).layer_ns([1], [1])[0, 1]
    with pytest.raises(InputError, match="too much to time"):
        loop_times(Machine("cpu", 3), TINY_MOE, machine, most_bytes=1)


def test_what_only_a_gpu_is_asked_for_makes_a_profile_too(profile: str, monkeypatch) -> None:
    monkeypatch.setattr("realrun.calibrate.machine_profile.loop_times", partial(loop_times, calls=9))
    machine, tables = Machine("cpu", 3), tomllib.loads(profile)
    parts, blocks = Parts(machine), Blocks(machine, TINY, "seen")
    tables["ffn"] = ffn_tables(parts, blocks, [TINY_MOE])
    tables["layer"] = layer_tables(parts, blocks, [TINY_MOE])
    tables["software"]["kind"], tables["eager"] = "CUDA graphs", _eager(launches(machine), blocks, "seen")
    details = _loops(parts, [TINY_MOE], tables, "seen")
    details = _loops(parts, [TINY_MOE], tables, "seen", details)
    assert not parts.left_out
    found, costs = Hardware.from_dict(tables), Costs(TINY_MOE, Hardware.from_dict(tables))
    assert details.keys() == {TINY_MOE.name}
    assert costs.expert_ns(1) == found.ffn[0].points[0][1]
    eager = found.driven_by("eager")
    assert eager.software == found.eager and eager.software.measured and not eager.ffn
    assert eager.software.expert_floor_us.value * 1e3 == pytest.approx(min(t.ns for t in blocks.eager_ffn), rel=1e-3)
    waits = costs.awaited_ns(np.array([1, 2, 4]), np.zeros(3, np.int64))
    assert waits is not None and waits[1:].tolist() == [ns for _, ns in found.ffn[0].waited.points]
    assert waits[0] == costs.expert_ns(1) + costs.awaited_extra_ns
    assert found.layer[0].beside_copy_us == found.software.beside_copy_us.model_copy(
        update={"source": found.layer[0].beside_copy_us.source}
    )
    assert costs.beside_copy_ns == pytest.approx(found.layer[0].beside_copy_us.value * 1e3, abs=1)
    to_toml(blocks.details | {"loop_us": _rounded(details[TINY_MOE.name])})


def test_the_hosts_steady_way_is_charged_what_it_takes_undisturbed(monkeypatch) -> None:
    """A way that is quicker now and then, but mostly waits for its threads, is not."""
    sizes = {(100, 10): 1000, (200, 10): 2000}
    steady = {size: Timing(2 * ns, ns, 3 * ns, 9) for size, ns in sizes.items()}
    erratic = {size: Timing(8_000_000, ns // 2, 8_000_000, 9) for size, ns in sizes.items()}
    nets = {
        (10, 10, 10): Timing(8_000_000, 8_000_000, 8_000_000, 9),
        (20, 10, 20): Timing(8_000_000, 800, 8_000_000, 9),
    }
    ways = {"erratic": erratic, "steady": steady}
    found = {"search": ways, "cluster": ways, "network": {"flat": nets}}
    monkeypatch.setattr("realrun.calibrate.lookup_costs._host_ways", lambda *_: found)
    costs = lookup_costs(Machine("cpu", 3), "host", Hardware.load("h200"))
    assert costs.times["search"].keys() == {"erratic", "steady"}
    line = costs.lines["search"]
    assert line.rate == pytest.approx(4) and line.fixed_ns == pytest.approx(0, abs=1e-3)
    assert costs.how["search"] == "steady, 10th percentile; misses by 0% at most"
    assert "NOT TO BE TRUSTED: more took less time" in costs.how["network"].replace("no line fits, ", "")


def test_an_interrupted_calibration_leaves_no_profile(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("realrun.calibrate.machine_profile.lookup_costs", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        calibrate_command(tmp_path / "here.toml", [], quick=True, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_trip_is_charged_once(profile: str) -> None:
    machine = measured(profile)
    software = PredictionCosts.load("measured", machine)
    answered = machine.details["lookups"]["gpu"]["answered_us"]
    assert set(answered) == {f"{what}, link {link}" for what in ("search", "network") for link in ("idle", "busy")}
    assert all(len(answered[f"search, link {link}"]) == len(TINY.tables) for link in ("idle", "busy"))
    trip = software.search_us.value * 1e3
    two = software.search_ns(machine, 100, 64) + software.search_ns(machine, 100, 64)
    assert two - software.search_ns(machine, 200, 64) == pytest.approx(trip, abs=3)
    iterations = [software.cluster_ns(machine, 10, 64, 4, count) for count in (1, 2, 3)]
    assert np.diff(iterations).tolist() == pytest.approx([iterations[0]] * 2, abs=3)


def test_a_layers_own_loop_goes_before_that_of_the_software(profile: str) -> None:
    software = tomllib.loads(profile)["software"] | {"route_wait_us": 7.0, "launch_us": 3.0, "alone_us": 2.0}
    curves = {"source": "seen", "points": [[1, 1000], [2, 2000]]}
    layer = {"hidden": 64, "attention": TINY_MOE.attention.shape, "experts": TINY_MOE.experts}
    layer |= {"decode": curves, "prefill": curves}
    own = {"route_wait_us": 0.5, "launch_us": 0.0, "alone_us": 0.25}
    general, special = (
        Costs(TINY_MOE, measured(profile, software=software, layer=[layer | figures])) for figures in ({}, own)
    )
    assert (general.launch_ns, general.awaited_extra_ns) == (3000, 2000)
    assert (special.launch_ns, special.awaited_extra_ns) == (0, 250)
    assert general.layer_ns([1], [1])[0, 1] - special.layer_ns([1], [1])[0, 1] == 6500


FP8 = replace(TINY_MOE, name="fp8", hidden=96, weight_bytes=1, expert_bytes=(96 * 32 * 3,) * 3, shared_ffn=32)


def test_models_that_are_not_charged_are_timed_by_the_side() -> None:
    """In bf16, under details: what the simulator charges is that of the others alone."""
    machine = Machine("cpu", 3)
    parts, blocks, models = Parts(machine), Blocks(machine, TINY, "seen"), [TINY_MOE, FP8]
    assert {table["hidden"] for table in ffn_tables(parts, blocks, models)} == {TINY_MOE.hidden}
    assert {table["hidden"] for table in layer_tables(parts, blocks, models)} == {TINY_MOE.hidden}
    floors = _software(launches(machine), blocks, "seen")
    by_the_side = not_charged(parts, models, TINY)
    assert list(by_the_side["ffn_us"]) == ["96 x 32, routed, fp8"]
    assert list(by_the_side["layer_us"]) == [f"96, {TINY_MOE.attention.shape}, {TINY_MOE.experts}, fp8"]
    assert set(by_the_side["ffn_us"]["96 x 32, routed, fp8"]) == set(map(str, TINY.rows))
    again = _software(launches(machine), blocks, "seen")
    assert again["expert_floor_us"] == floors["expert_floor_us"] and not parts.left_out
    assert not_charged(parts, [TINY_MOE], TINY) == {"ffn_us": {}, "layer_us": {}}


def test_a_part_that_fails_is_left_out_by_name(monkeypatch, capsys) -> None:
    """The profile has the rest, and loads."""

    def refuse(*_: object) -> None:
        raise MemoryError

    def too_large(*_: object) -> None:
        raise InputError("an expert of 8 bytes\nis too large")

    monkeypatch.setattr("realrun.calibrate.machine_profile.lookup_costs", refuse)
    monkeypatch.setattr("realrun.calibrate.machine_profile.hosted_times", too_large)
    text = calibrate(Machine("cpu"), [], TINY, "here")
    machine = Hardware.parse(text, "here")
    left_out = {"look-ups": "MemoryError", "experts on the host": "an expert of 8 bytes"}
    assert machine.details["left_out"] == left_out
    assert machine.lookups is None and machine.host is None and machine.link_measured
    assert "experts on the host: left out: an expert of 8 bytes\n" in capsys.readouterr().err


def test_of_what_does_not_fit_together_all_that_fits_alone_is_timed(monkeypatch) -> None:
    machine, real = Machine("cpu", 3), ffn_times

    def small_ones(machine: Machine, uses: list, rows: object) -> dict:
        if len(uses) > 1 or uses[0].ffn.width > 32:
            raise RuntimeError("out of memory")
        return real(machine, uses, rows)

    monkeypatch.setattr("realrun.calibrate.block_tables.ffn_times", small_ones)
    timed = "realrun.calibrate.block_tables.layer_times"
    monkeypatch.setattr(timed, lambda *_: small_ones(machine, [None, None], ()))
    parts, blocks = Parts(machine), Blocks(machine, TINY, "seen")
    assert [table["width"] for table in ffn_tables(parts, blocks, [TINY_MOE])] == [32]
    assert layer_tables(parts, blocks, [TINY_MOE]) == []
    layer = f"layer 64, {TINY_MOE.attention.shape}, {TINY_MOE.experts}"
    assert parts.left_out == dict.fromkeys(["FFNs", "FFN 64 x 48", layer], "out of memory")


def test_a_device_that_does_not_go_on_ends_it_in_one_line(monkeypatch) -> None:
    machine = Machine("cpu", 3)

    def fail() -> None:
        raise RuntimeError("illegal memory access\nmore")

    monkeypatch.setattr(machine, "synchronize", fail)
    with pytest.raises(InputError, match="look-ups: illegal memory access; the device does not go on: illegal"):
        Parts(machine).try_to("look-ups", fail)
    with pytest.raises(KeyboardInterrupt):
        Parts(machine).try_to("look-ups", interrupt)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_of_two_models_with_the_same_layers_the_first_ones_loop_is_charged(profile: str, monkeypatch) -> None:
    figures = {"first": 10.0, "second": 20.0, "third": 60.0}

    def fake(machine: Machine, model: ModelSpec, hardware: Hardware, rounds: int) -> LoopTimes:
        if model.name == "none":
            raise InputError("too much to time")
        return loop(figures[model.name], 0.0)

    monkeypatch.setattr("realrun.calibrate.machine_profile.loop_times", fake)
    curves = {"source": "seen", "points": [[1, 1000], [2, 2000]]}
    layer = {"hidden": 64, "attention": TINY_MOE.attention.shape, "experts": TINY_MOE.experts}
    tables = tomllib.loads(profile) | {"layer": [layer | {"decode": curves, "prefill": curves}]}
    parts = Parts(Machine("cpu", 3))
    models = [FP8, *(replace(TINY_MOE, name=name) for name in ("none", *figures))]
    details = _loops(parts, models, tables, "seen")
    assert list(details) == list(figures) and parts.left_out == {"loop of none": "too much to time"}
    assert tables["layer"][0]["launch_us"]["value"] == 10 and "first" in tables["layer"][0]["launch_us"]["source"]
    assert tables["software"]["launch_us"]["value"] == 20
    figures |= {"first": 30.0, "second": 7.0}
    details = _loops(parts, models, tables, "seen", details)
    assert [details[name].resident_us for name in figures] == [10, 7, 60], "the quieter time counts"
    assert tables["layer"][0]["launch_us"]["value"] == 10 == tables["software"]["launch_us"]["value"]


def test_one_line_where_nothing_can_be_measured(tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "profile.toml"
    assert main(["calibrate", "--out", str(out), "--device", "cuda:99"]) == 2  # few machines have so many
    assert capsys.readouterr().err.startswith("error: device 'cuda:99': t")
    assert main(["calibrate", "--out", str(out), "--device", "tpu"]) == 2
    assert main(["calibrate", "--out", str(tmp_path / "no" / "p.toml"), "--device", "cpu"]) == 2
    assert main(["calibrate", "--out", str(out), "--device", "cpu", "--model", "gpt-9"]) == 2
    assert "gpt-9" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert main(["calibrate", "--out", str(out), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: torch is not installed; pip install 'moe-replay[torch]'\n"
    assert not out.exists()
