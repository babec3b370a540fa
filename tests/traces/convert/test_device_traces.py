"""Runs that other people measured: the simulator must find what the device found before anything else is believed."""

import csv
from pathlib import Path

import numpy as np
import pytest

from ground.errors import InputError
from sim.log import MISS
from sim.policies import policy_classes
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from tests.support.records import published
from tests.support.runs import simpy_run
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.convert.kinds import convert_file
from traces.schema import DECODE

RUNS = {"qwen3_30b_device": ("4000MiB", 74.9, 0.005), "gpt_oss_120b_device": ("3000MiB", 32.4, 0.001)}
"""Budget of the device's cache, the hit rate at which it ended (%), and how far the bytes that it read may be off."""


@pytest.mark.parametrize("name", RUNS)
def test_hit_rate_of_a_device(name: str, tmp_path: Path) -> None:
    cache, percent, _ = RUNS[name]
    path = tmp_path / f"{name}.npz"
    convert_file(published(f"{name}.npz"), path)
    report = replay(scene(path, cache=cache, split="all"), "lru")
    phases = (report.prefill, report.decode)
    ratio = sum(c.hits for c in phases) / sum(c.lookups for c in phases)
    assert 100 * ratio == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize("name", RUNS)
def test_bytes_read_by_a_device(name: str, tmp_path: Path) -> None:
    cache, _, tolerance = RUNS[name]
    with published(f"{name}_metrics.csv").open(encoding="utf-8") as text:
        measured = [int(row["read_bytes"]) for row in csv.DictReader(text) if row["read_bytes"]]
    path = tmp_path / f"{name}.npz"
    convert_file(published(f"{name}.npz"), path)
    here = scene(path, cache=cache, split="all")
    log = simpy_run(here.work, prepare(here, "lru").plan, here.budget).log()
    read = np.where(log.found == MISS, here.work.lookup_bytes, 0)
    step = here.work.call // here.work.n_layers
    simulated = np.bincount(step, read, here.work.schedule.n_steps)[here.work.schedule.phase == DECODE]
    assert len(simulated) == len(measured)
    assert simulated.sum() == pytest.approx(sum(measured), rel=tolerance)
    assert np.corrcoef(simulated, measured)[0, 1] > 0.999


def test_conformance_of_lru_by_events(tmp_path: Path) -> None:
    # One pool of two slots a layer, recency updated when all experts of an event have been served: the file says what
    # every event hit and missed.
    with published("conformance_event_atomic_lru.csv").open(encoding="utf-8") as text:
        events = list(csv.DictReader(text))
    steps = 1 + max(int(e["scheduler_step"]) for e in events)
    routes = np.full((steps, 3, 2), -1)
    for event in events:
        taken = [int(e) for e in event["requested_experts"].split()]
        routes[int(event["scheduler_step"]), int(event["layer"]), : len(taken)] = taken
    trace = make_trace(routes, n_experts=4)
    config = toy_meta(3)["config"] | {"num_local_experts": 4}
    trace.meta["model"]["config"] = config
    path = tmp_path / "toy.npz"
    trace.save(path)
    here = scene(path, cache="6")
    plan = prepare(here, "lru", {"scope": "layer"}).plan
    log = simpy_run(here.work, plan, here.budget).log()
    missed = np.add.reduceat(log.found == MISS, here.work.offsets[:-1])
    assert missed.tolist() == [int(e["misses"]) for e in events]
    assert (np.diff(here.work.offsets) - missed).tolist() == [int(e["hits"]) for e in events]
    assert (int((log.found != MISS).sum()), int((log.found == MISS).sum())) == (12, 18)


@pytest.mark.parametrize("name", ["deepseek_v2_lite_esft_law", "qwen3_30b_device"])
def test_traces_without_embeddings_run_under_every_policy_that_needs_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.npz"
    whole = convert_file(published(f"{name}.npz"), tmp_path / "whole.npz")
    rows = np.flatnonzero(whole.sequence == 0)[:40]
    model = whole.meta["model"]["name"]
    small = make_trace(
        whole.experts[rows], n_experts=whole.n_experts, phase=whole.phase[rows], layers=whole.layers, name=model
    )
    small.save(path)
    here = scene(path, split="all")
    for policy, kind in policy_classes().items():
        if kind.needs:
            with pytest.raises(InputError, match=f"no array {min(kind.needs)}"):
                replay(here, policy)
        elif kind.learns:
            with pytest.raises(InputError, match="learns from a profile split"):
                replay(here, policy)
        else:
            assert replay(here, policy).decode.lookups > 0
