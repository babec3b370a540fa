"""The compiled engine against the reference: every integer of every log, on anything at random."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.compiled.availability
from ground.errors import InputError
from sim.bench.engines import Case, prepared_case
from sim.bounds import fewest_loads
from sim.eviction import LRU
from sim.log import Log
from sim.machine.hardware import Hardware
from sim.plan import Discipline, Plan, Values
from sim.policies import policy_classes
from sim.report.timeline import timeline
from sim.run.prepared import replay
from sim.run.scene import scene
from sim.run.serve import serve
from sim.run.slots import ExpertCache
from sim.run.terms import settle
from sim.workload import Workload, batched, workload
from tests.support.predictions import with_predictions
from tests.support.runs import compiled_log, executed, simpy_run
from tests.support.scorers import decayed
from tests.support.strategies import make_trace
from tests.support.worlds import (
    MS,
    ONLY_PYTHON,
    PLANS_TAKE_LONG,
    TWINNED,
    World,
    arbitrary_plan,
    coarse,
    handmade,
    planned,
    toy_meta,
    undemanding,
    worlds,
)
from traces.models.known import model_spec
from traces.trace import Trace

pytest.importorskip("numba", reason="the compiled engine needs numba")

from sim.compiled.heap import Heaps, contains, push, remove, top
from tests.support.places import REPOSITORY

LAW = REPOSITORY / "traces" / "mixtral_law.npz"
DISCIPLINES: list[Discipline] = ["fifo", "demand-first", "preemptive"]


def assert_same(reference: Log, compiled: Log) -> None:
    for name in ("finish", "found", "stall_demand", "stall_late", "predict", "stall_host", "waited"):
        np.testing.assert_array_equal(getattr(compiled, name), getattr(reference, name), name)
        assert getattr(compiled, name).dtype == getattr(reference, name).dtype
    assert compiled.counters == reference.counters


# -- the same integers -----------------------------------------------------------------------------------------------


@settings(max_examples=350, suppress_health_check=PLANS_TAKE_LONG)
@given(planned(), st.sampled_from([0, 1, 3, 30_000]), st.sampled_from([0, 1, 2, 20_000]), st.integers(0, 3))
def test_any_plan_gives_the_integers_of_the_reference(
    given: tuple[World, str, Plan], launch_ns: int, alone_ns: int, apart: int
) -> None:
    world, _, plan = given
    work = dataclasses.replace(world.work, launch_ns=launch_ns, awaited_ns=world.work.if_awaited_ns + alone_ns)
    if apart:
        work = dataclasses.replace(work, split_wave_ns=np.arange(work.n_experts + 1) * 7_001 % 10**apart)
    arguments = work, plan, world.budget, world.discipline, world.chunks
    assert_same(simpy_run(*arguments).log(), compiled_log(*arguments))


@settings(max_examples=250)
@given(worlds(), st.integers(0, 2**32 - 1), st.integers(0, 150))
def test_crowded_runs_agree(world: World, seed: int, wanted: int) -> None:
    # Few slots, many requests, costs of a few ns: waves, pauses and coincidences at every turn.
    rng = np.random.default_rng(seed)
    for slots in (1, 1, 2, 3):
        some = {name: int(rng.integers(3)) for name in ("launch_ns", "beside_copy_ns")}
        work = dataclasses.replace(coarse(world.work, rng), **some)
        here = dataclasses.replace(world, work=work, budget=slots * max(work.expert_bytes))
        plan = arbitrary_plan(rng, here, wanted)
        if not here.fits(plan):
            plan = undemanding(plan)
        arguments = work, plan, here.budget, here.discipline, here.chunks
        assert_same(simpy_run(*arguments).log(), compiled_log(*arguments))


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize(
    "name",
    [name for name, kind in policy_classes().items() if not kind.learns and not kind.needs and name not in ONLY_PYTHON],
)
def test_long_runs_of_the_built_in_policies_agree(name: str, discipline: Discipline) -> None:
    stage = prepared_case(Case(name, 0.2), 60)
    arguments = stage.work, stage.plan, stage.budget, discipline
    assert_same(simpy_run(*arguments).log(), compiled_log(*arguments))


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("name", [n for n, k in policy_classes().items() if (k.learns or k.needs) and not k.keeps_plan])
def test_long_runs_of_policies_that_learn_or_read_more_agree(name: str, discipline: Discipline) -> None:
    whole = Trace.load(LAW).select("eval")
    trace, model, machine = (
        with_predictions(whole.keep(np.arange(whole.n_sequences) < 3), 0.8),
        model_spec("mixtral-8x7b"),
        Hardware.load("l40"),
    )
    work = workload(trace, model, machine, batched(trace, 2))
    world = World(trace, model, machine, 2, work, 64 * max(model.expert_bytes), discipline)
    arguments = work, world.plan(name), world.budget, discipline
    assert_same(simpy_run(*arguments).log(), compiled_log(*arguments))


@given(worlds(), st.integers(1, 4))
def test_the_fewest_bytes_agree(world: World, together: int) -> None:
    from sim.compiled.fewest import fewest_loads as compiled

    work, sizes = world.work, world.work.lookup_bytes
    for capacity in (world.budget, max(work.expert_bytes)):
        if len(sizes) and sizes.min() == sizes.max():
            capacity -= capacity % int(sizes[0])
        for most in (None, min(together, capacity // max(work.expert_bytes))):
            expected = fewest_loads(work.offsets, work.expert, sizes, capacity, most)
            assert (compiled(work.offsets, work.expert, sizes, capacity, most) == expected).all()


@pytest.mark.parametrize("eviction", TWINNED)
@given(ids=st.lists(st.integers(0, 7), min_size=1, max_size=80), slots=st.integers(1, 8))
def test_the_cache_alone_agrees(eviction: str, ids: list[int], slots: int) -> None:
    from sim.compiled.machine import build
    from sim.compiled.serve import serve as compiled

    work = handmade([[[expert]] for expert in ids], 8, expert_bytes=10)
    alike = Values(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 8), np.int64))
    scorer = decayed(work) if eviction == "scored" else None  # without time nothing is announced to it
    plan = Plan(eviction=eviction, values=alike, scorer=scorer)
    cache = ExpertCache([10], 8, [slots * 10], [0], eviction, work.first_call())
    expected = serve(cache, work.offsets, work.expert)
    np.testing.assert_array_equal(compiled(build(work, plan, settle(work, plan, slots * 10))), expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3)), max_size=60))
def test_a_heap_gives_its_items_in_order(acts: list[tuple[int, int]]) -> None:
    heaps = Heaps([10, 10], 10)
    heap, other = heaps.heaps[0], heaps.heaps[1]
    held: dict[int, tuple[int, int]] = {}
    for item, first in acts:  # an item that is in leaves, one that is not enters
        assert contains(heap, item) == (item in held)
        if item in held:
            remove(heap, item)
            del held[item]
        else:
            push(heap, item, first, item)
            held[item] = (first, item)
        assert heap["size"] == len(held)
    assert other["size"] == 0
    for item in sorted(held, key=lambda item: held[item]):
        assert top(heap)["item"] == item
        remove(heap, item)


# -- which engine ----------------------------------------------------------------------------------------------------


def small() -> Workload:
    return handmade([[[0], [1]], [[1], [0]]], 2)


def test_a_rule_that_is_only_python_runs_on_simpy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.run.engines.SHORT", 0)
    plan = Plan(eviction=LRU)
    done = executed(small(), plan, 4 * MS)
    assert done.engine == "simpy"
    assert done.notes == ("run on the SimPy engine: the eviction rule LRU is only Python",)
    with pytest.raises(InputError, match="engine compiled: the eviction rule LRU is only Python"):
        executed(small(), plan, 4 * MS, engine="compiled")
    assert_same(done.log, executed(small(), Plan(), 4 * MS, engine="compiled").log)


def test_without_numba_auto_falls_back_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.run.engines.SHORT", 0)
    monkeypatch.setattr(sim.compiled.availability, "find_spec", lambda name: None)
    done = executed(small(), Plan(), 4 * MS)
    assert done.engine == "simpy"
    assert len(done.notes) == 1 and "numba is not installed" in done.notes[0] and "\n" not in done.notes[0]
    with pytest.raises(InputError, match="numba is not installed"):
        executed(small(), Plan(), 4 * MS, engine="compiled")


def test_without_a_folder_for_code_auto_falls_back_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.run.engines.SHORT", 0)
    monkeypatch.setenv("MOE_REPLAY_CACHE", "off")
    done = executed(small(), Plan(), 4 * MS)
    assert done.engine == "simpy"
    assert len(done.notes) == 1 and "MOE_REPLAY_CACHE" in done.notes[0]
    assert executed(small(), Plan(), 4 * MS, engine="compiled").engine == "compiled"


def test_auto_compiles_what_is_long_enough_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    done = executed(small(), Plan(), 4 * MS)
    assert (done.engine, done.notes) == ("simpy", ())
    monkeypatch.setattr("sim.run.engines.SHORT", 4)
    progress: list[int] = []
    done = executed(small(), Plan(), 4 * MS, progress=progress.append)
    assert (done.engine, done.notes, progress) == ("compiled", (), [2])


def test_integers_beyond_64_bits_stay_with_python() -> None:
    work = handmade([[[0]]], 1, copy_ns=2**40, expert_bytes=2**30)
    assert executed(work, Plan(), 2**30, engine="auto").log.finish.tolist() == [2**40]
    with pytest.raises(InputError, match="overflow 64-bit integers"):
        executed(work, Plan(), 2**30, engine="compiled")


def test_what_is_impossible_is_refused_in_the_same_words() -> None:
    for plan, budget in ((Plan(), 1), (Plan(eviction="belady"), 4 * MS), (Plan(gpu_bytes=4 * MS), 4 * MS)):
        with pytest.raises(InputError) as reference:
            simpy_run(small(), plan, budget)
        with pytest.raises(InputError) as compiled:
            compiled_log(small(), plan, budget)
        assert str(compiled.value) == str(reference.value)


def test_reports_differ_in_the_name_of_the_engine_alone(tmp_path: Path) -> None:
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(8), (30, 2, 1)), axis=2)[:, :, :2]
    path = tmp_path / "toy.npz"
    trace = make_trace(routes, n_experts=8, phase=[0] * 6 + [1] * 24, expert_bytes=[1000, 1000])
    model: dict[str, Any] = trace.meta["model"]
    model |= toy_meta(2)
    trace.save(path)
    here = scene(path, cache="5", batch=2)
    reports = {engine: replay(here, "previous-token", engine=engine).to_json() for engine in ("simpy", "compiled")}
    assert [reports[engine]["settings"].pop("engine") for engine in reports] == list(reports)
    assert reports["simpy"] == reports["compiled"]
    with timeline(tmp_path / "t.json", 2, 8) as watch, pytest.raises(InputError, match="timeline, needs engine simpy"):
        replay(here, "lru", engine="compiled", observer=watch)
