"""The path predictor: its size, what it learns, what it may know, and what it writes into traces."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from ground.errors import InputError
from tests.support.strategies import assert_same, make_trace
from traces.__main__ import main
from traces.mix import mix
from traces.predictor.accuracy import judged_rows, recall
from traces.predictor.bench import SteppingPredictor, measure
from traces.predictor.network import (
    PathPredictor,
    PredictorShape,
    load_predictor,
    new_predictor,
    path_batch,
    save_predictor,
)
from traces.predictor.predict import most_kept, predicted
from traces.predictor.rankings import rankings
from traces.predictor.sequences import load_with_prompts, path_sequences
from traces.predictor.start import start_from_statistics
from traces.predictor.train import PredictorOptions, path_loss, train_predictor
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

SMALL = {"width": 16, "inner": 32, "stack_layers": 1, "heads": 2, "head_width": 8}
OPTIONS = PredictorOptions(epochs=6, batch=8, learning_rate=1e-3, seed=3)
EXPERTS, LAYERS = 6, 2


def text_trace(sequences=60, seed=0, part="", **fields):
    """A trace whose routes follow from the text: layer 0's from the token, layer 1's from the prompt's theme.

    Prompts of two tokens and five more, or, of a decoder, a start token and five more.
    """
    random = np.random.default_rng(seed)
    before = 1 if part == "decoder" else 2
    rows = before + 5
    token = random.integers(0, 8, (sequences, rows)).astype(np.int32)
    theme = random.integers(0, 2, sequences)
    token[:, :before] = 0 if part == "decoder" else 8 + theme[:, None]
    first = np.stack([token % EXPERTS, np.broadcast_to(3 * theme[:, None], token.shape)], axis=2)
    experts = np.stack([first, (first + 1) % EXPERTS], axis=3)
    trace = make_trace(
        experts.reshape(-1, LAYERS, 2), n_experts=EXPERTS, sequence=np.repeat(range(sequences), rows),
        phase=np.tile([PREFILL] * before + [DECODE] * 5, sequences), token=token.reshape(-1),
        split=["profile"] * (sequences - 10) + ["eval"] * 10, domain=fields.pop("domain", "chat"), **fields,
    )  # fmt: skip
    trace.meta["model"] |= {"part": part} if part else {}
    return trace, theme


def saved(trace, path):
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trace of 60 sequences in a file, and a small predictor that learnt from it."""
    folder = tmp_path_factory.mktemp("predictor")
    path = saved(text_trace()[0], folder / "t.npz")
    record = train_predictor([path], folder / "p.safetensors", OPTIONS, "cpu", **SMALL)
    return path, folder / "p.safetensors", record


def test_the_size_is_the_published_one():
    net = PathPredictor(PredictorShape(32128, 6, 32))
    assert net.parameters_in_all == pytest.approx(3.79e6, rel=0.005)
    assert 2 * net.parameters_in_all / 2**20 == pytest.approx(7.21, abs=0.03)


def test_all_layers_and_experts_come_in_one_pass_without_a_look_at_later_tokens():
    net = new_predictor(PredictorShape(20, 3, 4, **SMALL), 0).eval()
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    prompt = torch.tensor([[1, 2, 3], [4, 5, 0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    with torch.inference_mode():
        whole = net(prompt, valid, tokens)
        assert whole.shape == (2, 4, 3, 4)
        later = tokens.clone()
        later[:, 2:] = 11
        torch.testing.assert_close(net(prompt, valid, later)[:, :2], whole[:, :2])
        padded = prompt.clone()
        padded[1, 2] = 17
        torch.testing.assert_close(net(padded, valid, tokens), whole)
        other = prompt.clone()
        other[0, 2] = 9
        assert not torch.allclose(net(other, valid, tokens)[0, 0], whole[0, 0])


def test_step_by_step_it_says_what_the_whole_pass_does():
    net = new_predictor(PredictorShape(20, 3, 4, **SMALL), 0).eval()
    tokens, prompt = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]), torch.tensor([[1, 2, 3], [4, 5, 0]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    with torch.inference_mode():
        running = SteppingPredictor(net, prompt, valid)
        steps = torch.stack([running.step(tokens[:, place]) for place in range(4)], dim=1)
        torch.testing.assert_close(steps, net(prompt, valid, tokens).sigmoid())


def test_it_starts_from_what_the_profile_says_of_each_token_by_itself():
    trace, _ = text_trace()
    sequences = path_sequences(trace, trace, "profile")
    net = new_predictor(PredictorShape(20, LAYERS, EXPERTS, **SMALL), 0).eval()
    start_from_statistics(net, sequences, 0)
    batch = path_batch(path_sequences(trace, trace, "eval"), 20, "cpu")
    with torch.inference_mode():
        ranked = net(batch.prompt, batch.prompt_valid, batch.tokens).topk(2, dim=-1).indices.flatten(0, 1).numpy()
    found = recall(batch.routes.flatten(0, 1).numpy(), ranked, 2)
    assert found[0] > 0.95  # which the token decides
    assert found[1] < 0.8  # which the prompt does


def test_the_loss_is_the_cross_entropy_of_the_routes_that_are_there():
    trace, _ = text_trace(12)
    sequences = path_sequences(trace, trace, "eval")[:2]
    sequences[1] = dataclasses.replace(sequences[1], tokens=sequences[1].tokens[:3], routes=sequences[1].routes[:3])
    routes = sequences[0].routes.copy()
    routes[1, 0], routes[2, 1, 1] = -1, -1
    sequences[0] = dataclasses.replace(sequences[0], routes=routes)
    batch = path_batch(sequences, 20, "cpu")
    logits = torch.randn(2, 7, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(0))
    found, terms = path_loss(logits, batch), []
    probs = logits.sigmoid().numpy()
    for number, one in enumerate(sequences):
        for place, layer in np.ndindex(one.routes.shape[:2]):
            taken = set(one.routes[place, layer].tolist()) - {-1}
            if taken:
                p = probs[number, place, layer]
                terms += [-np.log(p[e] if e in taken else 1 - p[e]) for e in range(EXPERTS)]
    assert float(found) == pytest.approx(float(np.mean(terms)), rel=1e-4)


def test_it_learns_what_the_prompt_and_the_token_say_and_plain_guesses_cannot(trained):
    path, predictor, record = trained
    trace = predicted(*load_with_prompts(path), load_predictor(predictor))
    rows = judged_rows(trace)
    found = recall(trace.experts[rows], trace.predicted_experts[rows], 2)
    plain = rankings(trace, trace, rows, 2)
    best = max(recall(trace.experts[rows], ranked, 2).mean() for ranked in plain.values())
    assert found.mean() > max(0.9, best + 0.1)
    assert record["training"]["loss"][-1] < record["training"]["loss"][0]


def test_training_and_predicting_again_gives_the_same_bytes(trained, tmp_path):
    path, predictor, _ = trained
    train_predictor([path], tmp_path / "p.safetensors", OPTIONS, "cpu", **SMALL)
    assert (tmp_path / "p.safetensors").read_bytes() == predictor.read_bytes()
    stored = load_predictor(predictor)
    for number in range(2):
        predicted(*load_with_prompts(path), stored).save(tmp_path / f"{number}.npz")
    assert (tmp_path / "0.npz").read_bytes() == (tmp_path / "1.npz").read_bytes()


def test_predictions_are_of_the_evaluation_split_ranked_and_survive_a_round_trip(trained, tmp_path):
    path, predictor, _ = trained
    stored = load_predictor(predictor)
    trace = predicted(*load_with_prompts(path), stored, most=4)
    trace.save(tmp_path / "predicted.npz")
    loaded = Trace.load(tmp_path / "predicted.npz")
    assert_same(loaded, trace)
    said = loaded.row_split("eval")
    assert loaded.predicted_experts.shape == (loaded.n_rows, LAYERS, 4)
    assert (loaded.predicted_experts[said] >= 0).all() and (loaded.predicted_experts[~said] == -1).all()
    assert loaded.meta["predictor"]["sha256"] == stored.sha256
    assert "beginning of the row's step" in loaded.meta["predictor"]["known"]
    one = path_sequences(loaded, loaded, "eval")[0]
    with torch.inference_mode():
        batch = path_batch([one], stored.net.shape.vocabulary, "cpu")
        probs = stored.net(batch.prompt, batch.prompt_valid, batch.tokens).sigmoid()[0].numpy()
    rows = slice(one.start, one.start + len(one.tokens))
    ids, told = loaded.predicted_experts[rows].astype(int), loaded.predicted_probs[rows].astype(int)
    # A sequence alone adds in another order than in a batch: the last bit may differ.
    assert np.abs(told - 255 * np.take_along_axis(probs, ids, axis=2)).max() <= 0.51
    left_out = probs.copy()
    np.put_along_axis(left_out, ids, 0, axis=2)
    assert (255 * left_out.max(axis=2) <= told[:, :, -1] + 0.51).all()


def test_parts_and_mixtures_keep_predictions_of_one_predictor(trained):
    path, predictor, _ = trained
    trace = predicted(*load_with_prompts(path), load_predictor(predictor))
    other = dataclasses.replace(trace, sequence_id=np.char.add(trace.sequence_id, "x"))
    both = mix([trace, other])
    np.testing.assert_array_equal(
        both.predicted_experts[both.sequence == both.n_sequences - 2], trace.predicted_experts[-7:]
    )
    foreign = dataclasses.replace(other, meta=other.meta | {"predictor": {"sha256": "2" * 64}})
    assert mix([trace, foreign]).predicted_experts is None


def test_a_decoder_is_told_by_the_prompts_of_its_encoder(tmp_path):
    trace, theme = text_trace(part="decoder")
    encoder = make_trace(
        np.zeros((120, 1, 1)), n_experts=EXPERTS, sequence=np.repeat(range(60), 2), phase=[PREFILL] * 120,
        token=(8 + np.repeat(theme, 2)).astype(np.int32), split=trace.split.tolist(),
    )  # fmt: skip
    path = saved(trace, tmp_path / "t.npz")
    with pytest.raises(InputError, match=r"t\.npz: is of a decoder; expected its encoder's trace beside it"):
        load_with_prompts(path)
    encoder.save(tmp_path / "t.encoder.npz")
    train_predictor([path], tmp_path / "p.safetensors", OPTIONS, "cpu", **SMALL)
    told = predicted(*load_with_prompts(path), load_predictor(tmp_path / "p.safetensors"))
    rows = judged_rows(told)
    assert recall(told.experts[rows], told.predicted_experts[rows], 2).mean() > 0.9
    encoder.take(np.arange(59)).save(tmp_path / "t.encoder.npz")
    with pytest.raises(InputError, match="no sequence 's59'"):
        path_sequences(*load_with_prompts(path), "eval")


def test_the_commands_train_predict_judge_and_measure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("traces.predictor.network.LEAST_VOCABULARY", 10)
    path, out = saved(text_trace()[0], tmp_path / "t.npz"), tmp_path / "p.safetensors"
    assert main(["predictor", "train", str(path), "-o", str(out), "--epochs", "1", "--device", "cpu"]) == 0
    assert main(["predictor", "predict", str(path), "--predictor", str(out), "-o", str(tmp_path / "q.npz")]) == 0
    assert main(["predictor", "accuracy", str(tmp_path / "q.npz"), "--batch", "4"]) == 0
    assert main(["predictor", "bench", str(out), "--batch", "2", "--repeats", "1", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "TLP and SLP" in text and "[path_us]" in text
    assert Trace.load(tmp_path / "q.npz").predicted_experts.shape[2] == most_kept(2, EXPERTS) == EXPERTS


def test_what_cannot_be_learnt_from_or_predicted_is_refused(trained, tmp_path, capsys):
    path, predictor, _ = trained
    stored = load_predictor(predictor)
    trace, _ = text_trace()
    blank = saved(dataclasses.replace(trace, token=np.full_like(trace.token, -1)), tmp_path / "blank.npz")
    assert main(["predictor", "train", str(blank), "-o", str(tmp_path / "x")]) == 2
    assert "holds no token ids" in capsys.readouterr().err
    with pytest.raises(InputError, match="no sequence in the profile split"):
        train_predictor([saved(trace.select("eval"), tmp_path / "e.npz")], tmp_path / "x", OPTIONS, "cpu", **SMALL)
    with pytest.raises(InputError, match="no evaluation split"):
        predicted(trace.select("profile"), trace, stored)
    with pytest.raises(InputError, match="7 predicted experts a route; expected 1 to 6"):
        predicted(trace, trace, stored, most=7)
    other = dataclasses.replace(trace, meta=trace.meta | {"captured": {"checkpoint_sha256": "5" * 64}})
    with pytest.raises(InputError, match="its checkpoint is 555"):
        predicted(other, other, stored)
    with pytest.raises(InputError, match="its checkpoint is 555"):
        train_predictor([path, saved(other, tmp_path / "o.npz")], tmp_path / "x", OPTIONS, "cpu", **SMALL)
    assert not (tmp_path / "x").exists()
    with pytest.raises(InputError, match="epochs is 0"):
        PredictorOptions(epochs=0)
    with pytest.raises(InputError, match="repeats is 0"):
        measure(stored, [1], repeats=0)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "no record", "other sizes"])
def test_a_file_that_is_no_predictor_is_refused_in_one_line(trained, tmp_path, damage, capsys):
    from safetensors.torch import save_file

    path, predictor, _ = trained
    bad = tmp_path / "bad.safetensors"
    data = predictor.read_bytes()
    bad.write_bytes({"empty": b"", "cut": data[:-9], "text": b"predictor"}.get(damage, data))
    if damage == "no record":
        save_file({"a": torch.zeros(1)}, bad)
    if damage == "other sizes":
        net = new_predictor(PredictorShape(20, 3, 4, **SMALL), 0)
        save_predictor(net, {"shape": {"vocabulary": 20, "layers": 3, "experts": 5, **SMALL}}, bad)
    assert main(["predictor", "predict", str(path), "--predictor", str(bad), "-o", str(tmp_path / "o.npz")]) == 2
    err = capsys.readouterr().err
    assert "not a path predictor" in err and err.count("\n") == 1
