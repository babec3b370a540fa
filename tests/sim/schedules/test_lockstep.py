"""Two batches in lockstep: who runs when, with whom, and from where."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.schedules.grouping import BY_PREDICTION, REGROUPS
from sim.schedules.kv_cache import peak_cache, with_moves
from sim.schedules.lockstep import lockstep
from sim.workload import Schedule, batched, workload
from tests.support.strategies import make_trace, traces
from tests.support.worlds import toy_machine, toy_model
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

WAYS = st.sampled_from(REGROUPS)


@st.composite
def predicted(draw: st.DrawFn) -> Trace:
    """A trace with predictions, ragged ends and dropped tokens; some rows are not predicted."""
    trace = draw(traces(max_layers=2, max_sequences=7, max_rows=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (trace.n_rows, trace.n_layers, trace.top_k)
    ranked = rng.random((*shape[:2], trace.n_experts)).argsort(axis=2)[:, :, : trace.top_k]
    said = rng.random((trace.n_rows, 1, 1)) < draw(st.sampled_from([0.7, 1.0]))
    return dataclasses.replace(trace, predicted_experts=np.where(said, ranked, -1).astype(np.int16))


def steps_of(schedule: Schedule) -> list[list[int]]:
    return [part.tolist() for part in np.split(schedule.rows, schedule.offsets[1:-1])]


@given(predicted(), st.integers(1, 4), WAYS, st.integers(1, 2))
def test_every_token_runs_once_and_after_the_one_before_it(trace: Trace, batch: int, way: str, pairs: int) -> None:
    schedule = lockstep(trace, batch, way, pairs=pairs)  # type: ignore[arg-type]
    assert sorted(schedule.rows.tolist()) == list(range(trace.n_rows))
    step_of = np.empty(trace.n_rows, np.int64)
    step_of[schedule.rows] = np.repeat(np.arange(schedule.n_steps), np.diff(schedule.offsets))
    following = np.flatnonzero((trace.sequence[1:] == trace.sequence[:-1]) & (trace.phase[1:] == DECODE)) + 1
    assert (step_of[following] > step_of[following - 1]).all()
    for rows, phase in zip(steps_of(schedule), schedule.phase.tolist(), strict=True):
        assert {int(trace.phase[row]) for row in rows} == {phase}
        assert len({int(trace.sequence[row]) for row in rows}) == (1 if phase == PREFILL else len(rows))


@given(predicted(), st.integers(1, 4), WAYS)
def test_batches_conserve_activations(trace: Trace, batch: int, way: str) -> None:
    model = toy_model(trace.n_layers, trace.n_experts, trace.top_k, (1_000,) * trace.n_layers)
    machine = toy_machine()
    one, other = (
        workload(trace, model, machine, schedule)
        for schedule in (batched(trace, 1), lockstep(trace, batch, way))  # type: ignore[arg-type]
    )
    assert other.activations.sum() == one.activations.sum() == (trace.experts >= 0).sum()
    assert other.tokens.sum() == one.tokens.sum()
    np.testing.assert_array_equal(
        *(np.bincount(work.expert, work.tokens, trace.n_layers * trace.n_experts) for work in (one, other))
    )


@given(predicted(), st.integers(1, 4), WAYS, st.integers(1, 2))
def test_batches_of_a_round_are_equal_and_no_larger_than_asked_for(
    trace: Trace, batch: int, way: str, pairs: int
) -> None:
    schedule = lockstep(trace, batch, way, pairs=pairs)  # type: ignore[arg-type]
    decode = np.flatnonzero(schedule.phase == DECODE)
    sizes = np.diff(schedule.offsets)
    assert (sizes[decode] <= batch).all()
    assert (schedule.begin is not None) == (way in BY_PREDICTION)
    if schedule.begin is not None:
        for first, count in Counter(schedule.begin[decode].tolist()).items():
            members = np.flatnonzero(schedule.begin == first)
            assert count <= 2
            assert len(members) == count
            assert max(sizes[members]) - min(sizes[members]) <= 1
            assert sizes[members].sum() > batch or count == 1


def rounds_of(kinds: list[list[int]], **more: object) -> Trace:
    """One decode row for each entry: row t of sequence s takes, and is predicted to take, expert ``kinds[s][t]``."""
    routes = np.array([kind for row in kinds for kind in row], np.int16)[:, None, None]
    sequence = np.repeat(np.arange(len(kinds)), [len(row) for row in kinds])
    return make_trace(
        routes, n_experts=4, sequence=sequence, predicted_experts=routes,
        predicted_probs=np.full(routes.shape, 255, np.uint8), meta={"predictor": {"sha256": "1" * 64}},
        domain=["general"] * len(kinds), split=["eval"] * len(kinds), **more,
    )  # fmt: skip


@pytest.mark.parametrize("way", BY_PREDICTION)
def test_tokens_of_one_kind_come_together_and_stay(way: str) -> None:
    # Sequences 0 and 2 change places with 1 and 3 in the third round: they move, or those, but no more than two.
    trace = rounds_of([[0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    schedule = lockstep(trace, 2, way)  # type: ignore[arg-type]
    routes = [set(trace.experts[rows].ravel().tolist()) for rows in steps_of(schedule)]
    assert sorted(map(len, routes)) == [1] * 6
    assert schedule.moved is not None
    moved = np.add.reduceat(schedule.moved, schedule.offsets[:-1])
    assert moved.tolist() == [0, 0, 0, 0, 1, 1]


def test_none_moves_only_where_batches_become_unequal() -> None:
    trace = rounds_of([[0] * 4, [1] * 4, [0] * 2, [1] * 4])
    schedule = lockstep(trace, 2, "none")
    assert [[int(trace.sequence[row]) for row in rows] for rows in steps_of(schedule)] == [
        [0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [3], [0, 1], [3],
    ]  # fmt: skip
    assert not np.any(schedule.moved)
    trace = rounds_of([[0] * 4, [1] * 4, [0] * 2, [1] * 2])
    schedule = lockstep(trace, 2, "none")
    assert [len(rows) for rows in steps_of(schedule)] == [2, 2, 2, 2, 2, 2], "two that are left are one batch"


def test_the_next_sequence_takes_the_place_of_one_that_ended() -> None:
    trace = rounds_of([[0] * 2, [1] * 3, [2] * 1, [3] * 3, [0] * 2])
    schedule = lockstep(trace, 2, "none")
    found = [[int(trace.sequence[row]) for row in rows] for rows in steps_of(schedule)]
    assert found[:4] == [[0, 1], [2, 3], [0, 1], [3, 4]]


@given(predicted(), WAYS)
def test_one_sequence_runs_as_it_does_alone(trace: Trace, way: str) -> None:
    one = trace.take(np.array([trace.n_sequences - 1]))
    for batch in (1, 3):
        schedule, alone = lockstep(one, batch, way), batched(one, 1)  # type: ignore[arg-type]
        for name in ("phase", "offsets", "rows"):
            np.testing.assert_array_equal(getattr(schedule, name), getattr(alone, name))
        assert not np.any(schedule.moved)


@given(predicted(), st.integers(1, 3), st.sampled_from(BY_PREDICTION), st.data())
def test_a_round_is_split_by_predictions_of_its_own_and_earlier_tokens_alone(
    trace: Trace, batch: int, way: str, data: st.DataObject
) -> None:
    assert trace.predicted_experts is not None
    schedule = lockstep(trace, batch, way)  # type: ignore[arg-type]
    step = data.draw(st.integers(0, schedule.n_steps - 1))
    assert schedule.begin is not None
    end = schedule.offsets[np.searchsorted(schedule.begin, schedule.begin[step], side="right")]
    changed = trace.predicted_experts.copy()
    changed[schedule.rows[end:]] = np.where(changed[schedule.rows[end:]] < 0, -1, 0)
    routes = np.roll(trace.experts, 1, axis=0)
    other = dataclasses.replace(trace, predicted_experts=changed, experts=routes)
    again = lockstep(other, batch, way)  # type: ignore[arg-type]
    np.testing.assert_array_equal(schedule.rows[:end], again.rows[:end])
    np.testing.assert_array_equal(np.array(schedule.moved)[:end], np.array(again.moved)[:end])


@given(predicted(), st.integers(1, 4), WAYS)
def test_cached_tokens_at_most(trace: Trace, batch: int, way: str) -> None:
    schedule = lockstep(trace, batch, way)  # type: ignore[arg-type]
    step_of = {row: step for step, rows in enumerate(steps_of(schedule)) for row in rows}
    most = []
    for step in range(schedule.n_steps):
        held = []
        for sequence in range(trace.n_sequences):
            rows = np.flatnonzero(trace.sequence == sequence).tolist()
            if step_of[rows[0]] <= step <= step_of[rows[-1]]:
                held.append(1 + max(int(trace.position[row]) for row in rows if step_of[row] <= step))
        most.append((sum(held), len(held)))
    assert peak_cache(trace, schedule) == tuple(map(max, zip(*most, strict=True)))


def test_what_moves_costs_its_bytes_read_and_written() -> None:
    trace = rounds_of([[0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    model, machine = toy_model(1, 4, 1, (1_000,)), toy_machine()
    schedule = lockstep(trace, 2, "kmeans")
    work = with_moves(workload(trace, model, machine, schedule), trace, model, machine)
    size = 2 * model.kv_bytes_per_token  # one sequence of two tokens moves to either batch
    ns = int(np.ceil(5_000 + 2 * size / 300e9 * 1e9))
    assert work.move_ns is not None
    assert work.move_ns.tolist() == [0, 0, 0, 0, ns, ns]
    assert with_moves(work, trace, model, machine).compute_ns().sum() - 2 * ns == (
        dataclasses.replace(work, move_ns=None).compute_ns().sum()
    )


def test_what_cannot_be_regrouped() -> None:
    trace = make_trace([[0], [1]], n_experts=2)
    with pytest.raises(InputError, match="--regroup kmeans: the trace has no array predicted_experts"):
        lockstep(trace, 1, "kmeans")
    with pytest.raises(InputError, match="batch: 0 sequences; give at least 1"):
        lockstep(trace, 0, "none")
