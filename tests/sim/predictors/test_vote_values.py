"""What experts are worth by vote, popularity and recency: shares by hand, and when each value comes into force."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from realrun.generate.live import StackShape, one_step
from sim.policies import make_policy
from sim.predictors.vote_values import SCALE, vote_shares, vote_values
from tests.sim.policies.test_domoe import view, world

SHAPE = StackShape("toy", (0, 1, 2), 6, 2, 50_000, 1)


def test_shares_by_hand() -> None:
    # Three voters of weight 1, 0.5 and 0.5 name two experts each.
    scores = np.array([[1.5, 2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    assert vote_shares(scores, 2).tolist() == [[3 * SCALE // 4, SCALE, SCALE // 4, 0], [0, 0, 0, 0]]


@given(arrays(np.float32, (5, 2, 6), elements=st.floats(0, 8, width=32)), st.integers(1, 3))
def test_a_row_alone_has_the_shares_that_it_has_among_others(scores: np.ndarray, top_k: int) -> None:
    whole = vote_shares(scores, top_k)
    assert ((whole >= 0) & (whole <= SCALE)).all()
    for row, share in zip(scores, whole, strict=True):
        np.testing.assert_array_equal(vote_shares(row[None], top_k)[0], share)


def test_the_vote_counts_until_the_layer_has_passed() -> None:
    here = world(["law", "code"], 2, batch=2)  # two prompts, then two steps of two rows
    looking = view(here)
    rng = np.random.default_rng(0)
    votes, popular = (rng.integers(0, SCALE, (4, 3, 6)) for _ in range(2))
    values = vote_values(looking, votes, popular, 0.25)
    values.check(3, 6, looking.n_steps)
    routes = looking.route(3)[looking.decoding]
    in_force = {}
    for moment, layer, row in zip(values.moment.tolist(), values.layer.tolist(), values.index.tolist(), strict=True):
        in_force[moment, layer] = values.table[row].tolist()
    assert sorted(in_force) == sorted([(4 * s, n) for s in (2, 3) for n in range(3)] + [
        (4 * s + 1 + n, n) for s in (2, 3) for n in range(3)
    ])  # fmt: skip
    for step, rows in ((2, [0, 1]), (3, [2, 3])):
        for layer in range(3):
            assert in_force[4 * step, layer] == (votes + popular)[rows, layer].sum(axis=0).tolist()
            taken = np.zeros(6, int)
            for row in rows:
                taken[routes[row, layer]] += SCALE // 4
            assert in_force[4 * step + 1 + layer, layer] == (popular[rows, layer].sum(axis=0) + taken).tolist()


def test_only_what_is_nearly_sure_is_asked_for() -> None:
    here = world(["law", "code", "law"], 6)
    looking = view(here)
    every, sure = (make_policy("domoe", here.setting, {"layers": "all", "sure": s}).plan(looking) for s in (0, 0.6))
    assert every.requests is not None and sure.requests is not None
    made = make_policy("domoe", here.setting, {"layers": "all"})
    expected = set()
    for point in range(3):
        share = vote_shares(made.predictor(1, 6).scores(looking, point, [point]), 2)[:, 0]  # type: ignore[attr-defined]
        for step, row in zip(looking.step[looking.decoding].tolist(), share, strict=True):
            best = sorted(range(6), key=lambda e: (-row[e], e))[:2]
            expected |= {(step * 4 + point, point * 6 + e) for e in best if row[e] >= 0.6 * SCALE}
    moment = np.repeat(sure.requests.moment, np.diff(sure.requests.offsets))
    assert set(zip(moment.tolist(), sure.requests.expert.tolist(), strict=True)) == expected
    assert 0 < len(expected) < len(every.requests.expert)


def test_best_stands_for_parameters_that_may_be_given_otherwise() -> None:
    setting = world(["law"]).setting
    best = make_policy("domoe", setting, {"mode": "best"}).parameters.model_dump()
    assert {name: best[name] for name in ("layers", "eviction", "sure", "tables", "top_k")} == {
        "layers": "once", "eviction": "vote", "sure": 0.5, "tables": 1, "top_k": 24
    }  # fmt: skip
    other = make_policy("domoe", setting, {"mode": "best", "eviction": "lru", "layers": "all"}).parameters.model_dump()
    assert (other["eviction"], other["layers"], other["sure"]) == ("lru", "all", 0.5)


def test_one_step_alone_is_decided_as_within_the_whole_run() -> None:
    here = world(["law", "code", "law"], 4)
    made = make_policy("domoe", here.setting, {"mode": "best", "sure": 0.2})
    whole = made.plan(view(here)).by_moment(6)
    phase, offsets, rows = here.work.schedule.phase, here.work.schedule.offsets, here.work.schedule.rows
    for step in np.flatnonzero(phase == 1).tolist():
        alone = one_step(SHAPE, rows[offsets[step] : offsets[step + 1]].tolist(), int(phase[step]))
        plan = made.plan(made.view(here.trace, alone)).by_moment(6)
        for point in range(4):
            values, ns, requests = plan.get(point, ([], 0, []))[:3]
            expected = whole.get(4 * step + point, ([], 0, []))
            assert [(at, row.tolist()) for at, row in values] == [(at, row.tolist()) for at, row in expected[0]]
            assert [(expert, call + 3 * step, rank + 3 * 6 * step) for expert, call, rank in requests] == expected[2]
            assert point == 0 or ns == expected[1], "a table is loaded anew in a view of one step"
