"""What must hold in every run: nothing is lost or made up, time adds up, and a run is a pure function of its input."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, REUSE_HIT, Log
from sim.plan import Plan
from sim.run.observer import Copy, Outcome, Stall, Work
from sim.run.slots import ABSENT, LOADING
from sim.workload import Workload, workload
from tests.support.runs import executed
from tests.support.worlds import (
    MS,
    PLANS_TAKE_LONG,
    Event,
    Witness,
    World,
    digest,
    handmade,
    plan_of,
    planned,
    run_of,
    worlds,
)
from traces.schema import DECODE, PREFILL

BOTH = (PREFILL, DECODE)


@dataclass(frozen=True)
class Watched:
    """A run that is over, and who saw every event of it."""

    world: World
    plan: Plan
    witness: Witness
    log: Log


CHECKS: list[Callable[[Watched], None]] = []


def in_every_run(check: Callable[[Watched], None]) -> Callable[[Watched], None]:
    """Have ``check`` hold of every run that is watched: watching one costs more than all that is checked of it."""
    CHECKS.append(check)
    return check


@in_every_run
def the_observer_is_told_words_that_its_protocol_has(run: Watched) -> None:
    for kind, place, words in (
        ("transfer", 1, Copy),
        ("compute", 0, Work),
        ("stall", 2, Stall),
        ("requested", 2, Outcome),
    ):
        assert {event.detail[place] for event in run.witness.of(kind)} <= set(get_args(words))


@given(steps=st.integers(1, 300), engine=st.sampled_from(["simpy", "compiled"]))
@settings(max_examples=20, deadline=None)
def test_progress_counts_steps_that_are_done_and_ends_with_all(steps: int, engine: Any) -> None:
    """The first step was told as none, and the end of a run not at all."""
    work, told = handmade([[[0]]] * steps, 1), []
    done = executed(work, Plan(), MS, engine=engine, progress=lambda count: told.append(count))
    assert done.engine == engine
    assert told == sorted(set(told)) and told[0] >= 1 and told[-1] == steps
    if engine == "simpy":
        assert max(np.diff(told, prepend=0)) <= 64


def test_an_unknown_engine_is_refused() -> None:
    """Any other name meant SimPy."""
    engine: Any = "Compiled"
    with pytest.raises(InputError, match=r"^engine: 'Compiled'; expected one of auto, simpy, compiled$"):
        executed(handmade([[[0]]], 1), Plan(), MS, engine=engine)


# -- conservation ------------------------------------------------------------------------------------------------


@in_every_run
def slots_hold_at_every_event_and_all_tokens_finish(run: Watched) -> None:
    world, witness, log = run.world, run.witness, run.log
    cache = witness.run.cache
    assert not any(cache.pinned)
    assert (np.diff(log.finish) >= 0).all()
    assert len(witness.of("step")) == len(log.finish) == world.work.schedule.n_steps
    assert sum(np.diff(world.work.schedule.offsets)) == world.trace.n_rows


@in_every_run
def look_ups_are_distinct_experts_of_calls_and_find_what_was_there(run: Watched) -> None:
    world, plan, witness, log = run.world, run.plan, run.witness, run.log
    work = world.work
    rows, offsets = work.schedule.rows, work.schedule.offsets
    distinct = [
        len(set(world.trace.experts[rows[offsets[s] : offsets[s + 1]], layer].ravel().tolist()) - {-1})
        for s in range(work.schedule.n_steps)
        for layer in range(work.n_layers)
    ]
    assert np.diff(work.offsets).tolist() == distinct
    assert len(log.found) == sum(distinct)
    codes = {REUSE_HIT, PREFETCH_HIT, LATE_QUEUED, LATE_IN_FLIGHT, MISS} | ({HOSTED} if plan.host else set())
    assert set(log.found.tolist()) <= codes
    if not plan.keep:
        return  # leaving a slot without being evicted is not observed
    resident = set(range(work.n_layers * work.n_experts)) if plan.everything_resident else set()
    for event in witness.events:
        if event.kind == "transfer" and event.detail[2]:
            resident.add(event.detail[0])
        elif event.kind == "evicted":
            assert resident >= set(event.detail[0]), "evicted what was never there"
            resident -= set(event.detail[0])
        elif event.kind == "lookup":
            first, last = work.offsets[event.detail[0]], work.offsets[event.detail[0] + 1]
            hit = [expert in resident for expert in work.expert[first:last].tolist()]
            assert np.isin(log.found[first:last], (REUSE_HIT, PREFETCH_HIT)).tolist() == hit


@in_every_run
def link_moves_one_thing_at_a_time_and_bytes_add_up(run: Watched) -> None:
    world, witness, log = run.world, run.witness, run.log
    stretches = witness.of("transfer")
    ends = 0
    for stretch in sorted([*stretches, *witness.of("back")], key=lambda event: event.begin):
        assert ends <= stretch.begin < stretch.end
        ends = stretch.end
    demand, prefetch, _ = recounted(world.work, witness)
    assert log.counters.demand_bytes == demand
    assert log.counters.prefetch_bytes == prefetch
    for stretch in stretches:
        if stretch.detail[1] == "demand":
            assert stretch.detail[2], "a demand is never interrupted"


@in_every_run
def every_prefetch_ends_in_one_way(run: Watched) -> None:
    world, plan, witness, log = run.world, run.plan, run.witness, run.log
    c = log.counters
    _, _, fate = recounted(world.work, witness)
    issued = [sum(e.detail[2] == "issued" and e.phase == phase for e in witness.of("requested")) for phase in BOTH]
    assert c.issued == issued
    for phase in BOTH:
        ends = c.useful[phase] + c.late[phase] + c.unused[phase] + c.cancelled[phase] + c.in_flight[phase]
        assert c.issued[phase] == ends
        assert c.useful[phase] == fate["useful"][phase]
        assert c.late[phase] >= fate["late"][phase]  # one of a call in waves may wait beyond the run of its stretch
        assert c.unused[phase] == fate["unused"][phase]
        assert 0 <= c.in_flight[phase] <= 2
    if not plan.everything_resident:
        assert sum(c.useful) == int((log.found == PREFETCH_HIT).sum())
    assert sum(c.late) == int(np.isin(log.found, (LATE_QUEUED, LATE_IN_FLIGHT)).sum())
    for phase in BOTH:
        assert c.wasted[phase] == c.prefetch_bytes[phase] - fate["put to use"][phase]


def recounted(work: Workload, witness: Witness) -> tuple[list[int], list[int], dict[str, list[int]]]:
    """Bytes by demand and by prefetch, and what became of prefetches, a phase each, from the events alone."""
    sizes = np.repeat(work.expert_bytes, work.n_experts).tolist()
    copies = np.repeat(work.copy_ns, work.n_experts).tolist()
    demand, prefetch = [0, 0], [0, 0]
    fate: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    issued: dict[int, int] = {}
    moved: dict[int, int] = {}
    landed: dict[int, int] = {}
    busy_until = -1
    witness.of("step")  # fills in phases
    for event in witness.events:
        if event.kind == "requested" and event.detail[2] == "issued":
            issued[event.detail[0]] = event.phase
            moved.pop(event.detail[0], None)
        elif event.kind == "transfer":
            body = max(1, copies[event.detail[0]] - work.latency_ns)
            lead = 0 if work.chained and event.begin == busy_until else copies[event.detail[0]] - body
            busy_until = event.end
            _stretch(event, lead, body, sizes, issued, moved, landed, demand, prefetch, fate)
        elif event.kind == "back":
            busy_until = event.end
        elif event.kind == "evicted":
            for victim in event.detail[0]:
                if victim in landed:
                    fate["unused"][landed.pop(victim)] += 1
        elif event.kind == "lookup":
            for expert in work.expert[work.offsets[event.detail[0]] : work.offsets[event.detail[0] + 1]].tolist():
                if expert in landed:
                    phase = landed.pop(expert)
                    fate["useful"][phase] += 1
                    fate["put to use"][phase] += sizes[expert]
    for phase in landed.values():
        fate["unused"][phase] += 1
    return demand, prefetch, fate


def _stretch(
    event: Event, lead: int, body: int, sizes: list[int], issued: dict[int, int], moved: dict[int, int],
    landed: dict[int, int], demand: list[int], prefetch: list[int], fate: dict[str, list[int]],
) -> None:  # fmt: skip
    expert, kind, whole = event.detail
    if kind == "demand":
        assert event.end - event.begin == lead + body
        demand[event.phase] += sizes[expert]
        return
    before = moved.get(expert, 0)
    now = before + max(0, event.end - event.begin - lead)
    assert now <= body
    assert (now == body) == whole
    phase = issued[expert]
    prefetch[phase] += sizes[expert] * now // body - sizes[expert] * before // body
    moved[expert] = now
    if whole:
        del moved[expert]
        if kind == "joined":
            fate["late"][phase] += 1
            fate["put to use"][phase] += sizes[expert]
        else:
            landed[expert] = phase


@in_every_run
def what_was_given_up_holds_no_slot(run: Watched) -> None:
    """Seen in heal-research/SimSharp#45: a request given up without being cancelled kept its slot."""
    cache, transfers = run.witness.run.cache, run.witness.run.link.transfers
    held = [0] * len(cache.capacity)
    for expert, state in enumerate(cache.state):
        held[cache.pool[expert]] += cache.size[expert] if state != ABSENT else 0
    assert [free + taken for free, taken in zip(cache.free, held, strict=True)] == cache.capacity
    assert not any(cache.pinned), "nobody is waited for any more"
    loading = {expert for expert, state in enumerate(cache.state) if state == LOADING}
    assert loading == {expert for expert, transfer in transfers.items() if transfer.started}
    assert len(run.log.finish) == run.world.work.schedule.n_steps


# -- time --------------------------------------------------------------------------------------------------------


@in_every_run
def time_is_compute_stalls_prediction_and_what_copies_cost(run: Watched) -> None:
    world, plan, witness, log = run.world, run.plan, run.witness, run.log
    begin = np.concatenate([[0], log.finish[:-1]])
    stalls = log.stall_demand + log.stall_late + (log.stall_host if plan.host else 0)
    compute = world.work.compute_ns(world.work.expert_ns * (log.found != HOSTED))
    stalls = stalls + (log.waited if len(log.waited) else 0)
    waited = (stalls + longer(world.work, witness)).reshape(-1, world.work.n_layers).sum(1)
    assert (log.finish - begin == compute + waited + log.predict).all()
    # The same from the events: the GPU's slices and stalls fill its time without a gap or an overlap.
    now = 0
    for event in witness.events:
        if event.kind in ("compute", "stall"):
            assert event.begin == now
            now = event.end
    assert now == log.finish[-1]
    late = sum(e.end - e.begin for e in witness.of("stall") if e.detail[2] == "late")
    assert late == log.stall_late.sum()


def longer(work: Workload, witness: Witness) -> np.ndarray:
    """By how much the layer's own part of each call took longer than without copies."""
    layers = [event for event in witness.of("compute") if event.detail[0] == "attention"]
    assert [event.detail[1] for event in layers] == list(range(work.n_calls))
    return np.array([event.end - event.begin for event in layers]) - work.layer_ns


@in_every_run
def the_link_never_rests_while_the_gpu_waits_for_an_expert(run: Watched) -> None:
    # So no run takes longer than all of its work and all of its copies, one after another.
    witness, log = run.witness, run.log
    begin, end = spans(sorted([*witness.of("transfer"), *witness.of("back")], key=lambda event: event.begin))
    before = np.append(0, np.cumsum(end - begin))
    begin = np.append(begin, log.finish[-1])

    def moving(until: np.ndarray) -> np.ndarray:
        """How long the link has moved something by then."""
        over = np.searchsorted(end, until, "right")
        return before[over] + np.maximum(0, until - begin[over])

    since, until = spans([stall for stall in witness.of("stall") if stall.detail[2] != "host"])
    assert (moving(until) - moving(since) == until - since).all()


def spans(events: list[Event]) -> np.ndarray:
    """Begins and ends (2, N)."""
    return np.array([(event.begin, event.end) for event in events], np.int64).reshape(-1, 2).T


@in_every_run
def a_layer_takes_longer_exactly_where_a_copy_is_under_way_as_it_begins(run: Watched) -> None:
    work, witness = run.world.work, run.witness
    stretches = [(event.begin, event.end) for kind in ("transfer", "back") for event in witness.of(kind)]
    begins = [event.begin for event in witness.of("compute") if event.detail[0] == "attention"]
    for at, more in zip(begins, longer(work, witness).tolist(), strict=True):
        if any(begin < at < end for begin, end in stretches):
            assert more == work.beside_copy_ns
        elif not any(begin == at for begin, _ in stretches):
            assert more == 0, "a copy that ends as the layer begins is over"
        else:  # begun at this instant: before the layer, or by a layer that took no time
            assert more in (0, work.beside_copy_ns)


@in_every_run
def an_expert_computes_only_when_it_is_there(run: Watched) -> None:
    world, witness, log = run.world, run.witness, run.log
    work = world.work
    costs = {call: dict(zip(ids, ns, strict=True)) for call, ids, ns in _calls(work)}
    there: dict[int, int] = {}
    done = 0
    for event in witness.events:
        if event.kind == "transfer" and event.detail[2]:
            there[event.detail[0]] = event.end
        elif event.kind == "lookup":
            call, done = event.detail[0], 0
            first, last = work.offsets[call], work.offsets[call + 1]
            found = log.found[first:last] <= PREFETCH_HIT
            ready = {e for e, hit in zip(work.expert[first:last].tolist(), found.tolist(), strict=True) if hit}
            began = event.end
        elif event.kind == "compute" and event.detail[0] == "experts":
            done += event.end - event.begin
            able = sum(
                ns for e, ns in costs[event.detail[1]].items() if e in ready or began <= there.get(e, -1) <= event.begin
            )
            assert done <= work.shared_ns[event.detail[1]] + able


def _calls(work: Workload) -> list[tuple[int, list[int], list[int]]]:
    edges = list(zip(work.offsets[:-1].tolist(), work.offsets[1:].tolist(), strict=True))
    most = np.maximum(work.expert_ns, work.if_awaited_ns)
    return [(c, work.expert[a:b].tolist(), most[a:b].tolist()) for c, (a, b) in enumerate(edges)]


# -- a pure function ---------------------------------------------------------------------------------------------


@in_every_run
def two_runs_are_equal_and_watching_changes_nothing(run: Watched) -> None:
    assert digest(run_of(run.world, run.plan).log()) == digest(run.log)


@given(planned())
@settings(max_examples=250, suppress_health_check=PLANS_TAKE_LONG)
def test_what_must_hold_in_every_run_does(case: tuple[World, str, Plan]) -> None:
    """All of the above of each run: which one does not hold is the last function of the traceback."""
    world, _, plan = case
    witness = Witness(world, plan)
    run = Watched(world, plan, witness, witness.log())
    for check in CHECKS:
        check(run)


RANK_AWARE = ("cache-moe", "oracle")
"""Policies to whom the order of experts within a route says which is the likeliest."""


@given(st.data())
@settings(max_examples=100, suppress_health_check=PLANS_TAKE_LONG)
def test_order_within_a_route_does_not_matter(data: st.DataObject) -> None:
    world, name, _ = plan_of(data.draw, data.draw(worlds()))
    assume(name not in RANK_AWARE)
    world = world.with_room(world.plan(name))
    trace = world.trace
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permuted(
        np.broadcast_to(np.arange(trace.top_k), trace.experts.shape), axis=2
    )
    assert trace.gates is not None and trace.lookahead is not None
    shuffled = dataclasses.replace(
        trace,
        experts=np.take_along_axis(trace.experts, order, 2),
        gates=np.take_along_axis(trace.gates, order, 2),
        lookahead=np.take_along_axis(trace.lookahead, order, 2),
    )
    work = workload(shuffled, world.model, world.hardware, world.work.schedule)
    plain = dataclasses.replace(world, work=workload(trace, world.model, world.hardware, world.work.schedule))
    other = dataclasses.replace(plain, trace=shuffled, work=work)
    assert digest(run_of(plain, plain.plan(name)).log()) == digest(run_of(other, other.plan(name)).log())
