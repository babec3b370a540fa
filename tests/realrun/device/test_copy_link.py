"""What a real run hands to the device's copy engine: whose copies, in which pieces, how far ahead."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from realrun.device.faults import RunError
from realrun.device.host_device import HostDevice
from realrun.engine.replay_loop import RealRun
from sim.compiled import driven
from sim.plan import Plan, Requests
from tests.support.real_worlds import SIZE, chain, real_run, real_world, staged

torch.set_num_threads(1)
FEW = settings(max_examples=25)


def test_a_demand_overtakes_a_prefetch_at_its_chunk_boundary() -> None:
    """One expert after another was asked for; what is needed and absent comes as soon as the link may turn to it.

    Copies wait for the demand, however long the host takes: a chunk of expert 1 has been handed over by then.
    """
    ask = Requests.build(np.zeros(6, np.int64), np.arange(1, 7), np.arange(1, 7), np.arange(6))
    world = real_world(chain([0, 1, 2, 3, 4, 5, 6], n_experts=8), slots=8)
    order: list[int] = []
    asked = threading.Event()
    with staged(world) as (rig, predictions):
        device: Any = rig.device
        run = real_run(world, Plan(requests=ask, chunks=4), rig, predictions, RealRun)
        run.link._piece, run.link._ahead = SIZE // 8, SIZE // 4
        land = run.link._land
        run.link._land = lambda transfer: (order.append(transfer.expert), land(transfer))  # type: ignore[method-assign]
        copy, demand = device.copy, run.link.demand
        device.copy = lambda *parts: (device.copies.launch(asked.wait, 60), copy(*parts))
        run.link.demand = lambda expert: (demand(expert), asked.set())[0]  # type: ignore[method-assign]
        outcome = run.execute()
    assert order == list(range(7)), "the demand waited for more than the chunk that was under way"
    assert outcome.log.counters.prefetch_bytes == [0, 6 * SIZE]
    assert outcome.log.counters.demand_bytes == [0, SIZE]


def test_a_demand_overtakes_at_a_chunk_boundary_in_compiled_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Requests.build(np.zeros(6, np.int64), np.arange(1, 7), np.arange(1, 7), np.arange(6))
    world = real_world(chain([0, 1, 2, 3, 4, 5, 6], n_experts=8), slots=8)
    handed: list[tuple[int, int]] = []
    asked = threading.Event()
    claim = driven.claim_wave
    monkeypatch.setattr(driven, "claim_wave", lambda *given: (claim(*given), asked.set())[0])
    with staged(world) as (rig, predictions):
        device: Any = rig.device
        begins = [rig.store.expert(expert).data_ptr() for expert in range(8)]
        run = real_run(world, Plan(requests=ask, chunks=4), rig, predictions)
        run.link.c["piece_size"], run.link.c["ahead"] = SIZE // 8, SIZE // 4
        plain = device.move

        def move(target: int, source: int, size: int) -> None:
            begin = max(begin for begin in begins if begin <= source)
            handed.append((begins.index(begin), source - begin + size))
            device.copies.launch(asked.wait, 60)
            plain(target, source, size)

        device.move = move
        outcome = run.execute()
    assert handed[:4] == [(1, SIZE // 8), (1, SIZE // 4), (0, SIZE), (1, 3 * SIZE // 8)]
    assert [expert for expert, end in handed if end == SIZE] == list(range(7))
    assert outcome.log.counters.prefetch_bytes == [0, 6 * SIZE]
    assert outcome.log.counters.demand_bytes == [0, SIZE]


class Recorded:
    """A link whose copies are written down, ``(expert, begin, end)``, instead of made."""

    def __init__(self, slots: int, chunks: int = 1, size: int = SIZE) -> None:
        from realrun.device.copy_link import CopyLink
        from realrun.device.host_store import HostStore
        from realrun.device.slots import DeviceCache
        from sim.log import Counters
        from sim.run.terms import Slots

        self.device: Any = HostDevice()
        cache = DeviceCache(self.device, size, 1, 8, Slots((slots * size,), (0,)))
        store = HostStore(self.device, 8, size)
        self.link = CopyLink(cache, store, self.device, chunks, "preemptive", Counters())
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


@FEW
@given(st.integers(1, 6), st.booleans())
def test_a_demand_overtakes_where_the_simulator_is_told_that_it_does(chunks: int, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.machine.pieces.SMALL_BYTES", SIZE if small else SIZE - 1)
        recorded = Recorded(slots=8, chunks=chunks)
        recorded.link._ahead = 1
        recorded.device.copies.delay(0.1)
        recorded.link.request(0, 9, 0)
        recorded.link.kick()
        recorded.link.demand(1)
        recorded.link.kick()
        # What is left of the prefetch comes after the demand, from a boundary of the chunks that both go by.
        overtaken = sum(end - begin for expert, begin, end in recorded.copies if expert == 0)
        assert recorded.copies[-1] == (1, 0, SIZE)
        assert overtaken == SIZE if small else overtaken == SIZE // chunks
        recorded.device.close()


@pytest.mark.parametrize("small", [True, False])
def test_a_small_expert_goes_whole_and_others_in_pieces_about_two_of_them_ahead(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.machine.pieces.SMALL_BYTES", SIZE if small else SIZE - 1)
    recorded = Recorded(slots=8, chunks=4)
    recorded.device.copies.delay(0.2)  # nothing arrives while the host looks
    for expert in (0, 1, 2):
        recorded.link.request(expert, 9, expert)
    recorded.link.kick()
    ends = [(0, 0, SIZE), (1, 0, SIZE)] if small else [(0, 0, SIZE // 4), (0, SIZE // 4, SIZE // 2)]
    assert recorded.copies == ends
    recorded.device.close()


@FEW
@given(st.integers(1, 9), st.integers(3, 10).map(lambda n: 4 * n))
def test_a_prefetch_that_nothing_interrupts_is_as_many_copies_as_there_are_pieces(chunks: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.machine.pieces.SMALL_BYTES", 0)
        recorded = Recorded(slots=8, chunks=chunks, size=size)
        recorded.link._ahead = size  # all of it is handed over at once
        recorded.link.request(0, 9, 0)
        recorded.link.kick()
        assert [end for _, _, end in recorded.copies] == [size * chunk // chunks for chunk in range(1, chunks + 1)]
        recorded.device.close()


def test_a_long_demand_ends_in_a_short_copy_only_where_a_prefetch_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.device.copy_link.LONG_BYTES", SIZE // 2)
    monkeypatch.setattr("sim.machine.pieces.SMALL_BYTES", 0)
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
        if recorded.link.cache.state[expert] == 2:
            continue
        if demand:
            recorded.link.demand(expert)
        else:
            recorded.link.request(expert, 1000, call)
        recorded.link.kick(some=bool(call % 2))
    deadline = time.monotonic() + 60
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

    from realrun.device.cuda_device import CudaDevice

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
