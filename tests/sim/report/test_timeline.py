"""Timelines: what is drawn is what happened, and a file appears whole or not at all."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from sim.plan import Plan
from sim.report.timeline import timeline
from tests.support.runs import simpy_run
from tests.support.worlds import MS, PLANS_TAKE_LONG, World, digest, handmade, planned, run_of

TRACKS = {"steps": 1, "GPU compute": 2, "GPU stall": 3, "link (host to GPU)": 4, "requests": 5, "evictions": 6}


def drawn(path: Path, world: World, plan: Plan) -> tuple[list[dict[str, Any]], Any]:
    with timeline(path, world.work.n_layers, world.work.n_experts) as observer:
        log = run_of(world, plan, observer).log()
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as text:
        data = json.load(text)
    assert data["displayTimeUnit"] == "ms"
    return data["traceEvents"], log


def test_a_run_by_hand(tmp_path: Path) -> None:
    # Two slots of two layers: 0 and 1 of layer 0 take turns, so one leaves.
    work = handmade([[[0], [0]], [[1], [0]]], 2, layer_ns=MS, expert_ns=2 * MS)
    path = tmp_path / "run.json"
    with timeline(path, 2, 2) as observer:
        simpy_run(work, Plan(), 2_000_000, observer=observer).log()
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == set(TRACKS)
    link = [(e["ts"], e["dur"], e["name"]) for e in events if e.get("tid") == 4 and e["ph"] == "X"]
    # In microseconds: 0 is copied at 1 ms, layer 1's 0 at 14 ms, then 1 of layer 0 at 27 ms.
    assert link == [
        (1000, 10_000, "demand L0 e0"),
        (14_000, 10_000, "demand L1 e0"),
        (27_000, 10_000, "demand L0 e1"),
    ]
    stalls = [e["name"] for e in events if e.get("tid") == 3 and e["ph"] == "X"]
    assert stalls == ["stall (demand) L0 e0", "stall (demand) L1 e0", "stall (demand) L0 e1"]
    gone = [(e["ts"], e["name"], e["args"]) for e in events if e.get("tid") == 6 and e["ph"] == "i"]
    assert gone == [(27_000, "evict L0 e0", {"for": "L0 e1"})]
    steps = [(e["ts"], e["dur"], e["name"]) for e in events if e.get("tid") == 1 and e["ph"] == "X"]
    assert steps == [(0, 26_000, "decode (step 0)"), (26_000, 16_000, "decode (step 1)")]


@given(planned())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, *PLANS_TAKE_LONG])
def test_slices_of_a_track_do_not_overlap_and_watching_changes_nothing(
    tmp_path: Path, case: tuple[World, str, Plan]
) -> None:
    world, _, plan = case
    events, log = drawn(tmp_path / "any.json.gz", world, plan)
    assert digest(log) == digest(run_of(world, plan).log())
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= ends[event["tid"]] - 1e-6
            ends[event["tid"]] = event["ts"] + event["dur"]
    assert ends[TRACKS["steps"]] == pytest.approx(log.finish[-1] / 1e3)
    steps = [e for e in events if e.get("tid") == TRACKS["steps"] and e["ph"] == "X"]
    assert len(steps) == world.work.schedule.n_steps


def test_a_failed_run_leaves_no_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(RuntimeError, match="stop"), timeline(path, 1, 1):
        raise RuntimeError("stop")
    assert path.read_text(encoding="utf-8") == "old"
    with pytest.raises(RuntimeError, match="stop"), timeline(tmp_path / "new.json.gz", 1, 1):
        raise RuntimeError("stop")
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]


def test_equal_runs_give_equal_bytes_whenever_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = []
    for number, now in enumerate((1e9, 2e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        path = tmp_path / f"{number}.json.gz"
        with timeline(path, 2, 2) as observer:
            simpy_run(handmade([[[0], [0]]], 2), Plan(), 2_000_000, observer=observer).log()
        whole.append(path.read_bytes())
    assert whole[0] == whole[1]
    assert json.loads(gzip.decompress(whole[0]))
