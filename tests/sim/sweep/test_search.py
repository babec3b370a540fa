"""A search finds what the whole grid has, asks for the same designs again, and picks up the rows that are there."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.sweep.answer import answer
from sim.sweep.log import Log
from sim.sweep.row import Row
from sim.sweep.run import carry_out
from sim.sweep.search import search
from sim.sweep.spec import spec_of
from sim.sweep.table import records
from sim.sweep.tasks import Batch
from sim.sweep.whole import sweep
from sim.sweep.workers import run_here
from tests.sim.sweep.test_log import Killed

pytest.importorskip("optuna")


def spec(trace: Path, **more: Any) -> Any:
    return spec_of({
        "run": {"trace": str(trace)},
        "vary": {
            "cache": "20%:90%:10%", "policy": ["lru", "lfu", "clairvoyant", "psychic"], "hardware.link.gbps": [5, 25],
        },
    } | more)  # fmt: skip


def test_a_search_finds_the_fastest_within_the_limits_and_no_reference(trace: Path, tmp_path: Path) -> None:
    space = spec(trace).space
    with Log(tmp_path) as log:
        every = carry_out(space.grid(1000), log, run_here)
        sizes = sorted(one["gpu_needed_bytes"] for one in records(log, every) if one["status"] == "ok")
        limits = {"gpu_needed_bytes": float(sizes[len(sizes) // 2])}
        best = answer(records(log, every), limits).fastest[0]
        asked = search(space, ["tokens_per_s"], limits, 48, 0, log, run_here)
        found = answer(records(log, asked), limits).fastest[0]
        assert len({key for key, _ in asked}) == len(asked) < len(every)
    assert found["tokens_per_s"] == best["tokens_per_s"] and not found["reference"]
    assert found["gpu_needed_bytes"] <= limits["gpu_needed_bytes"]


@pytest.mark.parametrize("goals", [["tokens_per_s"], ["tokens_per_s", "gpu_needed_bytes"]])
def test_an_interrupted_search_asks_again_and_runs_only_what_is_missing(
    trace: Path, tmp_path: Path, goals: list[str]
) -> None:
    space = spec(trace).space
    run: list[str] = []

    def counted(batches: Sequence[Batch]) -> Iterator[Row]:
        for row in run_here(batches):
            if len(run) == 20:
                run.append("the end")
                raise Killed
            run.append(row.key)
            yield row

    with Log(tmp_path / "whole") as log:
        whole = [key for key, _ in search(space, goals, {}, 40, 1, log, run_here)]
    with Log(tmp_path / "parts") as log, pytest.raises(Killed):
        search(space, goals, {}, 40, 1, log, counted)
    with Log(tmp_path / "parts") as log:
        assert [key for key, _ in search(space, goals, {}, 40, 1, log, counted)] == whole
    assert len(run) - 1 == len(set(run) - {"the end"}), "no design is run twice"


def test_a_front_is_what_no_other_design_beats_in_all(trace: Path, tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        every = carry_out(spec(trace).space.grid(1000), log, run_here)
        rows = [one for one in records(log, every) if one["status"] == "ok" and not one["reference"]]
        front = {one["identity"] for one in answer(records(log, every), {}).front}
    worth = {
        one["identity"]: (one["tokens_per_s"], -one["gpu_needed_bytes"], -one["ttft_mean_ms"], -one["tpot_p99_ms"])
        for one in rows
    }
    beaten = {
        mine
        for mine, a in worth.items()
        if any(b != a and all(y >= x for x, y in zip(a, b, strict=True)) for b in worth.values())
    }
    assert front <= worth.keys() - beaten
    assert {worth[one] for one in front} == {worth[one] for one in worth.keys() - beaten}


def test_goals_of_a_sweep_file_say_what_the_front_is_over(trace: Path, tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        two = sweep(spec(trace, goals=["tokens_per_s", "gpu_needed_bytes"], limits={"fits": False}), log, run_here)
        usual = sweep(spec(trace, limits={"fits": False}), log, run_here)
    rows = two.answer.front
    assert len(rows) <= len(usual.answer.front)
    by_size = sorted(rows, key=lambda one: one["gpu_needed_bytes"])
    speeds = [one["tokens_per_s"] for one in by_size]
    assert speeds == sorted(speeds) and len({one["gpu_needed_bytes"] for one in rows}) == len(rows), "a staircase"
