"""Drawn pairs and repeated runs: what is drawn, in which order it runs, and what the spread of runs says of errors."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import realrun.validate.pairs
import realrun.validate.record
from ground.errors import InputError
from realrun.__main__ import main
from realrun.options import ValidateOptions
from realrun.validate import spread
from realrun.validate.agreement import Component
from realrun.validate.draw import drawn, refuse_calibrated_on
from realrun.validate.pairs import REPEATS, validate
from realrun.validate.record import FILES
from sim.policies.named import NamedPolicy, every_policy
from sim.run.scene import Scene, scene
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.schema import DECODE

RUNS = st.lists(st.floats(0.5, 2), min_size=1, max_size=5)


def toy(path: Path, seed: int) -> Path:
    """A trace of two layers of 8 experts, a prompt of 4 rows and 20 tokens."""
    routes = np.random.default_rng(seed).permuted(np.tile(np.arange(8), (24, 2, 1)), axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=8, phase=[0] * 4 + [1] * 20)
    trace.meta["model"] |= toy_meta(2)
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> tuple[Path, ...]:
    folder = tmp_path_factory.mktemp("toys")
    return tuple(toy(folder / f"toy_{name}.npz", seed) for seed, name in enumerate(("law", "code")))


@pytest.fixture(scope="module")
def scenes(traces) -> list[Scene]:
    return [scene(trace, hardware="h200") for trace in traces]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch) -> None:
    monkeypatch.setattr(realrun.validate.record, "draw", lambda rows, path: path.write_bytes(b"\x89PNG"))


@given(count=st.integers(1, 40), seed=st.integers(0, 99), low=st.integers(7, 60), some=st.integers(1, 3))
@settings(max_examples=50)
def test_what_is_drawn_is_even_within_bounds_and_the_same_again(scenes, count, seed, low, some) -> None:
    policies = [NamedPolicy.of(label) for label in ("lru", "fifo", "lfu")[:some]]
    pairs = drawn(scenes, policies, count, seed, (f"{low}%", "75%"))
    assert pairs == drawn(scenes, policies, count, seed, (f"{low}%", "75%"))
    turns = [Counter(pair.policy.label for pair in pairs), Counter(pair.trace for pair in pairs)]
    for turn, cards in zip(turns, (some, len(scenes)), strict=True):
        every = [*turn.values(), *[0] * (cards - len(turn))]
        assert sum(every) == count and max(every) - min(every) <= 1
    for pair in pairs:
        here = scenes[pair.trace].with_cache(pair.cache)
        calls = np.diff(here.work.offsets)[np.repeat(here.work.schedule.phase == DECODE, 2)]
        assert here.budget >= calls.max() * here.model.expert_bytes[0]
        assert low - 1e-9 <= float(pair.cache[:-1]) <= 75 + 1e-9


def test_other_seeds_draw_other_sizes(scenes) -> None:
    sizes = {pair.cache for seed in range(20) for pair in drawn(scenes, [NamedPolicy.of("lru")], 1, seed)}
    assert len(sizes) > 15


@given(RUNS, st.floats(0.5, 2))
def test_an_error_is_explained_where_the_runs_lie_on_both_sides(runs: list[float], simulated: float) -> None:
    row = Component("p", "25%", "throughput", "tokens/s", simulated, max(runs), "t", tuple(runs))
    assert row.explained == (len(runs) > 1 and min(runs) <= simulated <= max(runs))
    middle = median(runs)
    assert row.of_median.error == pytest.approx(simulated / middle - 1)
    if len(runs) == 1:
        assert row.spread is None and row.in_spreads is None
        return
    assert row.spread == pytest.approx((max(runs) - min(runs)) / middle)
    if row.in_spreads is not None:
        assert row.in_spreads * (max(runs) - min(runs)) == pytest.approx(abs(simulated - middle))
        assert not row.explained or row.in_spreads <= 1 + 1e-9
    share = replace(row, unit="share")
    assert share.of_median.error == simulated - middle and share.spread == max(runs) - min(runs)


def test_large_errors_are_named_unless_the_spread_explains_them() -> None:
    def speed(policy: str, simulated: float, *runs: float) -> Component:
        return Component(policy, "25%", "throughput", "tokens/s", simulated, max(runs), "", runs)

    rows = [speed("near", 1.04, 1, 1.01, 1), speed("wide", 1.2, 1, 1.3, 1), speed("far", 1.2, 1, 1.01, 1)]
    told = [line for line in spread.verdict(rows) if line.startswith("throughput:")]
    assert told == [
        "throughput: 1 of 3 errors within 5 %; the spread explains 1 of the others, not far at 25% +20.0% (20.0)"
    ]
    assert spread.verdict([replace(row, runs=()) for row in rows]) == []


def asked(traces, folder: Path, **changes) -> ValidateOptions:
    small = ValidateOptions(
        traces=traces, policies=("lru", "fifo", "previous-token"), folder=folder, hardware="h200", device="cpu",
        baseline=False, draw=4, seed=5, steps=3,
    )  # fmt: skip
    return replace(small, **changes)


def test_pairs_take_turns_and_every_run_is_kept(traces, tmp_path, monkeypatch) -> None:
    plain, order = realrun.validate.pairs._measure, []

    def measure(pair, *rest):
        order.append(pair.named)
        return plain(pair, *rest)

    monkeypatch.setattr(realrun.validate.pairs, "_measure", measure)
    record = validate(asked(traces, tmp_path), "the command")
    rounds = [order[first : first + 4] for first in range(0, len(order), 4)]
    assert len(rounds) == REPEATS and all(set(one) == set(rounds[0]) and len(set(one)) == 4 for one in rounds)
    assert any(one != other for one, other in pairwise(rounds)), "each time in another order"
    data = json.loads((tmp_path / FILES[0]).read_text())
    assert data["complete"] and len(data["reports"]) == 4
    assert {report["trace"] for report in data["reports"]} == {"toy_law.npz", "toy_code.npz"}
    for report in data["reports"]:
        speeds = report["measured"]["settings"]["runs_tokens_per_s"]
        key = report["policy"], report["cache"], report["trace"]
        (row,) = [
            row for row in data["components"]
            if (row["policy"], row["cache"], row["trace"], row["component"]) == (*key, "throughput")
        ]  # fmt: skip
        assert row["runs"] == speeds and row["median"] == median(speeds) and row["measured"] == max(speeds)
        assert row["spread"] == pytest.approx((max(speeds) - min(speeds)) / median(speeds))
    assert data["summary"]["pairs"] == data["summary_of_medians"]["pairs"] == 4
    text = (tmp_path / FILES[2]).read_text()
    assert text.count("\n| lru |") == sum(report["policy"] == "lru" for report in data["reports"])
    assert "3 runs of each pair: throughput " in "\n".join(record.verdict())


def test_an_interruption_keeps_the_runs_that_were_over(traces, tmp_path, monkeypatch) -> None:
    plain, runs = realrun.validate.pairs._measure, []

    def measure(*arguments):
        runs.append(arguments[0].named)
        return plain(*arguments) if len(runs) < 6 else None

    monkeypatch.setattr(realrun.validate.pairs, "_measure", measure)
    record = validate(asked(traces, tmp_path), "x")
    assert not record.complete and len(record.reports) == 4
    counts = Counter(runs[:5])
    for report in record.reports:
        many = counts[f"{report['policy']} at {report['cache']} of {report['trace']}"]
        assert len(report["measured"]["settings"]["runs_tokens_per_s"]) == many
    assert not json.loads((tmp_path / FILES[0]).read_text())["complete"]


def test_drawn_pairs_are_simulated_again_on_their_own_traces(traces, tmp_path, capsys) -> None:
    first, other = map(str, traces)
    few = ["--policies", "lru", "fifo", "--hardware", "h200", "--device", "cpu", "--no-baseline", "--batch", "2"]
    few += ["--draw", "3", "--repeat", "2", "-o", str(tmp_path / "out")]
    assert main(["validate", first, other, *few]) == 0
    made = tmp_path / "out" / FILES[0]
    again = ["resimulate", str(made), other, first, "--hardware", "h200", "-o", str(tmp_path / "again")]
    assert main(again) == 0
    one, two = (json.loads(path.read_text()) for path in (made, tmp_path / "again" / FILES[0]))
    assert one["components"] == two["components"] and one["summary_of_medians"] == two["summary_of_medians"]
    text = capsys.readouterr()
    assert text.out.count("simulated against the runs of each pair") == 2
    assert main(["resimulate", str(made), first, "--hardware", "h200", "-o", str(tmp_path / "third")]) == 2
    assert f"{first}: not the trace of {made}, toy_code.npz of sha256" in capsys.readouterr().err


def test_a_profile_is_not_validated_on_what_it_was_calibrated_on(scenes, traces, tmp_path, capsys) -> None:
    fitted = scenes[0].hardware.changed(name="fitted", calibrated_on=[scenes[0].trace.sha256])
    refuse_calibrated_on(replace(scenes[1], hardware=fitted))
    with pytest.raises(InputError, match=r"toy_law\.npz: fitted was calibrated on it; expected another trace"):
        refuse_calibrated_on(replace(scenes[0], hardware=fitted))
    from sim.machine.hardware import hardware_text

    profile = tmp_path / "fitted.toml"
    profile.write_bytes(f'calibrated_on = ["{scenes[0].trace.sha256}"]\n'.encode() + hardware_text("h200"))
    options = ["--policies", "lru", "--hardware", str(profile), "--device", "cpu", "-o", str(tmp_path / "out")]
    assert main(["validate", *map(str, traces), *options]) == 2
    told = capsys.readouterr().err
    assert "toy_law.npz: h200 was calibrated on it" in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_all_policies_are_those_that_can_run(traces, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(realrun.validate.pairs, "open_rig", lambda *_, **__: pytest.fail("enough"))
    seen: list[str] = []
    monkeypatch.setattr(realrun.validate.pairs, "drawn", lambda _, able, *__: seen.extend(one.label for one in able))
    with pytest.raises(pytest.fail.Exception):
        validate(asked(traces, tmp_path, policies=["all"]), "x")
    assert "lru" in seen and "domoe" not in seen and set(seen) < set(every_policy())


def test_traces_of_other_models_are_refused(traces, tmp_path) -> None:
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(8), (9, 3, 1)), axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=8)
    trace.meta["model"] |= toy_meta(3)
    trace.save(tmp_path / "three.npz")
    with pytest.raises(InputError, match=r"three\.npz: of .*; expected .*, as the others"):
        validate(asked((traces[0], tmp_path / "three.npz"), tmp_path / "out"), "x")
