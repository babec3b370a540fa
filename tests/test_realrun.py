"""Real runs, on the CPU as a device: the simulator's decisions, the right bytes, the same outputs."""

import dataclasses
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from realrun.device import HostDevice
from realrun.engine import RealRun
from realrun.faults import RunError, SlotFault
from sim.log import DECODE, HOSTED, MISS, PREFILL
from sim.plan import Host, Plan, Prediction, Requests
from tests.realworlds import SIZE, real_plans, real_run, real_world, real_worlds, run_on_cpu, stage_of, staged
from tests.strategies import make_trace
from tests.worlds import World, run_of

torch.set_num_threads(1)
FEW = settings(max_examples=25)
DEMAND_ONLY: list[tuple[str, dict]] = [
    ("lru", {}), ("lru", {"scope": "layer"}), ("lfu", {}), ("lfu", {"counts": "always"}), ("fifo", {}),
    ("on-demand", {}),
]  # fmt: skip
ALL_RESIDENT = Plan(everything_resident=True)


@FEW
@given(real_worlds(), st.sampled_from(DEMAND_ONLY))
def test_on_demand_a_real_run_finds_what_the_simulator_finds(world: World, policy: tuple[str, dict]) -> None:
    plan = world.plan(*policy)
    world = world.with_room(plan)
    simulated, measured = run_of(world, plan).log(), run_on_cpu(world, plan, check=True).log
    assert measured.found.tolist() == simulated.found.tolist()
    assert measured.counters.evictions == simulated.counters.evictions
    assert measured.counters.demand_bytes == simulated.counters.demand_bytes


@FEW
@given(real_plans())
def test_whatever_a_plan_asks_for_the_right_experts_compute(planned: tuple[World, Plan]) -> None:
    world, plan = planned
    with staged(world) as (stage, predictions):
        run = real_run(world, plan, stage, predictions, check=True, keep_outputs=True)
        outcome = run.execute()
        resident = real_run(world, ALL_RESIDENT, stage, predictions, keep_outputs=True).execute()
        for expert in np.flatnonzero(np.frombuffer(bytes(run.cache.state), np.uint8) == 2).tolist():
            assert torch.equal(run.cache.bytes[run.cache.slot[expert]], stage.store.expert(expert))
    assert outcome.complete
    assert outcome.checked == int((outcome.log.found != HOSTED).sum())
    assert len(outcome.outputs) == world.work.schedule.n_steps
    for mine, whole in zip(outcome.outputs, resident.outputs, strict=True):
        assert torch.equal(mine, whole)


@FEW
@given(real_plans())
def test_nothing_is_lost_or_made_up(planned: tuple[World, Plan]) -> None:
    world, plan = planned
    with staged(world) as (stage, predictions):
        run = real_run(world, plan, stage, predictions)
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
    used = [run.cache.slot[e] for e in range(len(run.cache.slot)) if run.cache.state[e]]
    free = [slot for pool in run.cache._free for slot in pool]
    assert sorted(used + free) == list(range(run.cache.n_slots))


def chain(experts: list[int], n_experts: int = 4, **more: Any) -> Any:
    """One layer, one expert a token."""
    return make_trace([[[expert]] for expert in experts], n_experts=n_experts, **more)


class Hasty(RealRun):
    """Does not wait for copies."""

    def _wait_for(self, transfer: Any) -> None:
        pass


class Careless(RealRun):
    """Lets go of slots as soon as their kernels have been launched, which take a while to begin."""

    def _launch(self, *arguments: Any) -> Any:
        self.device.compute.delay(0.05)
        return super()._launch(*arguments)

    def _hold(self, until: Any, group: list[int]) -> None:
        for expert in group:
            self.cache.pinned[expert] = 0
        self.link.kick()


class Confused(RealRun):
    """Takes one expert's slot for another's."""

    def _launch(self, call: int, experts: list[int], *rest: Any) -> Any:
        slots = self.cache.slot
        other = next((e for e in range(len(slots)) if slots[e] >= 0 and e not in experts), None)
        if other is not None and len(experts) == 1:
            slots[experts[0]], slots[other] = slots[other], slots[experts[0]]
        return super()._launch(call, experts, *rest)


class Meddling(RealRun):
    """Changes a byte of a slot while its kernels run."""

    def _launch(self, call: int, experts: list[int], *rest: Any) -> Any:
        if not experts:
            return None
        spoiled = self.cache.bytes[self.cache.slot[experts[0]]]
        plain = self.experts.launch

        def launch(*arguments: Any) -> None:
            plain(*arguments)
            spoiled[5] ^= 64

        self.experts.launch = launch  # type: ignore[method-assign]
        return super()._launch(call, experts, *rest)


def faulty(kind: type[RealRun], world: World, plan: Plan, slow_copies: bool = False) -> str:
    with staged(world) as (stage, predictions):
        run = real_run(world, plan, stage, predictions, kind, check=True)
        if slow_copies:
            device: Any = stage.device
            copy = device.copy
            device.copy = lambda *parts: (device.copies.delay(0.05), copy(*parts))
        with pytest.raises(SlotFault) as caught:
            run.execute()
    return str(caught.value)


def test_g_24_5_a_kernel_that_does_not_wait_for_its_copy_is_caught() -> None:
    said = faulty(Hasty, real_world(chain([0, 1, 2, 3]), slots=2), Plan(), slow_copies=True)
    assert said.startswith("step 0: 1 times an expert was not the expert in its slot")
    assert said.endswith("first routed layer 0, expert 0")


def test_g_24_5_half_a_copy_is_caught() -> None:
    class Early(Hasty):
        def _wait_for(self, transfer: Any) -> None:
            # The stamp is there already, as if the copies of a transfer had been taken out of order.
            self.cache.stamps[self.cache.slot[transfer.expert]] = self.link._store.stamps[transfer.expert]

    said = faulty(Early, real_world(chain([0, 1]), slots=1), Plan(), slow_copies=True)
    assert "was not whole when its kernels began" in said


def test_g_24_5_a_slot_given_away_right_after_the_launch_is_caught() -> None:
    # While the kernels of expert 0 have not begun, expert 1 is asked for and takes the only slot.
    ask = Requests.build(np.array([1]), np.array([1]), np.array([1]))
    world = real_world(chain([0, 1, 1]), slots=1)
    assert "expert 0" in faulty(Careless, world, Plan(requests=ask))


def test_another_experts_slot_is_caught() -> None:
    assert "was not the expert in its slot" in faulty(Confused, real_world(chain([0, 1, 0, 1]), slots=2), Plan())


def test_a_slot_that_changes_under_its_kernels_is_caught() -> None:
    assert "was wrong when its kernels had ended" in faulty(Meddling, real_world(chain([0, 1]), slots=2), Plan())


def test_g_24_5_outputs_are_those_of_a_resident_run_however_slow_copies_are() -> None:
    world = real_world(make_trace(np.random.default_rng(0).permuted(np.tile(np.arange(6), (5, 2, 1)), axis=2)[:, :, :2], n_experts=6), slots=4)  # fmt: skip  # noqa: E501
    with staged(world) as (stage, predictions):
        device: Any = stage.device
        resident = real_run(world, ALL_RESIDENT, stage, predictions, keep_outputs=True).execute()
        copy = device.copy
        device.copy = lambda *parts: (device.copies.delay(0.002), copy(*parts))
        slow = real_run(
            world, world.plan("previous-token"), stage, predictions, check=True, keep_outputs=True
        ).execute()
    assert all(map(torch.equal, slow.outputs, resident.outputs))
    assert int(slow.log.stall_demand.sum()) > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_g_08_2_experts_without_tokens_are_neither_fetched_nor_launched(batch: int) -> None:
    routes = [[[1, 4]], [[4, 1]]] * batch
    sequence = np.repeat(np.arange(batch), 2)
    world = real_world(make_trace(routes, n_experts=8, sequence=sequence), slots=8, batch=batch)
    with staged(world) as (stage, predictions):
        run = real_run(world, Plan(), stage, predictions)
        launched: set[int] = set()
        plain = run.experts.launch
        run._prepare()  # the warm-up runs kernels too

        def launch(states: Any, outputs: Any, slots: list[int], *rest: Any) -> None:
            launched.update(slots)
            plain(states, outputs, slots, *rest)

        run.experts.launch = launch  # type: ignore[method-assign]
        run._prepare = lambda: None  # type: ignore[method-assign]
        outcome = run.execute()
        assert {expert for expert in range(8) if run.cache.slot[expert] >= 0} == {1, 4}
        assert launched == {run.cache.slot[1], run.cache.slot[4]}
    assert sum(outcome.log.counters.demand_bytes) == 2 * SIZE


def test_a_demand_overtakes_a_prefetch_at_its_chunk_boundary() -> None:
    """One expert after another was asked for; what is needed and absent comes as soon as the link may turn to it."""
    ask = Requests.build(np.zeros(6, np.int64), np.arange(1, 7), np.arange(1, 7), np.arange(6))
    world = real_world(chain([0, 1, 2, 3, 4, 5, 6], n_experts=8), slots=8)
    order: list[int] = []
    with staged(world) as (stage, predictions):
        device: Any = stage.device
        run = real_run(world, Plan(requests=ask, chunks=4), stage, predictions)
        run.link._piece, run.link._ahead = SIZE // 8, SIZE // 4
        land = run.link._land
        run.link._land = lambda transfer: (order.append(transfer.expert), land(transfer))  # type: ignore[method-assign]
        copy = device.copy
        device.copy = lambda *parts: (device.copies.delay(0.002), copy(*parts))
        outcome = run.execute()
    assert order.index(0) <= 1, "the demand waited for more than the prefetch that was under way"
    assert sorted(order) == list(range(7))
    assert outcome.log.counters.prefetch_bytes == [0, 6 * SIZE]
    assert outcome.log.counters.demand_bytes == [0, SIZE]


class Recorded:
    """A link whose copies are written down, ``(expert, begin, end)``, instead of made."""

    def __init__(self, slots: int, chunks: int = 1, size: int = SIZE) -> None:
        from realrun.device_cache import DeviceCache
        from realrun.host_store import HostStore
        from realrun.link import CopyLink
        from sim.clock import Clock
        from sim.log import Counters
        from sim.terms import Slots

        self.device: Any = HostDevice()
        cache = DeviceCache(self.device, size, 1, 8, Slots((slots * size,), (0,)))
        store = HostStore(self.device, 8, size)
        self.link = CopyLink(Clock(), cache, store, self.device, chunks, "preemptive", Counters())
        self.copies: list[tuple[int, int, int]] = []
        expert_of = {store.expert(expert).data_ptr(): expert for expert in range(8)}
        self.device.copy = lambda target, source, begin, end: self.copies.append(
            (expert_of[source.data_ptr()], begin, end)
        )


def test_every_demand_of_a_call_is_handed_over_at_once_or_as_many_as_keep_the_link_busy() -> None:
    recorded = Recorded(slots=8)
    recorded.link._ahead = SIZE  # one expert keeps it busy
    for expert in (3, 1, 2):
        recorded.link.demand(expert)
    recorded.link.kick(some=True)
    assert recorded.copies == [(3, 0, SIZE)]
    recorded.link.kick()
    assert recorded.copies == [(3, 0, SIZE), (1, 0, SIZE), (2, 0, SIZE)]
    recorded.device.close()


@pytest.mark.parametrize("small", [True, False])
def test_a_small_expert_goes_whole_and_others_in_pieces_about_two_of_them_ahead(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrun.link.SMALL_BYTES", SIZE if small else SIZE - 1)
    recorded = Recorded(slots=8, chunks=4)
    recorded.device.copies.delay(0.2)  # nothing arrives while the host looks
    for expert in (0, 1, 2):
        recorded.link.request(expert, 9, expert)
    recorded.link.kick()
    ends = [(0, 0, SIZE), (1, 0, SIZE)] if small else [(0, 0, SIZE // 4), (0, SIZE // 4, SIZE // 2)]
    assert recorded.copies == ends
    recorded.device.close()


def test_a_long_demand_ends_in_a_short_copy_only_where_a_prefetch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.link.LONG_BYTES", SIZE // 2)
    monkeypatch.setattr("realrun.link.SMALL_BYTES", 0)
    recorded = Recorded(slots=8, chunks=4)
    piece = recorded.link._piece
    recorded.link.demand(0)
    recorded.link.kick()
    recorded.link.demand(1)
    recorded.link.request(2, 5, 0)
    recorded.link._ahead = 0
    recorded.link.kick()
    assert recorded.copies == [(0, 0, SIZE), (1, 0, SIZE - piece), (1, SIZE - piece, SIZE)]
    recorded.device.close()


@FEW
@given(st.integers(1, 6), st.booleans(), st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=12))
def test_what_is_handed_over_of_an_expert_is_all_of_it_once_and_in_order(
    chunks: int, in_pieces: bool, wishes: list[tuple[int, bool]]
) -> None:
    recorded = Recorded(slots=8, chunks=chunks)
    if in_pieces:
        recorded.link._piece = SIZE // chunks
        recorded.link._ahead = 2 * recorded.link._piece
    for call, (expert, demand) in enumerate(wishes, 1):
        if recorded.link.slots.state[expert] == 2:
            continue
        if demand:
            recorded.link.demand(expert)
        else:
            recorded.link.request(expert, 1000, call)
        recorded.link.kick(some=bool(call % 2))
    deadline = time.monotonic() + 10
    while (recorded.link.transfers or recorded.link.moving) and time.monotonic() < deadline:
        recorded.link.kick()
        recorded.link.poll()
    for expert in {expert for expert, _ in wishes}:
        ends = [0]
        for begin, end in [(begin, end) for other, begin, end in recorded.copies if other == expert]:
            assert begin == ends[-1] < end
            ends.append(end)
        assert ends[-1] == SIZE
    assert not recorded.link._handed
    assert recorded.link.busy_ns() == recorded.link.busy_ns()  # what is idle does not go on
    assert (recorded.link.busy_ns() > 0) == bool(recorded.copies)
    recorded.device.close()


def test_a_copy_by_the_driver_moves_the_bytes_from_begin_to_end_or_says_why_not() -> None:
    import ctypes
    from types import SimpleNamespace

    from realrun.device import CudaDevice

    def copy(there: int, here: int, size: int, stream: int) -> int:
        ctypes.memmove(there, here, size)
        return 0 if stream == 5 else 700

    device = CudaDevice.__new__(CudaDevice)
    vars(device).update(_to_device=copy, copies=SimpleNamespace(stream=SimpleNamespace(cuda_stream=5)))
    here, there = torch.arange(1, 9, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    device.copy(there, here, 8, 24)
    assert there.tolist() == [0, 2, 3, 0, 0, 0, 0, 0]
    device.copy(there[4:], here[4:])
    assert there.tolist() == [0, 2, 3, 0, 5, 6, 7, 8]
    device.copies.stream.cuda_stream = 6
    vars(device)["torch_device"] = "cuda:0"
    with pytest.raises(RunError, match="copy of 64 bytes to cuda:0: CUDA error 700"):
        device.copy(there, here)


def test_a_kernel_launched_directly_gets_what_the_dispatched_one_got() -> None:
    from realrun.direct import Direct

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


def test_g_18_4_a_run_that_is_stopped_reports_the_steps_that_were_finished() -> None:
    world = real_world(chain([0, 1, 2, 3] * 50), slots=2)
    asked = iter([False, False, True] + [True] * 10**6)
    with staged(world) as (stage, predictions):
        run = real_run(world, Plan(), stage, predictions, stop=lambda: next(asked))
        outcome = run.execute()
    assert not outcome.complete
    assert 0 < outcome.steps < 200
    assert len(outcome.log.finish) == len(outcome.head_ns) == outcome.steps
    assert len(outcome.log.found) == outcome.steps


def test_a_device_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.loop.STUCK_SECONDS", 0.05)
    monkeypatch.setattr(RealRun, "_hold", lambda *_: None)
    world = real_world(chain([0, 1]), slots=1)  # the slot is never let go of
    with staged(world) as (stage, predictions), pytest.raises(RunError, match="waiting for a slot for expert 1"):
        real_run(world, Plan(), stage, predictions).execute()


def on_the_host(layers: int = 1) -> Plan:
    """Every expert runs on the host."""
    none = np.zeros(layers, np.int64)
    return Plan(keep=False, host=Host(none, none, none, none, own=np.zeros(0, np.int64)))


class Restless(HostDevice):
    """Looks again at once, as whoever waits for a GPU does: it always wants the interpreter."""

    def breathe(self) -> None:
        self._check()


def test_threads_get_the_interpreter_while_whoever_waits_never_rests() -> None:
    world, device, interval = real_world(chain([0, 1, 2, 3] * 5), slots=1), Restless(), sys.getswitchinterval()
    plan = dataclasses.replace(on_the_host(), prediction=Prediction(np.array([0, 2]), np.full(2, 300_000)))
    deadline = time.monotonic() + 30
    sys.setswitchinterval(
        1.0
    )  # whoever waits for the interpreter for so long, a few times a layer, does not end in time
    try:
        stage, predictions = stage_of(world, device)
        outcome = real_run(world, plan, stage, predictions, stop=lambda: time.monotonic() > deadline).execute()
        assert sys.getswitchinterval() == 1.0
    finally:
        sys.setswitchinterval(interval)
        device.close()
    assert outcome.complete
    assert (outcome.log.found == HOSTED).all()


def test_experts_on_the_host_compute_what_the_device_does_and_touch_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = [PREFILL, PREFILL, PREFILL, DECODE, DECODE]
    routes = np.random.default_rng(5).permuted(np.tile(np.arange(5), (5, 2, 1)), axis=2)[:, :, :2]
    world = real_world(make_trace(routes, n_experts=5, phase=phase, sequence=[0] * 5), slots=4)
    with staged(world) as (stage, predictions):
        launch = stage.device.compute.launch
        launching: set[str] = set()

        def watched(*work: Any) -> None:
            launching.add(threading.current_thread().name)
            launch(*work)

        monkeypatch.setattr(stage.device.compute, "launch", watched)
        run = real_run(world, on_the_host(2), stage, predictions, keep_outputs=True)
        hosted = run.execute()
        resident = real_run(world, ALL_RESIDENT, stage, predictions, keep_outputs=True).execute()
    assert (hosted.log.found == HOSTED).all()
    assert launching == {threading.current_thread().name}
    for mine, theirs in zip(hosted.outputs, resident.outputs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_expert_for_so_many_rows_is_none_that_a_step_is_the_first_to_run() -> None:
    phase = [PREFILL] * 7 + [DECODE]
    routes = np.array([[0], [1], [1], [2], [2], [2], [2], [3]])[:, None]
    world = real_world(make_trace(routes, n_experts=4, phase=phase, sequence=[0] * 8), slots=4)
    with staged(world) as (stage, predictions):
        run = real_run(world, Plan(), stage, predictions)
        launch, seen = run.experts.launch, [set[int](), set[int]()]

        def watched(states: Any, outputs: Any, slots: Any, pairs: list[tuple[int, int]], take: Any) -> None:
            seen[hasattr(run, "_start")] |= {end - first for first, end in pairs}
            launch(states, outputs, slots, pairs, take)

        run.experts.launch = watched  # type: ignore[method-assign]
        run.execute()
    assert seen[1] == {1, 2, 4}
    assert seen[1] <= seen[0]


def test_g_18_2_a_host_that_does_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.loop.STUCK_SECONDS", 0.05)
    over = threading.Event()
    monkeypatch.setattr("realrun.hosted.run_ffn", lambda *_: over.wait())
    world = real_world(chain([0, 1]), slots=1)
    with staged(world) as (stage, predictions):
        run = real_run(world, on_the_host(), stage, predictions)
        monkeypatch.setattr(run.link, "close", over.set)  # what ends the run ends the expert
        with pytest.raises(RunError, match="waiting for the host's experts of layer call 0"):
            run.execute()


def test_what_goes_wrong_on_a_stream_comes_up_where_the_host_looks() -> None:
    world = real_world(chain([0, 1]), slots=2)
    with staged(world) as (stage, predictions):
        run = real_run(world, Plan(), stage, predictions)
        run.experts.launch = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
        with pytest.raises(ZeroDivisionError):
            run.execute()


def test_threads_end_with_the_device() -> None:
    before = threading.active_count()
    run_on_cpu(real_world(chain([0, 1]), slots=1), Plan())
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


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
