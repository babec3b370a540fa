"""Reports: times in closed form, counters recomputed, and JSON that any reader takes."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

from sim.bounds import bounds
from sim.log import HOSTED
from sim.plan import Plan, Prediction, Requests
from sim.report.metrics import Report, Spread, report
from sim.workload import Workload, batched, workload
from tests.sim.run.test_cache import CYC
from tests.support.runs import simpy_run
from tests.support.strategies import make_trace
from tests.support.worlds import (
    MS,
    PLANS_TAKE_LONG,
    REPORT_FIELDS,
    World,
    handmade,
    planned,
    run_of,
    toy_machine,
    toy_model,
)
from traces.schema import DECODE, PREFILL

SIZE = 1_000_000
GBPS = SIZE / (10 * MS)  # bytes a nanosecond of the handmade link: 1 MB in 10 ms
ABOUT: dict[str, Any] = {
    "policy": "p", "parameters": {}, "gpu_bytes": {}, "clock": "simulated", "provenance": {}, "settings": {},
    "notes": [],
}  # fmt: skip


def told(work: Workload, plan: Plan, slots: int, **about: Any) -> Report:
    """The report of a handmade run with slots of 1 MB."""
    log = simpy_run(work, plan, slots * SIZE).log()
    return report(work, log, bounds(work, slots * SIZE, GBPS * 1e9), **(ABOUT | about))


def cycle(**costs: int) -> Workload:
    return handmade([[[e]] for e in CYC], 3, **costs)


# -- closed forms ------------------------------------------------------------------------------------------------------


def test_cycle_under_lru() -> None:
    # 12 uses of 1 ms, 10 ms a copy. Two slots: every use waits. Three: only the first three do.
    assert simpy_run(cycle(expert_ns=MS), Plan(), 2 * SIZE).log().finish[-1] == 132 * MS
    assert simpy_run(cycle(expert_ns=MS), Plan(), 3 * SIZE).log().finish[-1] == 42 * MS


def test_nothing_runs_on_after_the_last_step() -> None:
    # A prefetch of 300 s is under way when 2 s of work end: the run ends with the work.
    work = handmade([[[0], []], [[0], []]], 1, layer_ns=500 * MS, copy_ns=[0, 300_000 * MS])
    plan = Plan(requests=Requests.build(np.array([0]), np.array([3]), np.array([1])), discipline="demand-first")
    result = told(handmade([[[], []], [[], []]], 1, layer_ns=500 * MS, copy_ns=300_000 * MS), plan, 4)
    assert result.run_ms == 2000
    assert result.decode.prefetches["in_flight"] == 1
    assert simpy_run(work, Plan(), 4 * SIZE).log().finish[-1] == 2000 * MS


def test_without_compute_speed_is_bandwidth_over_bytes() -> None:
    result = told(cycle(), Plan(keep=False), 1)
    assert result.tokens_per_s == GBPS * 1e9 / SIZE == 100
    assert result.decode.time_ms == {
        "compute": 0,
        "stall_demand": 120,
        "stall_late": 0,
        "stall_host": 0,
        "predict": 0,
        "other": 0,
    }
    assert result.bounds["compute_tokens_per_s"] is None, "nothing to compute"
    assert result.efficiency == 1, "one slot: nobody could move less"


def test_launching_experts_that_are_there_takes_time_that_nobody_computes() -> None:
    # Two steps of one call: in two slots the second finds both experts.
    work = dataclasses.replace(handmade([[[0, 1]], [[0, 1]]], 2, layer_ns=MS, expert_ns=MS), launch_ns=4 * MS)
    found = told(work, Plan(), 2).decode
    assert found.time_ms["other"] == 4, "the first step waits for both, and what waits is launched meanwhile"
    assert told(work, Plan(keep=False), 2).decode.time_ms["other"] == 0
    assert told(work, Plan(everything_resident=True), 2).decode.time_ms["other"] == 8
    # A resident expert and its launch run beside the copy of the other one: 1 + 10 + 1 ms.
    mixed = dataclasses.replace(handmade([[[0]], [[0, 1]]], 2, layer_ns=MS, expert_ns=MS), launch_ns=4 * MS)
    assert np.diff(simpy_run(mixed, Plan(), 2 * SIZE).log().finish).tolist() == [12 * MS]


def test_an_expert_that_is_waited_for_runs_alone_and_takes_longer() -> None:
    work = handmade([[[0, 1]], [[0, 1]]], 2, layer_ns=MS, expert_ns=MS)
    work = dataclasses.replace(work, awaited_ns=np.full(4, 4 * MS))
    # The first runs while the second is copied: 1 + 10 + 10 + 1 + 3 ms; then both are there: 1 + 1 + 1 ms.
    assert simpy_run(work, Plan(), 2 * SIZE).log().finish.tolist() == [25 * MS, 28 * MS]
    found = told(work, Plan(), 2).decode.time_ms
    assert (found["stall_demand"], found["compute"], found["other"]) == (10 + 6, 1 + 4 + 4 + 1 + 1 + 1, 0)


def test_experts_that_run_apart_from_others_of_their_token_take_longer() -> None:
    work = handmade([[[0]], [[0, 1]], [[0, 1]]], 2, layer_ns=MS, expert_ns=MS)
    work = dataclasses.replace(work, split_wave_ns=np.array([0, 5 * MS, 0]))
    # Waited for; there without the other one, which is waited for, 1 + 10 + 1 ms, beside the copy; both there.
    assert np.diff(simpy_run(work, Plan(), 2 * SIZE).log().finish, prepend=0).tolist() == [12 * MS, 12 * MS, 3 * MS]
    alone = handmade([[[0]], [[0]]], 2, layer_ns=MS, expert_ns=MS)
    alone = dataclasses.replace(alone, split_wave_ns=work.split_wave_ns)
    assert told(alone, Plan(), SIZE).decode.time_ms["other"] == 5
    several = dataclasses.replace(alone, tokens=np.array([2, 2]))
    assert told(several, Plan(), SIZE).decode.time_ms["other"] == 0, "those of several rows run one by one anyway"


def test_an_expert_that_is_waited_for_is_launched_meanwhile() -> None:
    # 2 ms are there, 1 ms with the launch before it. 1 + 10 + 10 + 1 ms, then 1 + 2 + 2 ms.
    work = handmade([[[0, 1]], [[0, 1]]], 2, layer_ns=MS, expert_ns=2 * MS)
    work = dataclasses.replace(work, awaited_ns=np.full(4, MS))
    assert simpy_run(work, Plan(), 2 * SIZE).log().finish.tolist() == [22 * MS, 27 * MS]
    found = told(work, Plan(), 2)
    assert found.decode.time_ms["compute"] == 1 + 2 + 1 + 4 and found.decode.time_ms["other"] == 0
    assert found.bounds["compute_tokens_per_s"] == 1000 / 3, "whoever waits for all of them computes less"


@pytest.mark.parametrize(
    ("layer_ms", "asked", "slots", "finish_ms", "other_ms"),
    [
        (4, [], 2, 4 + 4 + 10, 0),  # nothing moves before the demand
        (4, [2], 2, 7 + 7, 6),  # the copy takes from 0 to 10: both layers begin meanwhile
        (7, [2], 2, 10 + 7, 3),  # the second begins as it lands
        (9, [2], 2, 12 + 9, 3),  # the link is idle again
        (7, [2, 3], 2, 10 + 10, 6),  # another copy begins as the first lands
        (9, [2, 3], 1, 12 + 9, 3),  # another is asked for and has no room, so nothing moves
    ],
)
@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_a_layer_takes_longer_if_a_copy_is_under_way_as_it_begins(
    layer_ms: int, asked: list[int], slots: int, finish_ms: int, other_ms: int, phase: int
) -> None:
    # The first of two layers needs nothing, the second expert 2, which takes no time.
    work = handmade([[[], [0]]], 2, layer_ns=layer_ms * MS, phase=[phase])
    work = dataclasses.replace(work, beside_copy_ns=3 * MS)
    requests = Requests.build(np.zeros(len(asked), np.int64), np.ones(len(asked), np.int64), np.array(asked, np.int64))
    result = told(work, Plan(requests=requests), slots)
    assert result.run_ms == finish_ms
    assert (result.decode if phase == DECODE else result.prefill).time_ms["other"] == other_ms


def test_everything_resident_is_the_compute_bound() -> None:
    work = cycle(layer_ns=3 * MS, expert_ns=2 * MS, head_ns=MS)
    result = told(work, Plan(everything_resident=True), 3)
    assert result.tokens_per_s == result.bounds["compute_tokens_per_s"] == 1000 / 6
    assert result.run_ms == 12 * 6
    assert result.tpot_ms == Spread(6, 6, 6, 6)


def test_efficiency_is_the_larger_bound_over_the_run() -> None:
    result = told(cycle(expert_ns=MS), Plan(), 2)
    # MIN hits 5 of 12 with two slots: 7 loads of 10 ms, more than 12 ms of compute.
    assert result.efficiency == pytest.approx(70 / 132, abs=1e-12)
    # Decode begins warm: two loads less.
    assert result.bounds["link_tokens_per_s"] == pytest.approx(12 / 0.05)


# -- TTFT and TPOT -----------------------------------------------------------------------------------------------------


def test_prefill_is_ttft_and_not_decode_speed() -> None:
    work = handmade([[[0]]] * 10, 1, phase=[0] + [1] * 9, expert_ns=10 * MS, copy_ns=90 * MS)
    result = told(work, Plan(), 1)
    assert result.ttft_ms == Spread(100, 100, 100, 100)
    assert result.tpot_ms == Spread(10, 10, 10, 10)
    assert result.tokens_per_s == 100
    assert (result.decode.tokens, result.prefill.tokens) == (9, 1)
    assert (result.decode.misses, result.prefill.misses) == (0, 1)


def test_a_trace_without_prefill_has_no_ttft_and_without_decode_no_tpot() -> None:
    assert told(cycle(), Plan(), 2).ttft_ms == Spread(None, None, None, None)
    only = told(handmade([[[0]]], 1, phase=[0]), Plan(), 1)
    assert only.tpot_ms == Spread(None, None, None, None)
    assert only.tokens_per_s is None
    assert only.decode.hit_ratio is None
    assert set(only.bounds.values()) == {None}


def test_percentiles() -> None:
    ns = np.arange(1, 101) * MS
    assert Spread.of(ns) == Spread(50.5, pytest.approx(50.5), pytest.approx(95.05), pytest.approx(99.01))


def test_a_sequence_that_waits_for_another_prefill_pays_in_time_between_tokens() -> None:
    # Two sequences decode together: 0 prefills (20 ms), 1 prefills (20 ms), then both decode (10 ms).
    trace = make_trace([[0]] * 4, n_experts=1, sequence=[0, 0, 1, 1], phase=[0, 1, 0, 1])
    model, machine = toy_model(1, 1, 1, (SIZE,)), toy_machine()
    work = workload(trace, model, machine, batched(trace, 2))
    log = run_of(World(trace, model, machine, 2, work, SIZE), Plan(everything_resident=True)).log()
    result = report(work, log, bounds(work, SIZE, 1e9), **ABOUT)
    first, second, both = (log.finish / 1e6).tolist()
    assert result.ttft_ms.mean == pytest.approx((first + (second - first)) / 2)
    assert result.tpot_ms.mean == pytest.approx(((both - first) + (both - second)) / 2)
    assert result.decode.tokens == 2


# -- phases ------------------------------------------------------------------------------------------------------------


def test_prefill_streams_each_expert_once_and_token_by_token_reloads() -> None:
    # Four tokens of one layer take 0, 1, 2, 0 with one slot: together three copies, one after another four.
    together = told(handmade([[[0, 1, 2]]], 3, phase=[0]), Plan(), 1)
    assert together.prefill.link_bytes["demand"] == 3 * SIZE
    apart = told(handmade([[[0]], [[1]], [[2]], [[0]]], 3), Plan(), 1)
    assert apart.decode.link_bytes["demand"] == 4 * SIZE


@given(planned())
@settings(max_examples=80, suppress_health_check=PLANS_TAKE_LONG)
def test_a_report_is_the_log_in_other_words(case: tuple[World, str, Plan]) -> None:
    world, name, plan = case
    log = run_of(world, plan).log()
    assume(log.finish[-1] > 0)  # coarse costs may all be 0
    work = world.work
    bound = None if plan.host else world.bounds()
    result = report(work, log, bound, **(ABOUT | {"policy": name}))
    for counts, phase in ((result.prefill, PREFILL), (result.decode, DECODE)):
        assert counts.lookups == counts.hits + counts.late + counts.misses
        assert counts.hits == counts.reuse_hits + counts.prefetch_hits
        assert counts.late == counts.late_queued + counts.late_in_flight
        fate = counts.prefetches
        assert fate["issued"] == sum(fate[k] for k in ("useful", "late", "unused", "cancelled", "in_flight"))
        calls = work.n_layers * int((work.schedule.phase == phase).sum())
        assert 0 <= counts.time_ms["other"] <= work.beside_copy_ns * calls / 1e6
        assert counts.activations == int((world.trace.experts[world.trace.phase == phase] >= 0).sum())
        assert counts.tokens == int((world.trace.phase == phase).sum())
        assert counts.compulsory_misses <= counts.misses
        assert counts.link_bytes["wasted"] <= counts.link_bytes["prefetch"]
    one, other, both = (c.columns() for c in (result.prefill, result.decode, result.total))
    sums = [name for name in both if not name.endswith("_ratio")]
    assert [both[name] for name in sums] == pytest.approx([one[name] + other[name] for name in sums])
    assert result.total.hit_ratio == (both["hits"] / both["lookups"] if both["lookups"] else None)
    assert sum(result.total.time_ms.values()) == pytest.approx(result.run_ms)
    frame = result.to_frame().set_index("phase")
    for phase, counts in (("prefill", one), ("decode", other)):
        row = frame.loc[phase, list(counts)].to_dict()
        assert {name: None if value != value else value for name, value in row.items()} == counts
    assert result.run_ms == log.finish[-1] / 1e6
    assert sum(row["lookups"] for row in result.per_layer) == result.decode.lookups
    assert sum(row["misses"] for row in result.per_layer) == result.decode.misses
    assert sum(row["hits"] for row in result.per_layer) == result.decode.hits
    if plan.host:
        assert result.efficiency is None and set(result.bounds.values()) == {None}
        assert result.total.hosted == int((log.found == HOSTED).sum())
        assert 0 <= result.total.uploaded - (result.total.misses - result.total.hosted) <= result.total.hosted
    else:
        assert result.efficiency <= 1 + 1e-9 or plan.everything_resident
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["lookups"] == result.decode.lookups


def test_json_is_strict_and_has_what_a_report_promises() -> None:
    counts = [np.int64(3)]
    data = told(
        cycle(expert_ns=MS),
        Plan(prediction=Prediction(np.array([0]), np.array([MS]))),
        2,
        provenance={"trace": "t", "seed": int(counts[0])},
        gpu_bytes={"experts": 1, "resident_model": 2, "policy": 3, "kv": 4},
    ).to_json()
    json.dumps(data, allow_nan=False)
    assert set(data) >= REPORT_FIELDS
    assert set(data["link_bytes"]) == {"demand", "prefetch", "wasted"}
    assert set(data["prefetches"]) == {"issued", "useful", "late", "unused", "cancelled", "in_flight"}
    assert set(data["ttft_ms"]) == set(data["tpot_ms"]) == {"mean", "p50", "p95", "p99"}
    assert set(data["time_ms"]) == {"compute", "stall_demand", "stall_late", "stall_host", "predict", "other"}
    bounds = {"compute_tokens_per_s", "link_tokens_per_s", "min_hit_ratio", "loop_share", "joint_tokens_per_s"}
    assert set(data["bounds"]) == bounds
    assert data["time_ms"]["predict"] == 1
    assert data["ttft_ms"]["mean"] is None, "undefined is null, never NaN"
