"""Doubts about valid traces: what no real run does is told, wherever it stands; real routing gives no doubts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.places import REPOSITORY
from tests.support.records import routes
from tests.support.strategies import make_trace, traces
from traces.__main__ import main
from traces.layer_numbers import listed
from traces.plausibility import doubts
from traces.trace import Trace


def varied(rows: int = 100, layers: int = 4) -> np.ndarray:
    return routes(rows, layers=layers).astype(np.int16)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "traces").glob("*.npz")), ids=lambda path: path.stem)
def test_bundled_traces_give_no_doubts(path):
    assert doubts(Trace.load(path)) == []


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_every_valid_trace_can_be_judged(trace):
    assert all(doubt and "\n" not in doubt for doubt in doubts(trace))


@pytest.mark.parametrize("where", [slice(0, 40, 2), slice(60, 100), slice(0, 20), slice(7, 100, 9)])
def test_filler_rows_are_counted_wherever_they_stand(where):
    ids = varied()
    ids[where] = [0, 1]
    count = len(ids[where])
    (doubt,) = doubts(make_trace(ids, n_experts=8))
    assert doubt.startswith(f"{count} of 100 rows are identical in every layer to rows elsewhere")


def test_one_filler_row_in_each_sequence_is_counted_though_all_have_the_same_position():
    ids, sequence = varied(), np.repeat(np.arange(10), 10)
    ids[9::10] = [0, 1]
    (doubt,) = doubts(make_trace(ids, n_experts=8, sequence=sequence))
    assert doubt.startswith("10 of 100 rows")


def test_a_prompt_that_sequences_share_is_no_filler():
    ids, sequence = varied(), np.repeat(np.arange(10), 10)
    for start in range(0, 100, 10):
        ids[start : start + 6] = ids[:6]
        ids[start + 2, 1] = ids[start, 0]  # as rounding changes a near tie
    assert doubts(make_trace(ids, n_experts=8, sequence=sequence)) == []


def test_rows_that_recur_by_chance_are_no_filler():
    ids = np.random.default_rng(0).integers(0, 2, (2000, 8, 1))
    assert doubts(make_trace(ids, n_experts=2)) == []
    assert doubts(make_trace(np.zeros((40, 8, 1), int), n_experts=1)) == []
    popular = np.random.default_rng(0).zipf(1.5, (5000, 8, 1)).clip(1, 8) - 1
    assert doubts(make_trace(popular, n_experts=8)) == []
    popular[1::3] = 5
    (doubt,) = doubts(make_trace(popular, n_experts=8))
    assert 1667 <= int(doubt.split()[0]) < 1680  # a few real rows are as the filler is


def test_rows_without_a_route_are_no_filler():
    ids = varied()
    ids[:30] = -1
    assert doubts(make_trace(ids, n_experts=8)) == []


def test_a_collapse_is_told():
    ids = np.tile(varied(1), (20, 1, 1))
    assert doubts(make_trace(ids, n_experts=8)) == [
        "all rows take the same experts in every layer: was the capture lost or overwritten?"
    ]


def test_layers_that_do_not_vary_are_told_by_number():
    ids, sequence = varied(60, 7), np.repeat(np.arange(3), 20)
    ids[:, 1] = [4, 6]
    ids[:, 2] = -1
    for one in range(3):
        ids[sequence == one, 4] = [one, 7]
    ids[:, 6] = ids[:, 5]
    trace = make_trace(ids, n_experts=8, sequence=sequence, layers=np.arange(10, 17))
    assert [doubt.split(":")[0] for doubt in doubts(trace)] == [
        "no row has a route in layers 12", "all rows take the same experts in layers 11",
        "all rows of a sequence take the same experts in layers 14",
        "layers 15-16 hold the same routes in every row",
    ]  # fmt: skip


def test_doubts_do_not_hang_on_how_rows_are_blocked(monkeypatch):
    monkeypatch.setattr("traces.plausibility._BLOCK", 7)
    test_layers_that_do_not_vary_are_told_by_number()
    test_filler_rows_are_counted_wherever_they_stand(slice(0, 40, 2))


def test_lists_of_layers_never_cut_a_number():
    assert listed([3]) == "3" and listed([1, 2, 3, 5]) == "1-3, 5"
    assert listed(list(range(100, 140, 2))) == "100, 102, 104, 106, 108, 110, 112, 114 and 12 more"


def test_a_part_of_a_trace_is_judged_by_itself():
    ids, sequence = varied(), np.repeat(np.arange(2), 50)
    ids[50:] = ids[50]
    trace = make_trace(ids, n_experts=8, sequence=sequence)
    assert doubts(trace.take(np.array([0]))) == []
    assert doubts(trace.take(np.array([1])))[0].startswith("all rows take the same experts")


def test_info_and_convert_tell_doubts(tmp_path, capsys):
    ids = varied()
    ids[:40:2] = [0, 1]
    np.savez(tmp_path / "r.npz", routed_experts=ids, n_experts=8, layer_ids=np.arange(4))
    assert main(["convert", str(tmp_path / "r.npz"), "-o", str(tmp_path / "t.npz"), "--model", "toy"]) == 0
    assert "warning: 20 of 100 rows are identical" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "t.npz"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["doubts"][0].startswith("20 of 100 rows are identical")
    assert main(["info", str(tmp_path / "t.npz")]) == 0
    assert "doubtful" in capsys.readouterr().out


def test_a_layer_in_which_few_experts_take_nearly_all_is_told():
    ids = varied(200)
    few = np.random.default_rng(1).permuted(np.tile(np.arange(8), (200, 1)), axis=1)[:, :2]
    few[few.sum(axis=1) != 1] = [0, 1]
    few[::50] = [2, 3]
    ids[:, 2] = few
    (doubt,) = doubts(make_trace(ids, n_experts=8))
    assert doubt.startswith("2 of 8 experts have more than 95% of the activations of layers 2:")


def test_turns_that_hold_the_one_before_and_prompts_without_a_beginning_are_told():
    one, two = varied(20), varied(30)
    two[:20] = one
    sequence = np.repeat([0, 1], [20, 30])
    (doubt,) = doubts(make_trace(np.concatenate([one, two]), n_experts=8, sequence=sequence))
    assert doubt.startswith("1 sequences begin with all rows of the one before")
    two[19] = two[18]
    assert doubts(make_trace(np.concatenate([one, two]), n_experts=8, sequence=sequence)) == []
    late = make_trace(varied(20), n_experts=8, phase=[0] * 10 + [1] * 10)
    late.position[:] += 5
    assert doubts(late) == ["1 sequences begin in the middle of their prompt: were rows left to a prefix cache?"]


def test_answers_that_were_saved_twice_are_told_wherever_they_stand():
    one, two = varied(20), varied(30)[::-1]
    sequence = np.repeat([0, 1, 2, 3], [20, 20, 30, 20])
    ids = np.concatenate([one, one, two, one])
    (doubt,) = doubts(make_trace(ids, n_experts=8, sequence=sequence))
    assert doubt.startswith("2 sequences are the same as one before them")
    trace = make_trace(ids, n_experts=8, sequence=sequence)
    trace.token[:] = np.arange(90)  # the same routes of other tokens
    assert doubts(trace) == []
