"""Real runs, on the CPU as a device: the simulator's decisions, the right bytes, the same outputs."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from realrun.device.faults import RunError
from realrun.engine.compiled_run import CompiledRun
from realrun.engine.portions import AT_ONCE, SEVERAL_AT_ONCE, few_rows, portions
from realrun.engine.replay_loop import RealRun
from sim.compiled import driven
from sim.log import HOSTED, MISS
from sim.plan import Plan, Prediction, Requests
from tests.support.real_worlds import (
    ALL_RESIDENT,
    KINDS,
    SIZE,
    chain,
    free_slots,
    real_plans,
    real_run,
    real_world,
    real_worlds,
    run_on_cpu,
    slots_of,
    staged,
)
from tests.support.strategies import make_trace
from tests.support.worlds import World, run_of
from traces.schema import DECODE, PREFILL

torch.set_num_threads(1)
FEW = settings(max_examples=25)
DEMAND_ONLY: list[tuple[str, dict]] = [
    ("lru", {}), ("lru", {"scope": "layer"}), ("lfu", {}), ("lfu", {"counts": "always"}), ("fifo", {}),
    ("on-demand", {}),
]  # fmt: skip


@FEW
@given(real_worlds(), st.sampled_from(DEMAND_ONLY), st.sampled_from(KINDS))
def test_on_demand_a_real_run_finds_what_the_simulator_finds(
    world: World, policy: tuple[str, dict], kind: type[RealRun]
) -> None:  # fmt: skip
    plan = world.plan(*policy)
    world = world.with_room(plan)
    simulated, measured = run_of(world, plan).log(), run_on_cpu(world, plan, check=True, kind=kind).log
    assert measured.found.tolist() == simulated.found.tolist()
    assert measured.counters.evictions == simulated.counters.evictions
    assert measured.counters.demand_bytes == simulated.counters.demand_bytes


@FEW
@given(real_plans(), st.sampled_from(KINDS))
def test_whatever_a_plan_asks_for_the_right_experts_compute(planned: tuple[World, Plan], kind: type[RealRun]) -> None:
    world, plan = planned
    with staged(world) as (rig, predictions):
        run = real_run(world, plan, rig, predictions, kind, check=True, keep_outputs=True)
        outcome = run.execute()
        resident = real_run(world, ALL_RESIDENT, rig, predictions, keep_outputs=True).execute()
        for expert, slot in slots_of(run, resident=True).items():
            assert torch.equal(run.cache.bytes[slot], rig.store.expert(expert))
    assert outcome.complete
    assert outcome.checked == int((outcome.log.found != HOSTED).sum())
    assert len(outcome.outputs) == world.work.schedule.n_steps
    for mine, whole in zip(outcome.outputs, resident.outputs, strict=True):
        assert torch.equal(mine, whole)


@FEW
@given(real_plans(), st.sampled_from([1, 2, 32]), st.sampled_from(KINDS))
def test_nothing_is_lost_or_made_up(planned: tuple[World, Plan], at_once: int, kind: type[RealRun]) -> None:
    world, plan = planned
    with staged(world) as (rig, predictions), pytest.MonkeyPatch.context() as patch:
        patch.setattr("realrun.engine.loop.REQUESTS_AT_ONCE", at_once)
        run = real_run(world, plan, rig, predictions, kind)
        outcome = run.execute()
    c, log = outcome.log.counters, outcome.log
    assert len(log.found) == len(world.work.expert)
    ended = np.array([c.useful, c.late, c.unused, c.cancelled, c.in_flight]).sum(0)
    assert ended.tolist() == c.issued
    moved = sum(c.demand_bytes) + sum(c.prefetch_bytes)
    loads = moved / max(world.work.expert_bytes)
    assert loads >= int((log.found == MISS).sum()) - 1e-9
    assert np.all(np.diff(log.finish) > 0) and log.finish[0] > 0
    for ns in (outcome.layer_ns, outcome.head_ns):
        assert (ns > 0).all()
    assert sorted([*slots_of(run).values(), *free_slots(run)]) == list(range(run.cache.n_slots))


@pytest.mark.parametrize("before", [False, True])
def test_a_plan_says_whether_its_decisions_stand_before_the_look_up(before: bool, monkeypatch) -> None:
    world = real_world(make_trace(np.array([[[0], [1]]] * 2), n_experts=2), slots=2)
    happened: list[str] = []

    def noted(what: str, method: Any) -> Any:
        return lambda *given, **more: (happened.append(what), method(*given, **more))[1]

    monkeypatch.setattr(CompiledRun, "_ask", noted("asked", CompiledRun._ask))
    monkeypatch.setattr(driven, "begin_call", noted("looked up", driven.begin_call))
    prediction = Prediction(np.array([1, 4]), np.array([1000, 0]), before_demands=before)
    run_on_cpu(world, Plan(prediction=prediction))
    decided, other = ["asked", "looked up"] if before else ["looked up", "asked"], ["looked up"]
    assert happened == (decided + other) * 2


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_requests_that_are_put_off_are_made_before_the_next_look_up(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr("realrun.engine.loop.REQUESTS_AT_ONCE", at_once)
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(16), (4, 2, 1)), axis=2)[:, :, :2]
    world = real_world(make_trace(routes, n_experts=16), slots=32)
    # At the first moment, before anything is there: every expert, for the last call of its layer.
    every = np.arange(32)
    last_step = world.work.schedule.n_steps - 1
    asked = Requests.build(np.zeros(32, np.int64), last_step * 2 + every // 16, every, every)
    log = run_on_cpu(world, Plan(requests=asked), check=True).log
    assert sum(log.counters.issued) == 32 and not (log.found == MISS).any()


MANY = 100
"""Requests of one moment, more than are made at once."""
PUT_OFF: dict[str, tuple[list, int, dict, list[int], int, int]] = {
    # routes, experts, phases, asked in this order, at moment, for call
    "one of what is there is asked for last": ([[[MANY - 1]], [[MANY - 1]]], 1, {}, list(range(MANY)), 2, 1),
    "before the next step": ([[[0]], [[1]]], 4, {"phase": [0, 1]}, list(range(MANY)), 1, 1),
    "one that is dropped meanwhile": ([[[99]], [[98]], [[97]]], 2, {}, [*range(64), 99], 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", PUT_OFF)
def test_requests_that_are_put_off_change_nothing_that_time_does_not_decide(case: str) -> None:
    routes, slots, phases, asked, moment, call = PUT_OFF[case]
    world = real_world(make_trace(routes, n_experts=MANY, **phases), slots=slots)
    requests = Requests.build(np.full(len(asked), moment), np.full(len(asked), call), np.array(asked), np.arange(len(asked)))  # fmt: skip  # noqa: E501
    plan = Plan(requests=requests, keep="dropped" not in case)
    simulated, measured = run_of(world, plan).log(), run_on_cpu(world, plan, check=True).log
    assert measured.counters.issued == simulated.counters.issued
    if slots == 1:
        assert measured.found.tolist() == simulated.found.tolist()


def test_a_layer_that_streams_comes_after_what_was_asked_for_before() -> None:
    world = real_world(make_trace([[[0], [0]], [[1], [1]]], n_experts=MANY, phase=[0, 1]), slots=4)
    every = np.arange(2 * MANY - 1, MANY - 1, -1)
    requests = Requests.build(np.full(MANY, 1), np.full(MANY, 1), every, np.ones(MANY, np.int64))
    plan = Plan(requests=requests, stream_prefill=True)
    with staged(world) as (rig, predictions):
        run = real_run(world, plan, rig, predictions, RealRun)
        order: list[int] = []
        plain = run.link._new

        def new(expert: int, prefetch: bool, priority: int) -> Any:
            if prefetch:
                order.append(expert)
            return plain(expert, prefetch, priority)

        run.link._new = new  # type: ignore[method-assign]
        run.execute()
    assert order[:MANY] == [expert for expert in every.tolist() if expert in order][:MANY]
    assert order[: MANY // 2] == every[: MANY // 2].tolist()


def test_a_stopped_run_counts_a_late_prefetch_once() -> None:
    world = real_world(chain([0, 1, 2, 3], n_experts=4), slots=2)
    requests = Requests.build(np.array([0]), np.array([0]), np.array([0]), np.array([0]))
    with staged(world) as (rig, predictions):
        device: Any = rig.device
        move = device.move
        device.move = lambda *parts: (device.copies.delay(0.5), move(*parts))
        late = lambda: run.link.arrays["counts"]["late"].sum() > 0  # noqa: E731
        run = real_run(world, Plan(requests=requests), rig, predictions, stop=late)
        outcome = run.execute()
    c = outcome.log.counters
    assert not outcome.complete
    ended = np.array([c.useful, c.late, c.unused, c.cancelled, c.in_flight]).sum(0)
    assert ended.tolist() == c.issued and sum(c.late) == 1


def test_outputs_are_those_of_a_resident_run_however_slow_copies_are() -> None:
    """Seen in ROCm/pytorch#3194, meta-pytorch/torchrec#4231:
    a slot was read before the copying stream had written it.
    """
    world = real_world(make_trace(np.random.default_rng(0).permuted(np.tile(np.arange(6), (5, 2, 1)), axis=2)[:, :, :2], n_experts=6), slots=4)  # fmt: skip  # noqa: E501
    with staged(world) as (rig, predictions):
        device: Any = rig.device
        resident = real_run(world, ALL_RESIDENT, rig, predictions, keep_outputs=True).execute()
        move = device.move
        device.move = lambda *parts: (device.copies.delay(0.002), move(*parts))
        slow = real_run(
            world, world.plan("previous-token"), rig, predictions, check=True, keep_outputs=True
        ).execute()
    assert all(map(torch.equal, slow.outputs, resident.outputs))
    assert int(slow.log.stall_demand.sum()) > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_experts_without_tokens_are_neither_fetched_nor_launched(batch: int) -> None:
    """Seen in huggingface/transformers#32283: an expert launched without tokens crashed a quantised kernel."""
    routes = [[[1, 4]], [[4, 1]]] * batch
    sequence = np.repeat(np.arange(batch), 2)
    world = real_world(make_trace(routes, n_experts=8, sequence=sequence), slots=8, batch=batch)
    with staged(world) as (rig, predictions):
        run = real_run(world, Plan(), rig, predictions)
        launched: set[int] = set()
        plain = run.experts.launch
        run._prepare()  # the warm-up runs kernels too

        def launch(states: Any, outputs: Any, slots: list[int], *rest: Any) -> None:
            launched.update(slots)
            plain(states, outputs, slots, *rest)

        run.experts.launch = launch  # type: ignore[method-assign]
        run._prepare = lambda: None  # type: ignore[method-assign]
        outcome = run.execute()
        assert set(slots_of(run)) == {1, 4}
        assert launched == set(slots_of(run).values())
    assert sum(outcome.log.counters.demand_bytes) == 2 * SIZE


def test_a_kernel_launched_directly_gets_what_the_dispatched_one_got() -> None:
    from realrun.device.triton_launch import Direct

    class Compiled:
        function, packed_metadata = 77, (4, 1, 0)

        def run(self, *arguments: Any) -> None:
            launched.append(arguments)

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def dispatch(*arguments: Any, num_warps: int, **constants: Any) -> Compiled:
                launched.append((grid, arguments, constants, num_warps))
                return Compiled()

            return dispatch

    launched: list[Any] = []
    direct = Direct(Kernel())
    direct.dispatched((5, 2), (1, 2, 3), HIDDEN=64, GATED=True, num_warps=4)
    direct.launch((6, 3), 99, (4, 5, 6))
    assert launched == [
        ((5, 2), (1, 2, 3), {"HIDDEN": 64, "GATED": True}, 4),
        (6, 3, 1, 99, 77, (4, 1, 0), None, None, None, 4, 5, 6, 64, True),
    ]


def test_work_beside_the_step_delays_requests_and_on_the_path_the_step() -> None:
    world = real_world(chain([0, 1, 0, 1]), slots=2)
    moments, ns = np.array([0, 2, 4, 6]), np.full(4, 300_000)
    critical = run_on_cpu(world, Plan(prediction=Prediction(moments, ns)))
    beside = run_on_cpu(world, Plan(prediction=Prediction(moments, ns, critical=False)))
    assert (critical.log.predict > 0).all()
    assert (beside.log.predict == 0).all()


@pytest.mark.parametrize("critical", [True, False])
def test_a_prompt_waits_for_its_prediction_whether_or_not_steps_wait_for_theirs(critical: bool) -> None:
    """A real run made that of a prompt beside the step too; simulated ones charge it to TTFT."""
    world = real_world(chain([0, 1, 0, 1], phase=[PREFILL, DECODE, PREFILL, DECODE], sequence=[0, 0, 1, 1]), slots=2)
    plan = Plan(prediction=Prediction(critical=critical, prompt_ns=300_000))
    simulated, measured = run_of(world, plan).log(), run_on_cpu(world, plan).log
    assert (measured.predict > 0).tolist() == (simulated.predict > 0).tolist() == [True, False, True, False]


def test_a_run_that_is_stopped_reports_the_steps_that_were_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in guqiong96/Lvllmds4#53: a run hung and could not be stopped."""
    world = real_world(chain([0, 1, 2, 3] * 50), slots=2)
    monkeypatch.setattr("realrun.engine.loop.LOOKS_BETWEEN_CHECKS", 1)  # and every step looks
    done = [0]
    with staged(world) as (rig, predictions):
        run = real_run(world, Plan(), rig, predictions, stop=lambda: done[-1] == 3, progress=done.append)
        outcome = run.execute()
    assert not outcome.complete
    assert outcome.steps == 3
    assert len(outcome.log.finish) == len(outcome.head_ns) == len(outcome.log.found) == 3


def test_a_device_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = CompiledRun._wait

    def impatient(self: CompiledRun, function: Any, what: str, *rest: Any) -> None:
        # Whatever else is waited for comes, if late on a busy machine.
        monkeypatch.setattr("realrun.engine.loop.STUCK_SECONDS", 0.05 if what == "a slot for expert" else 60)
        wait(self, function, what, *rest)

    monkeypatch.setattr(CompiledRun, "_wait", impatient)
    monkeypatch.setattr(driven, "hold", lambda *_: None)
    world = real_world(chain([0, 1]), slots=1)  # the slot is never let go of
    with staged(world) as (rig, predictions), pytest.raises(RunError, match="waiting for a slot for expert 1"):
        real_run(world, Plan(), rig, predictions).execute()


def test_an_expert_for_so_many_rows_is_none_that_a_step_is_the_first_to_run() -> None:
    phase = [PREFILL] * 7 + [DECODE]
    routes = np.array([[0], [1], [1], [2], [2], [2], [2], [3]])[:, None]
    world = real_world(make_trace(routes, n_experts=4, phase=phase, sequence=[0] * 8), slots=4)
    with staged(world) as (rig, predictions):
        run = real_run(world, Plan(), rig, predictions)
        launch, seen = run.experts.launch, [set[int](), set[int]()]

        def watched(states: Any, outputs: Any, slots: Any, pairs: list[tuple[int, int]], take: Any) -> None:
            seen[hasattr(run, "_start")] |= {end - first for first, end in pairs}
            launch(states, outputs, slots, pairs, take)

        run.experts.launch = watched  # type: ignore[method-assign]
        run.execute()
    assert seen[1] == {1, 2, 4}
    assert seen[1] <= seen[0]


def test_what_goes_wrong_on_a_stream_comes_up_where_the_host_looks() -> None:
    world = real_world(chain([0, 1]), slots=2)
    with staged(world) as (rig, predictions):
        run = real_run(world, Plan(), rig, predictions)
        run.experts.launch = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
        with pytest.raises(ZeroDivisionError):
            run.execute()


def test_threads_end_with_the_device() -> None:
    before = set(threading.enumerate())
    run_on_cpu(real_world(chain([0, 1]), slots=1), Plan())
    assert set(threading.enumerate()) <= before


def test_prefills_and_batches_run_the_rows_that_the_trace_has() -> None:
    phase = [PREFILL, PREFILL, DECODE, PREFILL, DECODE, DECODE]
    routes = np.random.default_rng(3).permuted(np.tile(np.arange(5), (6, 2, 1)), axis=2)[:, :, :2]
    trace = make_trace(routes, n_experts=5, phase=phase, sequence=[0, 0, 0, 1, 1, 1])
    for batch in (1, 2):
        world = real_world(trace, slots=4, batch=batch)
        outcome = run_on_cpu(world, world.plan("lru"), check=True)
        assert outcome.steps == world.work.schedule.n_steps
        measured = outcome.measured(world.work)
        assert measured.compute_ns().sum() == (
            outcome.layer_ns.sum() + outcome.shared_ns.sum() + outcome.experts_ns.sum() + outcome.head_ns.sum()
        )


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, AT_ONCE))
def test_every_expert_is_launched_once_and_the_link_is_looked_at_between(rows: list[int], few: int) -> None:
    ends = np.cumsum(rows).tolist()
    pairs = [(end - count, end) for end, count in zip(ends, rows, strict=True)]
    found = portions(pairs, few)
    assert sorted(place for some in found for place in some) == list(range(len(rows)))
    for some in found:
        sharing = {rows[place] <= few for place in some}
        assert len(sharing) == 1, "experts of a few rows share a launch, the others do not"
        assert sum(rows[place] for place in some) <= AT_ONCE if True in sharing else 0 < len(some) <= SEVERAL_AT_ONCE


def test_small_experts_of_a_few_rows_share_a_launch_and_large_ones_do_not() -> None:
    sizes = {2**20: AT_ONCE, 9 * 2**20: AT_ONCE, 150 * 2**20: 2, 336 * 2**20: 1, 2**40: 1}
    assert {size: few_rows(size) for size in sizes} == sizes
