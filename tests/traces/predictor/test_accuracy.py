"""How rankings are judged and what plain guesses say, against plain loops over rows."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from tests.support.strategies import make_trace, traces
from traces.__main__ import main
from traces.predictor.accuracy import accuracy, batch_steps, judged_rows, recall, same_domain, union_scores
from traces.predictor.accuracy_table import PREDICTOR, judge
from traces.predictor.rankings import rankings
from traces.schema import DECODE, PREFILL


def any_ranking(trace, rows, most, seed=0):
    """A random ranking of ``most`` experts for each of ``rows`` rows."""
    random = np.random.default_rng(seed).random((rows, trace.n_layers, trace.n_experts))
    return random.argsort(axis=2)[:, :, :most].astype(np.int16)


@settings(max_examples=80, deadline=None)
@given(trace=traces(max_rows=5), batch=st.integers(1, 3), most=st.integers(1, 4))
def test_recall_and_unions_are_those_of_plain_loops(trace, batch, most):
    rows = trace.decode_rows
    experts, ranked = trace.experts[rows], any_ranking(trace, len(rows), most)
    group = batch_steps(trace, rows, batch)
    narrow, (union_recall, union_precision) = (
        recall(experts, ranked, most),
        union_scores(experts, ranked, group, trace.n_experts),
    )
    for layer in range(trace.n_layers):
        taken = [[e for e in ids if e >= 0] for ids in experts[:, layer].tolist()]
        told = ranked[:, layer].tolist()
        hits = sum(len(set(one) & set(two)) for one, two in zip(taken, told, strict=True))
        total = sum(map(len, taken))
        assert narrow[layer] == pytest.approx(hits / total) if total else np.isnan(narrow[layer])
        found = needed = guessed = 0
        for step in set(group.tolist()):
            union = {e for row in np.flatnonzero(group == step) for e in taken[row]}
            guess = {e for row in np.flatnonzero(group == step) for e in told[row]}
            found, needed, guessed = found + len(union & guess), needed + len(union), guessed + len(guess)
        assert union_recall[layer] == pytest.approx(found / needed) if needed else np.isnan(union_recall[layer])
        assert union_precision[layer] == pytest.approx(found / guessed) if guessed else np.isnan(union_precision[layer])


@settings(max_examples=60, deadline=None)
@given(trace=traces(max_rows=5), batch=st.integers(1, 4))
def test_a_batch_step_is_one_row_each_of_sequences_in_order(trace, batch):
    rows = trace.decode_rows
    group = batch_steps(trace, rows, batch)
    running = [s for s in range(trace.n_sequences) if (trace.sequence[rows] == s).any()]
    step = {row: index for s in running for index, row in enumerate(rows[trace.sequence[rows] == s].tolist())}
    expected = [(running.index(trace.sequence[row]) // batch, step[row]) for row in rows.tolist()]
    assert sorted(set(group.tolist())) == list(range(len(set(expected))))
    assert len(set(zip(group.tolist(), expected, strict=True))) == len(set(expected))


@settings(max_examples=60, deadline=None)
@given(trace=traces(max_rows=5, ragged=False))
def test_with_batches_of_one_and_k_predictions_all_measures_are_one(trace):
    rows = trace.decode_rows
    ranked = any_ranking(trace, len(rows), trace.top_k)
    found = accuracy(trace.experts[rows], ranked, batch_steps(trace, rows, 1), trace.n_experts)
    np.testing.assert_allclose(found.union_recall, found.recall)
    np.testing.assert_allclose(found.union_precision, found.recall)
    np.testing.assert_allclose(found.wide, found.recall)


def test_a_perfect_ranking_is_right_everywhere_and_none_at_all_finds_nothing():
    trace = make_trace([[[0, 1], [2, -1]], [[1, 3], [0, 2]]], n_experts=4)
    group = batch_steps(trace, np.arange(2), 2)
    right = accuracy(trace.experts, trace.experts, group, 4)
    nothing = accuracy(trace.experts, np.full((2, 2, 2), -1, np.int16), group, 4)
    assert right.recall.tolist() == right.union_recall.tolist() == right.union_precision.tolist() == [1, 1]
    assert nothing.recall.tolist() == nothing.union_recall.tolist() == [0, 0]
    assert np.isnan(nothing.union_precision).all()


@settings(max_examples=60, deadline=None)
@given(trace=traces(max_rows=6, max_layers=2))
def test_plain_guesses_rank_as_counting_row_by_row_does(trace):
    rows, learnt = judged_rows(trace), trace.row_split("profile")
    most = min(3, trace.n_experts)
    found = rankings(trace, trace, rows, most)
    for layer in range(trace.n_layers):
        routes = [[e for e in ids if e >= 0] for ids in trace.experts[:, layer].tolist()]
        popular = Counter(e for row in np.flatnonzero(learnt) for e in routes[row])
        for place, row in enumerate(rows.tolist()):
            earlier = [r for r in range(row) if trace.sequence[r] == trace.sequence[row]]
            alike = [r for r in np.flatnonzero(learnt) if trace.token[r] == trace.token[row]]
            for name, seen in {
                "popularity": [],
                "SLP": earlier,
                "previous": earlier[-1:],
                "TLP": alike,
            }.items():
                if found[name] is None:
                    assert name == "TLP" and ((trace.token < 0).all() or not learnt.any())
                    continue
                counts = Counter(e for r in seen for e in routes[r])
                order = sorted(range(trace.n_experts), key=lambda e: (-counts[e], -popular[e], e))
                assert found[name][place, layer].tolist() == order[:most], name


def predicted_trace(**fields):
    """Two profile and two evaluation sequences of three rows, with the right predictions, domains a and b."""
    experts = np.array([0, 1, 2, 1, 1, 2, 0, 1, 1, 3, 3, 0]).reshape(12, 1, 1)
    split = ["profile", "profile", "eval", "eval"]
    said = np.repeat(np.array(split) == "eval", 3)[:, None, None]
    return make_trace(
        experts, n_experts=4, sequence=np.repeat(range(4), 3), phase=[PREFILL, DECODE, DECODE] * 4, split=split,
        domain=["a", "b", "a", "b"], token=np.arange(12, dtype=np.int32) % 3,
        predicted_experts=np.where(said, experts, -1).astype(np.int16),
        predicted_probs=np.where(said, 200, 0).astype(np.uint8),
        meta={"predictor": {"sha256": "1" * 64, "trained_on": [{"domains": ["a", "b"]}]}}, **fields,
    )  # fmt: skip


def test_only_decode_rows_of_the_evaluation_split_are_judged():
    trace = predicted_trace()
    assert judged_rows(trace).tolist() == [7, 8, 10, 11]
    judged = judge(trace, trace, batch=2)
    assert judged[PREDICTOR].recall.tolist() == [1.0]
    assert judged["previous"].recall.tolist() == [0.5]


def test_the_table_names_what_a_predictor_learnt_from_and_json_holds_the_same(tmp_path, capsys):
    predicted_trace().save(tmp_path / "t.npz")
    assert main(["predictor", "accuracy", str(tmp_path / "t.npz"), "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert '"in_domain": true' in out and '"predictor"' in out
    assert main(["predictor", "accuracy", str(tmp_path / "t.npz")]) == 0
    assert "in-domain" in capsys.readouterr().out
    trace = predicted_trace()
    trace.meta["predictor"]["trained_on"] = [{"domains": ["a"]}]
    assert same_domain(trace) is False
    del trace.meta["predictor"]["trained_on"]
    assert same_domain(trace) is None


def test_what_cannot_be_judged_is_refused(tmp_path):
    plain = make_trace([0, 1], n_experts=2)
    with pytest.raises(InputError, match="holds no predictions"):
        judge(plain, plain, 1)
    trace = predicted_trace()
    with pytest.raises(InputError, match="not of the model"):
        judge(trace, plain, 1)
    with pytest.raises(InputError, match="no decode row in the evaluation split"):
        judge(trace.select("profile"), trace, 1)
    trace.save(tmp_path / "t.npz")
    assert main(["predictor", "accuracy", str(tmp_path / "t.npz"), "--batch", "0"]) == 2
