"""The path rule: what it learns is there to be learned, and nothing that it tells was not known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.predictors.pathwise.worths import worths
from tests.support.strategies import make_trace
from traces.__main__ import main
from traces.paths.arithmetic import to_chances, to_logarithms
from traces.paths.learn import learn, one_by_one
from traces.paths.model import PathModel
from traces.paths.observe import observe
from traces.paths.state import LEARNED, RATES, Run, fresh, untrained
from traces.paths.topic import STRENGTHS, examples, fitted, strength_of


@st.composite
def runs(draw, most_rows=10):
    """Runs of one to three sequences at once, prompts among them, and the number of experts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, experts, top_k = draw(st.integers(1, 3)), draw(st.integers(3, 6)), draw(st.integers(1, 2))
    steps, place = [], [0, 0, 0]
    for _ in range(draw(st.integers(1, most_rows))):
        alone = rng.integers(3)
        if rng.random() < 0.3:  # a prompt, perhaps of a new sequence
            place[alone] *= int(rng.random() < 0.5)
            steps.append([alone] * int(rng.integers(1, 4)))
        else:
            steps.append(sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist()))
    slot = np.concatenate(steps)
    rows = len(slot)
    places = np.zeros(rows, np.int64)
    for row, one in enumerate(slot):
        places[row], place[one] = place[one], place[one] + 1
    routes = rng.random((rows, layers, experts)).argsort(axis=2)[:, :, :top_k].astype(np.int16)
    routes[rng.random(routes.shape) < 0.1] = -1
    gates = rng.integers(0, 256, routes.shape).astype(np.uint8)
    active = np.ones((len(steps), 3), bool)
    active[: len(steps) // 2, 2] = False
    active[np.repeat(np.arange(len(steps)), [len(s) for s in steps]), slot] = True
    return Run(routes, gates, np.cumsum([0, *map(len, steps)]), slot, places, active), experts


def told(run, experts, asked=lambda call: True, rank=2, pools=False, calls=None):
    """What experts are worth after each call that is asked, of a rule with random weights."""
    layers, top_k = run.routes.shape[1:]
    learned, rng = untrained(layers, experts, top_k), np.random.default_rng(0)
    for name, shape in {
        "topic_in": (3, layers, experts, rank), "topic_out": (4, layers, rank, experts),
        "topic_mean": (3, layers, rank), "path": learned["path"].shape,
    }.items():  # fmt: skip
        learned[name] = rng.normal(size=shape).astype(np.float32)
    state = fresh(run, learned, RATES["new"], pools=pools)
    worth, found = np.zeros(layers * experts, np.int64), {}
    for call in range((len(run.starts) - 1) * layers if calls is None else calls):
        observe(state, call)
        if asked(call):
            worths(state, call, worth)
            found[call] = worth.copy()
    return found


@settings(max_examples=25, deadline=None)
@given(of=runs(), seed=st.integers(0, 9))
def test_worths_do_not_depend_on_when_they_are_asked_for(of, seed):
    every, some = told(*of), told(*of, asked=lambda call: (call * 7 + seed) % 3 == 0)
    assert all(np.array_equal(every[call], worth) for call, worth in some.items())
    assert all((worth > 0).all() for worth in every.values())


@settings(max_examples=25, deadline=None)
@given(of=runs(), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_routes_and_gates_of_later_calls_change_no_worth(of, share, seed):
    run, experts = of
    layers, rng = run.routes.shape[1], np.random.default_rng(seed)
    call = int(share * ((len(run.starts) - 1) * layers - 1))
    step, layer = divmod(call, layers)
    later = np.zeros(run.routes.shape[:2], bool)
    later[run.starts[step + 1] :] = True
    later[run.starts[step] :, layer + 1 :] = True
    other = rng.integers(0, experts, run.routes.shape).astype(np.int16)
    other[:, :, 1:] = -1
    changed = run._replace(
        routes=np.where(later[:, :, None], other, run.routes), gates=np.where(later[:, :, None], 7, run.gates)
    )
    one, two = (told(each, experts, calls=call + 1) for each in (run, changed))
    assert all(np.array_equal(one[at], two[at]) for at in one)


@settings(max_examples=15, deadline=None)
@given(of=runs())
def test_with_a_pool_a_layer_the_layer_at_hand_is_worth_what_it_is_with_one(of):
    run, experts = of
    layers = run.routes.shape[1]
    one, each = told(run, experts), told(run, experts, pools=True)
    for call in one:
        part = slice(call % layers * experts, (call % layers + 1) * experts)
        assert np.array_equal(one[call][part], each[call][part])


def followed(tokens, layers=3, experts=4, seed=0):
    """A trace in which a token takes the expert of the same number, drawn at random, in all layers."""
    own = np.random.default_rng(seed).integers(0, experts, tokens)
    count = max(tokens // 25, 2)
    return make_trace(
        own[:, None, None].repeat(layers, axis=1), n_experts=experts, sequence=np.sort(np.arange(tokens) % count),
        split=["profile"] * count,
    )  # fmt: skip


def hits_of_the_first(learned, trace, rates=RATES["new"], skip=0):
    """How often, after a token's first layer, the expert that it takes in the second is worth most of that layer."""
    run = one_by_one(trace, np.arange(trace.n_sequences))
    state, right = fresh(run, learned, rates), []
    worth = np.zeros(trace.n_layers * trace.n_experts, np.int64)
    for call in range(trace.n_rows * trace.n_layers):
        observe(state, call)
        if call % trace.n_layers == 0 and call // trace.n_layers >= skip:
            worths(state, call, worth)
            best = worth[trace.n_experts : 2 * trace.n_experts].argmax()
            right.append(best == trace.experts[call // trace.n_layers, 1, 0])
    return np.mean(right)


def test_a_planted_path_is_learned_while_it_runs_and_from_a_profile():
    assert hits_of_the_first(untrained(3, 4, 1), followed(600), skip=500) > 0.9
    model = learn([followed(400)])
    assert hits_of_the_first(model.learned, followed(60, seed=1), RATES["learned"]) > 0.9
    assert hits_of_the_first(untrained(3, 4, 1), followed(60, seed=1)) < 0.7


def test_a_regression_of_full_rank_is_the_ridge_regression_of_all_uses():
    trace = followed(80)
    known = examples(trace.experts, trace.offsets, trace.n_experts, 0)
    rows, rest = np.arange(0, len(known.uses), 2), np.arange(1, len(known.uses), 2)
    fields = fitted(known, rows, 50.0, 1000)
    uses = known.uses[rows].astype(float)
    plain = np.linalg.solve(uses.T @ uses + 50 * np.eye(uses.shape[1]), uses.T @ known.later[rows])
    low = fields["topic_in"].reshape(uses.shape[1], -1) @ fields["topic_out"].transpose(2, 0, 1, 3).reshape(
        -1, plain.shape[1]
    )
    np.testing.assert_allclose(uses @ low, uses @ plain, atol=2e-3)
    assert strength_of(known, [rows, rest]) in STRENGTHS


def test_the_topic_of_a_run_is_that_of_the_regression():
    trace = followed(60)
    known = examples(trace.experts, trace.offsets, trace.n_experts, 0)
    fields = fitted(known, np.arange(len(known.uses)), 50.0, 5)
    learned = untrained(3, 4, 1) | fields
    state = fresh(one_by_one(trace, np.arange(trace.n_sequences)), learned, RATES["new"])
    inside = np.setdiff1d(np.arange(trace.n_rows), trace.offsets[1:] - 1)
    for row in range(trace.n_rows):
        for layer in range(3):
            observe(state, row * 3 + layer)
        if row in inside:
            expected = known.uses[np.searchsorted(inside, row)] @ fields["topic_in"].reshape(-1, 5)
            np.testing.assert_allclose(state.topic[0], expected, atol=1e-3)


def test_chances_and_logarithms_are_those_of_numpy():
    x = np.linspace(-40, 40, 1001).astype(np.float32)
    chances, logarithms = x.copy(), np.exp(x / 8)
    expected = 1 / (1 + np.exp(-np.clip(x.astype(float), -30, 30)))
    to_chances(chances)
    np.testing.assert_allclose(chances, expected, atol=1e-6)
    to_logarithms(logarithms)
    np.testing.assert_allclose(logarithms, x / 8, atol=2e-6)


def test_what_the_command_writes_is_read_back_and_is_the_same_twice(tmp_path, capsys):
    trace = followed(60)
    trace.save(tmp_path / "t.npz")
    for name in ("one", "two"):
        assert main(["learn", str(tmp_path / "t.npz"), "-o", str(tmp_path / f"{name}.safetensors")]) == 0
    assert "from 60 tokens of 2 sequences" in capsys.readouterr().out
    one, two = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    model, made = PathModel.load(tmp_path / "one.safetensors"), learn([trace])
    assert model.shape == (3, 4) and model.record["sequences"] == 2 and model.record["seed"] == 0
    for name in LEARNED:
        np.testing.assert_array_equal(model.learned[name], made.learned[name])


@pytest.mark.parametrize("damage", ["text", "cut", "other", "shape", "value"])
def test_a_file_that_is_none_is_refused_in_a_line(tmp_path, damage):
    path = tmp_path / "m.safetensors"
    learned = untrained(2, 3, 1)
    if damage == "other":
        learned["more"] = learned.pop("share")
    if damage == "shape":
        learned["heads"] = learned["heads"][:2]
    if damage == "value":
        learned["path_sums"][0, 0, 0, 0] = -1
    PathModel(learned, {}).save(path)
    if damage == "text":
        path.write_text("hello")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not what `python -m traces learn` writes") as refused:
        PathModel.load(path)
    assert "\n" not in str(refused.value)
