"""Validation: what is compared, what is written, and what an interruption leaves."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import realrun.validate.baselines
import realrun.validate.pairs
import realrun.validate.record
from ground.errors import InputError
from realrun.__main__ import main
from realrun.calibrate.machine import Machine
from realrun.engine.small_scene import first_steps, scaled
from realrun.options import ValidateOptions
from realrun.validate.agreement import PARTS, PREFILL_PARTS, Component, compare, matters, summarise
from realrun.validate.baselines import baselines, pageable_ms
from realrun.validate.pairs import MOST_RUNS, validate
from realrun.validate.record import FILES, Record
from realrun.validate.resimulate import resimulate_command
from sim.policies.recency import LRU
from sim.run.prepared import prepare, replay
from sim.run.scene import bundled_traces, code_version, scene
from tests.support.places import REPOSITORY
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.models.known import model_spec
from traces.models.spec import ModelSpec
from traces.trace import Trace

TRACE = next(path for path in bundled_traces() if path.name == "mixtral_law.npz")
H200 = (REPOSITORY / "sim/machine/profiles/h200.toml").read_text()
NUMBER = st.one_of(st.none(), st.floats(0, 1e9))


def asked(folder, **changes) -> ValidateOptions:
    """Two steps of a Mixtral 128 times narrower, on the CPU."""
    small = ValidateOptions(
        traces=(TRACE,), policies=("on-demand", "lru"), folder=folder, hardware="h200", software="fast",
        profile=(TRACE,), steps=2, scale=128, device="cpu", baseline=False, seconds=0,
    )  # fmt: skip
    return replace(small, **changes)


PLAIN_DRAW = realrun.validate.record.draw


@pytest.fixture(autouse=True, scope="module")
def no_figures() -> Iterator[None]:
    """Leave figures white: drawing one takes longer than the runs that it shows, and one test draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realrun.validate.record, "draw", lambda rows, path: path.write_bytes(b"\x89PNG"))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Record:
    return validate(asked(tmp_path_factory.mktemp("val")), "the command")


@given(NUMBER, NUMBER)
def test_errors_are_simulated_over_measured(simulated: float | None, measured: float | None) -> None:
    error = Component("p", "c", "throughput", "tokens/s", simulated, measured).error
    if simulated is None or measured is None:
        assert error is None
    elif measured == 0:
        assert error == (0 if simulated == 0 else None)
    else:
        assert error == pytest.approx((simulated - measured) / measured, abs=1e-9, rel=1e-6)
    points = Component("p", "c", "hits", "share", simulated, measured).error
    assert points == (None if None in (simulated, measured) else simulated - measured)


def test_short_runs_are_repeated_and_the_fastest_counts(tmp_path) -> None:
    record = validate(asked(tmp_path, policies=["lru"], seconds=1e9), "the command")
    (pair,) = record.reports
    runs = pair["measured"]["settings"]["runs_tokens_per_s"]
    assert len(runs) == MOST_RUNS and pair["measured"]["tokens_per_s"] == max(runs)
    spread = f"{1 - min(runs) / max(runs):.1%} below it on average"
    assert any(line.startswith("of 1 pairs several runs") and spread in line for line in record.verdict())
    assert "us at most" in record.provenance["host_interrupted"]


def test_a_run_agrees_with_itself() -> None:
    report = replay(scene(TRACE, hardware="h200"), "lru")
    rows = compare(report, report, "25%")
    assert {row.component for row in rows} >= {"throughput", "hits", "late", "misses", "bytes", "TTFT mean", *PARTS}
    assert all(row.error in (0, None) for row in rows)
    summary = summarise(rows)
    assert (summary.throughput_worst, summary.shares_worst, summary.parts_worst, summary.pairs) == (0, 0, 0, 1)


def test_the_parts_of_the_time_are_the_time_of_a_token() -> None:
    report = replay(scene(TRACE, hardware="h200"), "clairvoyant")
    rows = {row.component: row for row in compare(report, report, "25%")}
    whole = sum(rows[part].measured for part in PARTS)
    assert whole == pytest.approx(1e3 / report.tokens_per_s, rel=1e-6)


def test_the_parts_of_prefills_are_their_time() -> None:
    report = replay(scene(TRACE, hardware="h200"), "lru")
    rows = {row.component: row for row in compare(report, report, "25%")}
    prefills = sum(rows[part].measured for part in PREFILL_PARTS)
    decode = 1e3 * report.decode.tokens / report.tokens_per_s
    assert prefills + decode == pytest.approx(report.run_ms, rel=1e-6)


def test_what_takes_no_time_is_not_compared_by_itself() -> None:
    parts = [Component("p", "c", part, "ms", 10.0, 10.0) for part in PARTS[:2]]
    small, large = Component("p", "c", PARTS[2], "ms", 0.1, 0.0), Component("p", "c", PARTS[2], "ms", 0.3, 0.0)
    speed = Component("p", "c", "throughput", "tokens/s", 1.0, 1.0)
    assert not matters(small, [*parts, small]) and matters(large, [*parts, large])
    assert summarise([*parts, small, speed]).parts_worst == 0
    assert summarise([*parts, large, speed]).parts_worst == 1
    with pytest.raises(ValueError, match="no pair"):
        summarise(parts)
    without = summarise([*parts, replace(speed, simulated=None, measured=None)])  # no token was decoded
    assert (without.throughput_worst, without.throughput_mean, without.pairs) == (None, None, 1)


def routes(path: Path, phase: list[int]) -> Path:
    rng = np.random.default_rng(1)
    experts = rng.permuted(np.tile(np.arange(8), (len(phase), 32, 1)), axis=2)[:, :, :2]
    make_trace(experts, n_experts=8, phase=phase, name="mixtral-8x7b").save(path)
    return path


def test_policies_of_which_none_can_run_are_refused_before_experts_are_pinned(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(realrun.validate.pairs, "open_rig", lambda *_, **__: pytest.fail("experts are being pinned"))
    trace = routes(tmp_path / "bare.npz", [0, 0, 1, 1])
    with pytest.raises(InputError, match=r"nothing can be run: popularity: it learns from .*; domoe: .* no array emb"):
        validate(asked(tmp_path / "out", traces=(trace,), policies=["popularity", "domoe"], profile=None), "x")
    assert not (tmp_path / "out").exists()


def test_prompts_alone_are_compared_as_well(tmp_path) -> None:
    trace = routes(tmp_path / "prompts.npz", [0] * 6)
    prompts = asked(tmp_path / "out", traces=(trace,), policies=["lru"], steps=None, seconds=1)
    record = validate(prompts, "x")
    assert "throughput: off by – on average, – at worst" in record.verdict()
    assert json.loads((tmp_path / "out" / FILES[0]).read_text())["summary"]["throughput_worst"] is None


def test_demand_only_policies_find_the_same_on_both_clocks(finished: Record) -> None:
    assert finished.complete and not finished.left_out
    rows = [row for row in finished.rows if row.component in ("hits", "late", "misses", "look-ups", "bytes")]
    assert len(rows) == 10 and all(row.error == 0 for row in rows)
    for pair in finished.reports:
        assert (pair["simulated"]["clock"], pair["measured"]["clock"]) == ("simulated", "measured")
        assert pair["simulated"]["tokens"] == pair["measured"]["tokens"] == 2
        assert pair["simulated"]["settings"]["chunks"] == pair["measured"]["settings"]["chunks"] == 1, "small experts"


def test_every_file_tells_the_same(finished: Record, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(realrun.validate.record, "draw", PLAIN_DRAW)
    finished.write(tmp_path, plot=True)
    data = json.loads((tmp_path / "validation.json").read_text())
    with (tmp_path / "validation.csv").open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == len(data["components"]) == len(finished.rows)
    for line, row in zip(table, finished.rows, strict=True):
        assert line["simulated"] == ("" if row.simulated is None else repr(row.simulated))
        assert line["error"] == ("" if row.error is None else repr(row.error))
    assert data["complete"] and data["summary"]["pairs"] == 2
    text = (tmp_path / "validation.md").read_text()
    assert "the command" in text and text.count("\n| lru | 25% |") == 4
    assert (tmp_path / "validation.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".json", ".md", ".png"]


def test_an_interruption_leaves_what_was_finished(tmp_path, monkeypatch) -> None:
    asks = []
    plain = realrun.validate.pairs._measure

    def both(*arguments):
        asks.append(arguments)
        return plain(*arguments) if len(asks) == 1 else None  # the second run is stopped half-way

    monkeypatch.setattr(realrun.validate.pairs, "_measure", both)
    record = validate(asked(tmp_path, policies=["lru", "lfu", "fifo"]), "x")
    data = json.loads((tmp_path / "validation.json").read_text())
    assert not data["complete"] and not record.complete
    assert [report["policy"] for report in data["reports"]] == ["lru"]
    assert "interrupted" in (tmp_path / "validation.md").read_text()


def test_without_a_finished_pair_what_was_there_stays(tmp_path, monkeypatch) -> None:
    there = {name: f"earlier {name}" for name in ("profile.toml", *FILES)}
    for name, text in there.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(realrun.validate.pairs, "_measure", lambda *_: None)
    monkeypatch.setattr(realrun.validate.pairs, "calibrate", lambda *_: H200)
    for hardware in ("h200", None):
        assert not validate(asked(tmp_path, hardware=hardware), "x").complete
    monkeypatch.setattr(realrun.validate.pairs, "_measure", cannot)
    with pytest.raises(InputError, match="nothing could be run: on-demand at 25%: not here; lru at 25%: not here"):
        validate(asked(tmp_path, hardware=None), "x")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == there


def cannot(*_):
    raise InputError("not here")


def test_with_a_finished_pair_all_that_is_there_is_of_these_runs(tmp_path, monkeypatch) -> None:
    for name in FILES:
        (tmp_path / name).write_text(f"earlier {name}")
    plain, states = realrun.validate.pairs._measure, []

    def both(*arguments):
        states.append({path.name for path in tmp_path.iterdir()})
        return plain(*arguments) if len(states) == 1 else None

    monkeypatch.setattr(realrun.validate.pairs, "_measure", both)
    monkeypatch.setattr(realrun.validate.pairs, "calibrate", lambda *_: H200)
    validate(asked(tmp_path, hardware=None), "x")
    assert states == [set(FILES), {*FILES[:3], "profile.toml"}]
    assert (tmp_path / "profile.toml").read_text() == H200
    assert (tmp_path / FILES[3]).read_bytes().startswith(b"\x89PNG")


def test_runs_are_kept_where_baselines_are_not_waited_for(tmp_path, monkeypatch) -> None:
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(realrun.validate.pairs, "baselines", stopped)
    with pytest.raises(KeyboardInterrupt):
        validate(asked(tmp_path, policies=["lru", "lru"], baseline=True), "x")
    data = json.loads((tmp_path / FILES[0]).read_text())
    assert data["complete"] and data["baselines"] == {} and len(data["reports"]) == 1  # who is named twice runs once
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def test_files_of_a_record_appear_together_or_not_at_all(finished: Record, tmp_path, monkeypatch) -> None:
    for name in FILES:
        (tmp_path / name).write_text("earlier")

    def fails(*_):
        raise OSError("no space")

    monkeypatch.setattr("realrun.validate.record.draw", fails)
    with pytest.raises(OSError, match="no space"):
        finished.write(tmp_path, plot=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(FILES, "earlier")


def test_a_folder_of_any_name_takes_the_files(finished: Record, tmp_path) -> None:
    replace(finished, command="-o \udcff").write(tmp_path / "\udcff", plot=True)
    assert "Made by `-o \\udcff`" in (tmp_path / "\udcff" / FILES[2]).read_text("utf-8")


class SameExperts(LRU):
    """A policy of somebody else's, which is found by its module alone."""

    name = "same-experts"


def test_a_policy_named_by_its_module_is_validated(tmp_path) -> None:
    """It was replaced by its display name, which is then unknown."""
    label = f"{__name__}:SameExperts"
    record = validate(asked(tmp_path / "out", policies=[label, f"{label},scope=layer"], cache=("50%",)), "x")
    assert record.complete and not record.left_out
    assert [(pair["policy"], pair["measured"]["policy"]) for pair in record.reports] == [
        (label, "same-experts"),
        (f"{label},scope=layer", "same-experts"),
    ]


def test_a_policy_that_cannot_run_is_left_out_by_name(tmp_path) -> None:
    record = validate(asked(tmp_path, policies=["lru", "popularity"], profile=None, cache=("1", "25%")), "x")
    assert len(record.left_out) + len(record.reports) == 4
    assert all(line.split(" at ")[0] in ("lru", "popularity") for line in record.left_out)


def test_wrong_input_is_one_line(tmp_path, capsys) -> None:
    out = str(tmp_path / "out")
    small = ["--device", "cpu", "--scale", "128", "--steps", "1", "--hardware", "h200", "-o", out]
    assert main(["validate", str(TRACE), "--policies", "nobody", *small]) == 2
    assert "'nobody' is unknown" in capsys.readouterr().err
    assert main(["validate", str(TRACE), "--policies", "lru", *(word.replace("h200", "l40") for word in small)]) == 2
    assert "l40 has no measured look-ups" in capsys.readouterr().err
    assert main(["validate", str(TRACE), "--policies", "lru", "--device", "cuda:99", "-o", out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    measured = [word for word in small if word not in ("--hardware", "h200")]
    wrongs = (
        ["--cache", "much"],
        ["--steps", "0"],
        ["--software", "nobody"],
        ["--draw", "0"],
        ["--repeat", "0"],
        ["--draw", "2", "--cache", "25%"],
        ["--draw", "2", "--cache", "75%", "25%"],
        ["--seconds", "-1"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
        ["--cache"],
        ["--policies"],
        ["--policies", "lru,colour=red"],
    )
    for wrong in wrongs:  # nothing is measured first
        policies = [] if "--policies" in wrong else ["--policies", "lru"]
        assert main(["validate", str(TRACE), *policies, *measured, *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    assert main(["validate", str(TRACE), "--policies", "lru", *small[:-1], str(file)]) == 2
    assert "is a file; expected a folder" in capsys.readouterr().err


def test_baselines_are_set_against_the_measured_runs(monkeypatch) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    offloaded_ms = realrun.validate.baselines._offloaded_ms

    def quiet(machine: Machine, model: ModelSpec, layers: int, tokens: int) -> float:
        assert offloaded_ms(machine, model, layers, tokens) > 0  # on a busy machine one layer more may take no longer
        return 5.0 * layers

    monkeypatch.setattr(realrun.validate.baselines, "_offloaded_ms", quiet)
    machine, model = Machine("cpu", 3), scaled(model_spec("mixtral-8x7b"), 64)
    ours = [{"policy": "on-demand", "cache": "25%", "measured": {"tpot_ms": {"mean": 64.0}}}]
    found = baselines(machine, model, ours)
    assert not found["left_out"]
    assert found["ms"]["on-demand at 25%"] == 2.0
    for name in ("accelerate cpu_offload", "on-demand copies, pageable"):
        ms = found["ms"][name]
        assert ms > 0
        assert f"{ms / 2.0:.1f} times on-demand at 25% (2.00 ms)" in found["ratios"][name]


def test_what_a_baseline_cannot_be_is_said(monkeypatch) -> None:
    machine, model = Machine("cpu", 3), scaled(model_spec("qwen1.5-moe-a2.7b"), 64)
    assert pageable_ms(machine, model, calls=2) > 0
    assert (
        "no model of transformers' Mixtral class" in baselines(machine, model, [])["left_out"]["accelerate cpu_offload"]
    )
    monkeypatch.setattr(realrun.validate.baselines, "_offloaded_ms", lambda *_: 3.0)
    with pytest.raises(InputError, match="too busy to tell"):
        realrun.validate.baselines.accelerate_ms(machine, model)


def test_baselines_take_the_runs_of_a_validation(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(realrun.validate.baselines, "pageable_ms", lambda *_: 3.0)
    monkeypatch.setattr(realrun.validate.baselines, "accelerate_ms", lambda *_: 8.0)
    runs, out = tmp_path / "validation.json", tmp_path / "out.json"
    report = {"policy": "lru", "cache": "25%", "measured": {"tpot_ms": {"mean": 32.0}}}
    made = {"command": "validate it", "provenance": {"model": "mixtral-8x7b", "hardware": "h200"}}
    runs.write_text(json.dumps(made | {"reports": [report]}))
    small = ["baseline", "--device", "cpu", "--against", str(runs), "--json", str(out)]
    assert main(small) == 0
    assert "accelerate cpu_offload: 8.00 ms a layer; 8.0 times lru at 25% (1.00 ms)" in capsys.readouterr().out
    told = json.loads(out.read_text())
    assert told["ms"]["on-demand copies, pageable"] == 3.0
    assert told["provenance"].keys() >= {
        "model",
        "date",
        "device",
        "python",
        "torch",
        "host",
        "host_interrupted",
        "code",
    }
    assert told["provenance"]["code"] == code_version() and told["command"].startswith("python -m realrun")
    assert told["against"] == {"command": "validate it", "provenance": {"model": "mixtral-8x7b", "hardware": "h200"}}
    assert main([*small, "--model", "phi-3.5-moe"]) == 2
    assert "runs of mixtral-8x7b; expected phi-3.5-moe" in capsys.readouterr().err
    monkeypatch.setattr(realrun.validate.baselines, "baselines", lambda *_: pytest.fail("something is being measured"))
    for odd in ([], made, made | {"reports": [{}]}, made | {"reports": [report | {"measured": 3}]}, {"reports": []}):
        runs.write_text(json.dumps(odd))
        assert main(small) == 2
        assert "expected the validation.json that validate writes" in capsys.readouterr().err


def test_plans_are_made_once_and_shared(tmp_path, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(realrun.validate.pairs, "prepare", lambda *a: made.append(a) or prepare(*a))
    validate(asked(tmp_path, policies=["lru"]), "x")
    assert len(made) == 1


def test_no_pair_at_all_is_said(tmp_path) -> None:
    record = Record("x", {})
    assert record.verdict() == ["no pair of runs was finished"]
    record.write(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError):
        validate(asked(tmp_path, steps=0), "x")


def measured_then() -> dict[str, Any]:
    """The committed record as if of the trace at hand: it was measured on an earlier edition of that trace."""
    text = (REPOSITORY / "docs/results/realrun/mixtral/validation.json").read_text()
    measured_on = json.loads(text)["provenance"]["trace_sha256"]
    return json.loads(text.replace(measured_on, Trace.load(TRACE).sha256))


def test_pairs_are_simulated_again_against_what_was_measured_then(tmp_path, capsys) -> None:
    then = measured_then()
    few = [r for r in then["reports"] if r["policy"] in ("lru", "all-in-gpu") and r["cache"] == "25%"]
    some = tmp_path / "validation.json"
    some.write_text(json.dumps(then | {"reports": few}))
    with pytest.raises(InputError, match="expected another folder"):
        resimulate_command(some, TRACE, tmp_path, "h200", "")
    assert main(["resimulate", str(some), str(TRACE), "--hardware", "h200", "-o", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "validation.json").read_text())
    assert [report["measured"] for report in again["reports"]] == [report["measured"] for report in few]
    assert again["provenance"]["measured by"] == then["command"]
    assert again["provenance"]["hardware"] == "h200"
    old = {(r["policy"], r["cache"], r["component"]): r for r in then["components"]}
    for row in again["components"]:
        assert row["measured"] == old[row["policy"], row["cache"], row["component"]]["measured"]
    mine = {r["policy"]: r["simulated"] for r in again["components"] if r["component"] == "throughput"}
    reports = {
        name: replay(first_steps(scene(TRACE, hardware="h200"), then["provenance"]["decode_steps"]), name)
        for name in mine
    }
    assert mine == {name: report.tokens_per_s for name, report in reports.items()}


def test_the_table_of_another_simulation_is_as_wide_as_the_first(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    then = measured_then()
    few = [r for r in then["reports"] if (r["policy"], r["cache"]) == ("lru", "25%")]
    some = tmp_path / "validation.json"
    some.write_text(json.dumps(then | {"reports": few}))
    again = ["resimulate", str(some), str(TRACE), "--hardware", "h200", "-o", str(tmp_path / "again")]
    assert main(again) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ lru")]
    assert len(rows) == 1 and 180 < len(rows[0]) <= 200 and "│   25% │" in rows[0]
    # What is compared now and was not then has no measured figure; what is no record is refused.
    rest = [row for row in then["components"] if row["component"] != "prefill predict"]
    some.write_text(json.dumps(then | {"reports": few, "components": rest}))
    assert main(again) == 0
    components = json.loads((tmp_path / "again/validation.json").read_text())["components"]
    assert [row["measured"] for row in components if row["component"] == "prefill predict"] == [None]
    capsys.readouterr()
    timeless = few[0] | {"measured": few[0]["measured"] | {"time_ms": 1}}
    odds = [{"provenance": 3}, {"components": None}]
    odds += [{"reports": odd} for odd in ([], 3, [{}], [few[0] | {"measured": {}}], [timeless])]
    for odd in odds:
        some.write_text(json.dumps(then | odd))
        assert main(again) == 2
        assert capsys.readouterr().err.startswith(f"error: {some}: ")
    some.unlink()
    assert main(again) == 2
    assert capsys.readouterr().err == f"error: {some}: No such file or directory\n"


def test_a_record_of_other_types_is_refused_and_what_it_says_moves_no_cursor(tmp_path, capsys, monkeypatch) -> None:
    then = measured_then()
    few = [r for r in then["reports"] if (r["policy"], r["cache"]) == ("lru", "25%")]
    some = tmp_path / "validation.json"
    again = ["resimulate", str(some), str(TRACE), "--hardware", "h200", "-o", str(tmp_path / "again")]
    texts, text, truth = "a list of texts", "a text", "true or false"
    for field, odd, shown, right in (
        ("complete", 1, "1", truth), ("complete", "no", '"no"', truth), ("complete", None, "null", truth),
        ("left_out", "lru", '"lru"', texts), ("left_out", ["a", 1], '["a", 1]', texts), ("left_out", {}, "{}", texts),
        ("command", 3, "3", text), ("command", ["x"], '["x"]', text), ("command", [9] * 99, "[" + "9, " * 19, text),
    ):  # fmt: skip
        some.write_text(json.dumps(then | {"reports": few, field: odd}))
        assert main(again) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: {some}: {field} is {shown}")
        assert err.endswith(f"; expected {right}\n") and err.count("\n") == 1
    assert not (tmp_path / "again").exists()
    monkeypatch.setenv("COLUMNS", "80")
    some.write_text(json.dumps(then | {"reports": few, "left_out": ["\x1b[2J [red]x"]}))
    assert main(again) == 0
    out = capsys.readouterr().out
    assert "left out: \\x1b[2J [red]x" in out and "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80 and out.count("│ lru ") == 3  # the table in three parts


def test_runs_at_divided_widths_are_not_simulated_again(finished: Record, tmp_path, capsys) -> None:
    finished.write(tmp_path)
    made = tmp_path / FILES[0]
    assert main(["resimulate", str(made), str(TRACE), "-o", str(tmp_path / "again")]) == 2
    assert "of mixtral-8x7b, widths / 128; expected runs at true size, without --scale" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "trace", "says"),
    [
        ("[]", TRACE, "expected the validation.json that validate writes"),
        (None, TRACE.with_name("mixtral_code.npz"), "not the trace of"),
    ],
)
def test_what_cannot_be_simulated_again_is_refused_in_one_line(tmp_path, capsys, text, trace, says) -> None:
    source = tmp_path / "validation.json"
    committed = REPOSITORY / "docs/results/realrun/mixtral/validation.json"
    source.write_text(committed.read_text() if text is None else text)
    assert main(["resimulate", str(source), str(trace), "-o", str(tmp_path / "again")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_validation_of_a_model_that_only_its_trace_knows_is_simulated_again(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    trace = make_trace(rng.permuted(np.tile(np.arange(8), (4, 2, 1)), axis=2)[:, :, :2], n_experts=8)
    trace.meta["model"] |= toy_meta(2)
    trace.save("own.npz")
    command = ["--policies", "lru", "--hardware", "h200", "--device", "cpu", "--no-baseline", "--seconds", "0.01"]
    assert main(["validate", "own.npz", *command, "-o", "out"]) == 0
    assert main(["resimulate", "out/validation.json", "own.npz", "--hardware", "h200", "-o", "again"]) == 0
    one, other = (json.loads(Path(folder, FILES[0]).read_text())["reports"] for folder in ("out", "again"))
    assert one[0]["simulated"]["tpot_ms"] == other[0]["simulated"]["tpot_ms"]
