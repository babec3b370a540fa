"""What steps wait for: the times of predictor and scheduler, in both engines, against what they depend on."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.log import Log
from sim.plan import Plan, Prediction
from sim.run.engines import execute
from sim.run.terms import settle
from sim.schedules.grouping import BY_PREDICTION, REGROUPS
from sim.schedules.lockstep import lockstep
from sim.schedules.pipeline import PIPELINES, PREDICTOR, SCHEDULER, Preparation, preparation
from sim.workload import batched, workload
from tests.sim.schedules.test_lockstep import predicted, rounds_of
from tests.support.strategies import make_trace
from tests.support.worlds import MACHINES, World, arbitrary_plan, coarse, digest, toy_machine, toy_model, undemanding
from traces.schema import DECODE, PREFILL

PREDICTS, SCHEDULES = 700, 400


class Seen:
    """An observer of steps and of what runs beside them."""

    def __init__(self) -> None:
        self.beside_them: list[tuple[int, int, str, int]] = []
        self.steps: list[tuple[int, int]] = []
        self.computed: list[tuple[int, int, str]] = []

    def beside(self, begin: int, end: int, what: str, step: int) -> None:
        self.beside_them.append((begin, end, what, step))

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None:
        self.steps.append((begin, end))

    def compute(self, begin: int, end: int, what: str, call: int) -> None:
        self.computed.append((begin, end, what))

    def transfer(self, *about: Any) -> None: ...

    def written_back(self, *about: Any) -> None: ...

    def evicted(self, *about: Any) -> None: ...

    def stall(self, *about: Any) -> None: ...

    def requested(self, *about: Any) -> None: ...


def prepared(world: World, pipeline: str, plan: Plan, regroups: bool) -> Preparation | None:
    return preparation(
        world.trace, world.work.schedule, pipeline, plan, regroups=regroups,  # type: ignore[arg-type]
        predict_ns=lambda rows: PREDICTS + rows, schedule_ns=lambda rows: SCHEDULES + rows,
    )  # fmt: skip


def run(world: World, plan: Plan, tasks: Preparation | None, engine: Any = "simpy", observer: Any = None) -> Log:
    terms = dataclasses.replace(settle(world.work, plan, world.budget), preparation=tasks)
    return execute(world.work, plan, terms, engine=engine, observer=observer).log


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[World, Plan, str, str]:
    """A world whose batches run in lockstep, any plan, how its tokens are regrouped, and a pipeline."""
    trace = draw(predicted())
    way, pipeline, batch = draw(st.sampled_from(REGROUPS)), draw(st.sampled_from(PIPELINES)), draw(st.integers(1, 3))
    machine, rng = draw(st.sampled_from(MACHINES)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    model = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (3_000,) * trace.n_layers)
    pairs = 2 if pipeline == "dual-batch" else 1
    work = workload(trace, model, machine, lockstep(trace, batch, way, pairs=pairs))  # type: ignore[arg-type]
    work = coarse(work, rng) if draw(st.booleans()) else work
    move_ns = rng.integers(0, 3, work.schedule.n_steps) * int(rng.choice([1, 9_000]))
    work = dataclasses.replace(work, move_ns=move_ns if draw(st.booleans()) else None)
    world = World(trace, model, machine, batch, work, draw(st.integers(1, 9)) * 3_000)
    plan = undemanding(arbitrary_plan(rng, world, draw(st.integers(0, 20))))
    ahead = dataclasses.replace(plan.prediction, ahead=draw(st.booleans()))
    return world, dataclasses.replace(plan, prediction=ahead), way, pipeline


@given(regrouped())
def test_both_engines_agree(given: tuple[World, Plan, str, str]) -> None:
    world, plan, way, pipeline = given
    tasks = prepared(world, pipeline, plan, way in BY_PREDICTION)
    assert digest(run(world, plan, tasks)) == digest(run(world, plan, tasks, "compiled"))


@given(regrouped())
@settings(max_examples=60)
def test_nothing_begins_before_what_it_depends_on(given: tuple[World, Plan, str, str]) -> None:
    world, plan, way, pipeline = given
    tasks, seen, schedule = prepared(world, pipeline, plan, way in BY_PREDICTION), Seen(), world.work.schedule
    log = run(world, plan, tasks, observer=seen)
    ends = log.finish.tolist()
    step_of = {
        row: step
        for step in range(schedule.n_steps)
        for row in schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]].tolist()
    }
    free = {"predict": 0, "schedule": 0}
    waits = np.zeros(schedule.n_steps, np.int64)
    for begin, end, what, step in seen.beside_them:
        assert begin >= free[what], "one thing at a time"
        free[what] = end
        if what == "schedule":
            assert begin >= free["predict"], "all predictions are there"
        if pipeline == "sequential":
            assert begin >= (ends[step - 1] if step else 0)
        waits[step] = max(0, end - (ends[step - 1] if step else 0))
    if pipeline in ("overlapped", "dual-batch"):
        for step in {step for *_, step in seen.beside_them}:
            whole = [end for begin, end, what, of in seen.beside_them if of == step and what == "predict"]
            members = np.flatnonzero(np.array(step_of_round(world)) == step)
            rows = [row for row, of in step_of.items() if of in members]
            sampled = [ends[step_of[row - 1]] for row in rows if schedule.phase[step] == DECODE and known(world, row)]
            assert not sampled or not whole or max(whole) > max(sampled), "a token is predicted after it was sampled"
    critical = 0 if not plan.prediction.critical else plan.prediction.total_ns(0)
    assert (log.predict >= waits).all()
    if not critical and not plan.prediction.prompt_ns:
        np.testing.assert_array_equal(log.predict, waits)


def known(world: World, row: int) -> bool:
    """Whether the token of ``row`` was sampled in this run."""
    return row > 0 and bool(world.trace.sequence[row - 1] == world.trace.sequence[row])


def step_of_round(world: World) -> list[int]:
    schedule = world.work.schedule
    return list(range(schedule.n_steps)) if schedule.begin is None else schedule.begin.tolist()


@given(predicted(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_sequential_pipeline_waits_as_a_critical_prediction_does(trace: Any, batch: int, seed: int) -> None:
    model = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (3_000,) * trace.n_layers)
    work = workload(trace, model, toy_machine(), batched(trace, batch))
    world = World(trace, model, toy_machine(), batch, work, 9_000)
    moment = np.arange(work.schedule.n_steps) * (trace.n_layers + 1)
    plan = Plan(prediction=Prediction(moment, np.random.default_rng(seed).integers(0, 900, len(moment))))
    ahead = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, ahead=True))
    tasks = prepared(world, "sequential", ahead, regroups=False)
    assert digest(run(world, ahead, tasks)) == digest(run(world, plan, None))


@given(regrouped())
@settings(max_examples=40)
def test_a_batch_of_one_is_the_run_of_a_sequence(given: tuple[World, Plan, str, str]) -> None:
    whole, _, way, _ = given
    trace = whole.trace.take(np.array([whole.trace.n_sequences - 1]))
    world = dataclasses.replace(whole, trace=trace)
    one, other = (
        dataclasses.replace(world, work=workload(trace, world.model, world.hardware, schedule))
        for schedule in (batched(trace, 1), lockstep(trace, 1, way))  # type: ignore[arg-type]
    )
    plan = undemanding(arbitrary_plan(np.random.default_rng(0), one, 20))
    assert digest(run(one, plan, None)) == digest(run(other, plan, None))


def alike(sequences: int, tokens: int) -> World:
    """Four experts, all there, and steps of equal length: sequences of two kinds, no prompts."""
    trace = rounds_of([[kind % 2] * tokens for kind in range(sequences)])
    model, machine = toy_model(1, 4, 1, (1_000,)), toy_machine()
    return World(trace, model, machine, 2, workload(trace, model, machine, batched(trace, 2)), 4_000)


def waited(world: World, pipeline: str, way: str = "kmeans") -> list[int]:
    pairs = 2 if pipeline == "dual-batch" else 1
    schedule = lockstep(world.trace, 2, way, pairs=pairs)  # type: ignore[arg-type]
    work = workload(world.trace, world.model, world.hardware, schedule)
    world = dataclasses.replace(world, work=work)
    plan = Plan(everything_resident=True)
    return run(world, plan, prepared(world, pipeline, plan, way in BY_PREDICTION)).predict.tolist()


def test_what_is_hidden_and_what_is_not() -> None:
    # Steps take 90 us or so. Passes of two tokens take 702 ns each, a schedule of four 404.
    one, other = PREDICTS + 2, SCHEDULES + 4
    pair, pairs = alike(4, 4), alike(8, 4)
    # Predict both batches, schedule, then run both.
    assert waited(pair, "sequential") == [2 * one + other, 0] * 4
    # The first tokens are there at the beginning, as if a prompt had just been read; later on the second batch's
    # tokens are known last.
    first = PREDICTS + 4 + other
    assert waited(pair, "overlapped") == [first, 0] + [one + other, 0] * 3
    # Only the first round of each pair, of which nothing has run yet, is waited for: the second's waits while the first
    # runs.
    assert waited(pairs, "dual-batch") == [first] + [0] * 15
    assert waited(pair, "dual-batch") == waited(pair, "overlapped"), "one pair alone has nothing to run beside"
    # As if tokens were known ahead: each round is prepared while the one before it runs.
    assert waited(pair, "clairvoyant") == [2 * one + other] + [0] * 7


def test_batches_that_exchange_no_tokens_need_no_second_pair() -> None:
    world = alike(4, 4)
    work = dataclasses.replace(
        world, work=workload(world.trace, world.model, world.hardware, lockstep(world.trace, 2, "none"))
    )
    moment = np.arange(8) * 2
    plan = Plan(everything_resident=True, prediction=Prediction(moment, np.full(8, 500), ahead=True))
    assert run(work, plan, prepared(work, "overlapped", plan, regroups=False)).predict.tolist() == [500] + [0] * 7


def test_a_prompt_is_predicted_beside_the_step_before() -> None:
    phase = [PREFILL] * 2 + [DECODE] * 2 + [PREFILL, DECODE]
    trace = make_trace([[0]] * 6, n_experts=2, phase=phase, sequence=[0] * 4 + [1] * 2)
    model, machine = toy_model(1, 2, 1, (1_000,)), toy_machine()
    world = World(trace, model, machine, 1, workload(trace, model, machine, batched(trace, 1)), 4_000)
    plan = Plan(everything_resident=True, prediction=Prediction(np.arange(5) * 2, np.arange(500, 505), ahead=True))
    tasks = prepared(world, "overlapped", plan, regroups=False)
    assert tasks is not None
    assert tasks.after.tolist() == [-1, 0, 1, 1, 3]
    assert set(tasks.lane.tolist()) == {PREDICTOR} != {SCHEDULER}
    assert run(world, plan, tasks).predict.tolist() == [500, 501, 502, 0, 504]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_costs_nothing_is_not_waited_for(pipeline: str) -> None:
    world = alike(4, 2)
    assert prepared(world, pipeline, Plan(), regroups=False) is None
    free = Plan(prediction=Prediction(np.array([0]), np.array([0]), ahead=True))
    assert prepared(world, pipeline, free, regroups=False) is None
