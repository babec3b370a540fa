"""DoMoE as a policy: each parameter reaches the part that it governs, and why eviction is not LRU by default."""

from typing import Any

import numpy as np
import pytest

import sim.policies.domoe
from sim.log import PREFETCH_HIT, REUSE_HIT
from sim.plan import Plan, Requests, Values
from sim.predictors.neighbours import Neighbours
from tests.sim.policies.test_domoe import FAST, charged, policy, view, world
from tests.support.runs import simpy_run
from tests.support.worlds import MS, handmade


def test_the_objectives_costs_are_a_search_of_the_largest_tables_and_the_copies_of_a_layer() -> None:
    here = world(["law", "code", "law", "math"], 3)
    assert [len(t) for t in policy(here.setting).tables] == [3, 6, 3]
    for most, entries in ((1, 6), (2, 9), (3, 12)):
        made = policy(here.setting, tables=most)
        assert made.predict_ns == FAST.search_ns(here.hardware, entries, here.model.hidden)
        assert made.load_ns == 2 * here.hardware.copy_ns(50_000), "a token takes two experts"


def test_experts_are_worth_what_the_tables_consulted_say() -> None:
    here = world(["law", "code"], 4)
    made = policy(here.setting, tables=1)
    values = made.plan(view(here)).values
    assert values is not None
    assert values.moment.tolist() == [1 * 4, 6 * 4], "from each sequence's first decode step"
    for row, domain in zip(values.table[values.index], ("law", "code"), strict=True):
        (table,) = (t for t in made.tables if t.domain == domain)
        counts = [(table.paths[:, layer] == expert).sum() for layer in range(3) for expert in range(6)]
        assert row.tolist() == counts


def test_mispredictions_are_estimated_on_tokens_that_no_table_holds() -> None:
    # Routes are random: a token finds its own only where it is an entry itself.
    here = world(["law"] * 10, 12)
    made = policy(here.setting, top_k=1)
    assert made.miss(1, 6)[0] > 0.3
    needed = made.estimate(1, 6).needed
    assert len(needed) == 2 * 12, "two of ten sequences"
    assert needed[:, 0].tolist() == [[2] * 3] * 24, "two experts a token"
    assert len(policy(here.setting, samples=5).estimate(1, 6).needed) == 5


def test_chances_are_by_offset_or_by_layer() -> None:
    here = world(["law"] * 10, 12)
    by = {kind: policy(here.setting, chances=kind).miss(1, 6) for kind in ("offset", "layer")}
    assert (by["offset"].shape, by["layer"].shape) == ((3,), (3, 3))


def test_sampling_chooses_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(["law", "code"], 6)
    monkeypatch.setattr(sim.policies.domoe, "sampled", lambda *_: (0, 2))
    assert policy(here.setting, layers="sampled").prediction_layers(1, 6, 3) == (0, 2)


def test_what_a_person_sets_of_matching_is_what_matches() -> None:
    here = world(["law", "code"], 8)
    given = {"reading": "B", "margin": 0.3, "tables": 1, "clusters": 5}
    matching = policy(here.setting, prototypes=3, **given).predictor(1, 6).matching
    assert {"reading": matching.reading, "margin": matching.margin, "tables": matching.most} | {
        "clusters": matching.clusters
    } == given
    assert [len(p.centres) for p in matching.prototypes] == [3, 3]


def test_the_embedding_layers_output_is_compared_at_every_layer() -> None:
    here = world(["law", "code"], 6)
    looking = view(here)
    predictor = policy(here.setting, keys="token").predictor(1, 6)
    assert isinstance(predictor, Neighbours)
    chosen = predictor.consulted(looking.prompts(), 2)[looking.sequence[looking.decoding]]
    for point in range(3):
        expected = predictor.vote(looking.embedding(0), chosen, 0, [2])
        np.testing.assert_array_equal(predictor.scores(looking, point, [2]), expected)


@pytest.mark.parametrize("values", [{}, {"mode": "table"}, {"mode": "trajectory"}])
def test_prompts_stream(values: dict[str, Any]) -> None:
    here = world(["law"], 2)
    assert policy(here.setting, **values).plan(view(here)).stream_prefill


def test_trajectories_are_charged_a_search_among_all_matrices_at_each_layer() -> None:
    here = world(["law", "code"], 2)
    cost = FAST.search_ns(here.hardware, 2, 3 * 6)
    plan = policy(here.setting, mode="trajectory").plan(view(here))
    assert charged(plan) == {step * 4 + point: cost for step in (1, 2, 4, 5) for point in range(3)}
    assert plan.prediction.critical


def test_more_votes_than_entries_are_all_entries() -> None:
    here = world(["law", "code"], 2)
    plans = [policy(here.setting, top_k=votes, layers="all").plan(view(here)) for votes in (4, 10**9)]
    assert all(plan.requests is not None for plan in plans)
    assert plans[0].requests.expert.tolist() == plans[1].requests.expert.tolist()  # type: ignore[union-attr]


# -- eviction ----------------------------------------------------------------------------------------------------------


def guessed(eviction: str, wrong: int, slots: int, tokens: int = 12) -> float:
    """Share of look-ups that hit, from the third token on, where every token takes expert 0 of each of four layers.

    A layer's time is five copies, and each layer's expert is predicted in time; for the first ``wrong`` layers expert 1
    is predicted too, which nobody takes.
    """
    asked = [
        (step * 5 + layer, step * 4 + layer, 3 * layer + expert)
        for step in range(tokens)
        for layer in range(4)
        for expert in range(1 + (layer < wrong))
    ]
    work = handmade([[[0]] * 4] * tokens, 3, layer_ns=50 * MS)
    values = Values(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([[10, 1, 1] * 4]))
    plan = Plan(eviction, requests=Requests.build(*np.array(asked).T), values=values)
    found = simpy_run(work, plan, slots * 1_000_000).log().found.reshape(tokens, 4)[2:]
    assert np.isin(found, (REUSE_HIT, PREFETCH_HIT)).all(), "all is predicted in time"
    return float((found == REUSE_HIT).mean())


def test_a_wrong_guess_empties_an_lru_list_that_just_holds_a_token() -> None:
    # The list is a loop: who was used longest ago is needed next. What does not fit by one expert misses all, and a
    # wrong guess stays as long as a right one.
    assert [guessed("lru", 0, slots) for slots in (3, 4)] == [0, 1]
    assert [guessed("lru", 1, slots) for slots in (4, 5)] == [0.25, 1]
    assert [guessed("lru", 4, slots) for slots in (4, 5, 6, 7)] == [0, 0, 0, 1]
    # Where popular experts are worth more a wrong guess gives way to the next one.
    assert guessed("score", 1, 4) == 0.75
    assert [guessed("score", 4, slots) for slots in (4, 5)] == [0, 1]
