"""How things are timed: in bursts, on a device that sleeps, beside copies; and what predictions are charged."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from ground.errors import InputError
from realrun.calibrate.copies import buffers, copy_times
from realrun.calibrate.layer_times import charged, kind
from realrun.calibrate.loop_times import (
    MOST_BYTES,
    SPARE_SLOTS,
    executed,
    experts_that_fit,
    random_scene,
    shrunk,
    staying,
    useless,
)
from realrun.calibrate.machine import Machine
from realrun.calibrate.threads import REST_SECONDS, Way, by_threads, host_times, rest
from realrun.calibrate.timing import BURSTS, bursts
from realrun.device.open_device import open_device
from realrun.engine.predicting import Predictions
from realrun.engine.rig import open_rig
from sim.log import REUSE_HIT
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts
from tests.support.real_worlds import TINY_MOE
from tests.support.runs import executed as simulated
from traces.models.known import builtin_models, model_spec
from traces.models.spec import ModelSpec


@given(st.integers(1, 100))
def test_bursts_are_all_runs_and_none_is_empty(runs: int) -> None:
    sizes = list(bursts(runs))
    assert sum(sizes) == runs and min(sizes) >= 1
    assert len(sizes) == min(runs, BURSTS) and max(sizes) - min(sizes) <= 1


def test_what_is_timed_together_has_its_turn_again_and_again() -> None:
    seen: list[str] = []
    work = {name: [partial(seen.append, name)] for name in "ab"}
    times = Machine("cpu").times(work, repeats=10)
    assert {name: timing.runs for name, timing in times.items()} == {"a": 10, "b": 10}
    turns = [name for name, _ in itertools.groupby(seen)]
    assert turns == ["a", "b"] * BURSTS


class Drowsy:
    """Stands for ``torch.cuda``: launching ``work`` takes a millisecond, running it 5 us."""

    def __init__(self) -> None:
        self.host, self.device, self.slept = 0.0, 0.0, []

    def work(self) -> None:
        self.host += 1e-3
        self.device = max(self.host, self.device) + 5e-6

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles / 1.8e9)
        self.device = max(self.host, self.device) + self.slept[-1]

    def Event(self, enable_timing: bool = False) -> "DrowsyEvent":
        return DrowsyEvent(self)


class DrowsyEvent:
    def __init__(self, cuda: Drowsy) -> None:
        self.cuda, self.passed = cuda, 0.0

    def record(self) -> None:
        self.passed = max(self.cuda.host, self.cuda.device)

    def query(self) -> bool:
        return self.cuda.host >= self.passed

    def elapsed_time(self, end: "DrowsyEvent") -> float:
        return 1e3 * (end.passed - self.passed)


def test_a_device_that_sleeps_long_enough_shows_its_own_time() -> None:
    machine, cuda = Machine("cpu"), Drowsy()
    machine.cuda, machine.torch = True, SimpleNamespace(cuda=cuda)
    launched = machine.times({"x": [cuda.work]}, repeats=20)["x"]
    assert launched.ns == pytest.approx(1e6, rel=0.01) and not cuda.slept
    asleep = machine.times({"x": [cuda.work]}, repeats=20, asleep=True)["x"]
    assert (asleep.low, asleep.ns, asleep.high, asleep.runs) == (5000, 5000, 5000, 20)
    assert cuda.slept == [0.001, 0.002, 0.004, 0.008] + [0.008] * (BURSTS - 1)
    cuda.slept.clear()
    rested = machine.times({"x": [cuda.work]}, repeats=20, asleep=True, rest=0.5)["x"]
    assert (rested.low, rested.high) == (5000, 5000) and cuda.slept.count(0.5) >= 20, "a rest is in nobody's time"


@pytest.mark.parametrize(
    "model", [TINY_MOE, replace(TINY_MOE, experts=16, top_k=1)], ids=["several a token", "one a token"]
)
def test_experts_that_nobody_needs_keep_the_link_busy_and_change_nothing_else(model: ModelSpec) -> None:
    there = model.experts - 1
    slots = there * model.routed_layers + SPARE_SLOTS
    here = random_scene(model, Hardware.load("h200"), 6, there, slots * model.expert_bytes[0])
    stay = staying(here, there)
    loaded = replace(stay, requests=useless(here, there))
    loaded.check(here.work.n_layers, here.work.n_experts, here.work.schedule.n_steps)
    with open_rig(model, "cpu", shared=2) as rig:
        plain, busy = (executed(here, plan, rig, keep_outputs=True) for plan in (stay, loaded))
    first = int(here.work.offsets[here.work.n_layers])  # after the prompt
    for outcome in (plain, busy):
        assert (outcome.log.found[first:] == REUSE_HIT).all(), "what is needed is there"
    assert plain.log.counters.prefetch_bytes == [0, 0]
    assert busy.log.counters.prefetch_bytes[0] == 0 < busy.log.counters.prefetch_bytes[1]
    assert all(torch.equal(one, other) for one, other in zip(plain.outputs, busy.outputs, strict=True))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b"])
def test_so_many_experts_are_asked_for_that_the_link_is_never_idle(name: str) -> None:
    """In simulated time, with the sizes of true models."""
    model = shrunk(model_spec(name))
    there = experts_that_fit(model, MOST_BYTES, None)
    slots = there * model.routed_layers + SPARE_SLOTS
    here = random_scene(model, Hardware.load("h200"), 24, there, slots * model.expert_bytes[0])
    log = simulated(here.work, replace(staying(here, there), requests=useless(here, there)), here.budget).log
    prompt = int(log.finish[0])
    moved = log.counters.prefetch_bytes[1] / ((log.finish[-1] - prompt) / 1e9)
    assert log.found[int(here.work.offsets[here.work.n_layers]) :].max() == REUSE_HIT
    assert moved > 0.9 * here.hardware.link_bytes_per_s


MEASURED = {(one.hidden, one.attention, one.experts) for one in Hardware.load("h200").layer}


@pytest.mark.parametrize("name", [name for name in builtin_models() if kind(model_spec(name)) in MEASURED])
def test_every_model_with_measured_layers_has_a_loop_of_its_own_on_an_h200(name: str) -> None:
    whole = model_spec(name)
    model = replace(shrunk(whole), vocab=whole.vocab)
    roomy = experts_that_fit(model, MOST_BYTES, 139 * 2**30)
    assert model.top_k <= roomy == experts_that_fit(model, MOST_BYTES, None) < model.experts


@given(st.sampled_from([name for name in builtin_models() if charged(model_spec(name))]), st.integers(0, 2**38))
def test_what_the_loop_keeps_fits_what_is_free(name: str, free: int) -> None:
    whole = model_spec(name)
    model = replace(shrunk(whole), vocab=whole.vocab)
    size = model.expert_bytes[0]
    try:
        there = experts_that_fit(model, MOST_BYTES, free)
    except InputError as refused:
        least = size * (model.top_k * model.routed_layers + SPARE_SLOTS)
        short = free < least + model.resident_bytes + 2**31 or size * model.top_k * model.routed_layers > MOST_BYTES
        assert "too much to time" in str(refused) and short
    else:
        taken = there * model.routed_layers * size
        assert taken <= MOST_BYTES and taken + SPARE_SLOTS * size + model.resident_bytes <= free
        assert there >= model.top_k


def test_each_librarys_way_has_its_turn_by_itself(monkeypatch) -> None:
    seen: list[tuple[str, int, int]] = []
    machine = Machine("cpu", 10)
    before = torch.get_num_threads()
    monkeypatch.setattr("realrun.calibrate.threads.rest", lambda: seen.append(("rest", 0, 0)))

    def work(name: str) -> dict[int, list]:
        return {size: [partial(note, name, size, i) for i in range(3)] for size in (1, 2)}

    def note(name: str, size: int, i: int) -> None:
        seen.append((name, size, i))
        assert torch.get_num_threads() == (1 if name == "one thread" else before)

    one = Way("one thread", work("one thread"), partial(torch.set_num_threads, 1))
    own = Way("own", work("own"), partial(torch.set_num_threads, before))
    times = host_times(machine, [own, one])
    assert torch.get_num_threads() == before
    assert all(timing.runs == 10 for way in times.values() for timing in way.values())
    assert [name for name, _ in itertools.groupby(name for name, _, _ in seen)] == (
        ["rest", "own", "rest", "one thread"] * BURSTS
    )
    inputs = [i for name, size, i in seen if (name, size) == ("own", 1)]
    assert inputs == [2, 0, 1, 1, 2, 0, 0, 1, 2, 2, 0, 1, 1, 2, 0], "one to wake up, then on where it was"


def test_a_library_is_tried_with_one_thread_half_of_them_and_all() -> None:
    for most, tried in ((1, [1]), (2, [1, 2]), (16, [1, 8, 16])):
        given: list[int] = []
        for way in by_threads("torch", given.append, most, {}):
            way.settle()
            assert way.name == f"torch, threads: {given[-1]}"
        assert given == tried


@given(st.integers(0, 80))
def test_whoever_has_its_turn_waits_until_nobody_is_busy(busy: int) -> None:
    """``busy`` is for how many looks another thread of the process is."""
    looks: list[float] = []

    class Clock:
        def perf_counter_ns(self) -> int:
            return round(1e9 * sum(looks))

        def process_time_ns(self) -> int:
            return round(1e9 * sum(looks[:busy]))

        def sleep(self, seconds: float) -> None:
            looks.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realrun.calibrate.threads.time", Clock())
        most = round(1 / REST_SECONDS)
        assert rest(1.0) == (busy < most)
    assert len(looks) == min(busy + 1, most)


@given(
    st.sampled_from(["gpu", "host"]), st.integers(8, 50_000), st.sampled_from([64, 2048, 4096]), st.floats(0, 200),
    st.floats(1, 5000), st.floats(1, 1e6),
)  # fmt: skip
def test_a_run_looks_up_as_long_as_it_was_charged(
    where: str, entries: int, dims: int, fixed_us: float, gbps: float, gflops: float
) -> None:
    rates = {"gbps": gbps, "gflops": gflops, "search_us": fixed_us, "iteration_us": 1, "network_us": 1}
    software = PredictionCosts.model_validate(
        {"name": "x", "where": where, "element_bytes": 2 if where == "gpu" else 4, **rates}
    )
    hardware = Hardware.load("h200")
    charged = software.search_ns(hardware, entries, dims)
    read = looking_up(software, hardware, dims).entries(charged)
    size = dims * software.element_bytes
    assert fixed_us * 1e3 + read * size / gbps == pytest.approx(charged, abs=1 + size / gbps)
    if where == "gpu" and gflops * size > gbps * 2 * dims:  # neither fetched nor bound by arithmetic: the very entries
        assert read == pytest.approx(entries, abs=1 + gbps / size)


def looking_up(software: PredictionCosts, hardware: Hardware, dims: int) -> Predictions:
    with open_device("cpu") as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr("realrun.engine.predicting._TABLE_BYTES", 2**12)
        return Predictions(device, software, hardware, dims)


def test_copies_move_every_byte() -> None:
    machine = Machine("cpu", 3)
    times = copy_times(machine, "h2d", buffers(machine, (64, 256), (2**14, 2**15)), (64, 256))
    assert set(times.alone) == set(times.queued) == {64, 256}
    memory = buffers(machine, (64, 256), (0, 0))
    slow = [copy_times(machine, direction, memory, (64, 256), pinned=False) for direction in ("h2d", "d2h")]
    assert all(set(times.alone) == set(times.queued) == {64, 256} for times in slow)
    memory.device.fill_(1)
    memory.pageable.copy_(torch.arange(256))
    copy_times(machine, "d2h", memory, (64, 256), pinned=False)
    assert (memory.pageable == 1).all() and (memory.pinned == 7).all()


def test_memory_that_cannot_be_pinned_is_named(monkeypatch) -> None:
    machine = Machine("cpu", 3)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(machine.torch, "empty", refuse)
    with pytest.raises(InputError, match="4,096 bytes of pinned host memory"):
        machine.host(4096, True)
