"""The benchmark of a sweep: how many of what it measures, on a trace that takes a moment."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sim.bench import regrouping, sweeps
from sim.sweep.workers import run_here
from tests.support.replays import reported


def test_it_sweeps_every_combination_and_leaves_nothing(
    trace: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:

    monkeypatch.setattr(sweeps, "local_workers", lambda count: nullcontext(run_here))
    monkeypatch.setattr(sweeps, "POLICIES", ("lru", "previous-token"))
    monkeypatch.setattr(sweeps, "SIZES", 2)
    monkeypatch.setattr(sweeps, "LINKS", 3)
    found = reported(said, "bench", "--sweep", trace, "--workers", 3)["sweep"]
    assert (found["designs"], found["workers"]) == (2 * 2 * 3, 3)
    assert found["designs_per_s"] == pytest.approx(found["designs"] / found["seconds"])


def test_it_measures_how_long_a_split_takes(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setattr(regrouping, "SHAPES", {"one": (2, 4, 1)})
    rows = reported(said, "bench", "--regroup")["regrouping"]
    assert [(row["batch"], row["tokens"]) for row in rows] == [(4, 8), (8, 16), (16, 32), (32, 64)]
    assert all(0 < row["median_ms"] <= row["p90_ms"] for row in rows)
    status, _, err = said("bench", "--regroup", "--sweep", "any.npz")
    assert (status, err.count("\n")) == (2, 1)
    assert "expected one of the two" in err
