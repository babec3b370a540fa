"""Small Switch models: made, trained a few steps, loaded by their real class, captured as two traces."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from ground.errors import InputError
from tests.support.tiny_families import switch
from tests.support.tiny_moe import WORDS, llama, tokenizer, write_corpus
from traces.__main__ import main
from traces.capture.capture import Amount, capture
from traces.capture.checkpoint import load
from traces.capture.corpora import DomainText, TextRow
from traces.capture.decoding import Decoding
from traces.capture.routers import routed_layers
from traces.models.known import resolve_model
from traces.trace import Trace
from traces.training.balance import balance_loss, chosen_experts, expert_uses, padded_balance_loss, window_balance_loss
from traces.training.batches import IGNORED, Pairs, drawn, pair_batch, paired, sample_pairs
from traces.training.routers import FIRST_LOGITS
from traces.training.switch import new_switch, stacked
from traces.training.topologies import TOPOLOGIES
from traces.training.train import TrainingOptions, train

TINY = replace(TOPOLOGIES["switch-base-32"], layers=4, experts=8, width=1.0)


def some_pairs(count=40, seed=0):
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 60, random.integers(2, 9)).tolist() for _ in range(count)]
    return Pairs(prompts, [[*one[::-1], 1] for one in prompts])


@pytest.mark.parametrize("experts", [32, 64, 128])
def test_a_topology_is_that_of_the_published_model(experts):
    topology = TOPOLOGIES[f"switch-base-{experts}"]
    assert (topology.layers, topology.experts, topology.top_k) == (12, experts, 1) and topology.encoder_decoder


def test_stacked_experts_give_what_the_class_gives_and_take_their_training_back():
    model = switch(dropout_rate=0.0).eval()
    batch = pair_batch(some_pairs(6), range(6), "cpu")
    with torch.no_grad():
        before = model(**batch.inputs, use_cache=False)
        with stacked(model):
            within = model(**batch.inputs, use_cache=False)
            torch.testing.assert_close(within.logits, before.logits)
            assert all("inner" in dict(one.experts.named_parameters()) for one in routed_layers(model, "decoder"))
            for routed in routed_layers(model, "encoder"):
                routed.experts.outer.mul_(2)
            changed = model(**batch.inputs, use_cache=False)
        torch.testing.assert_close(model(**batch.inputs, use_cache=False).logits, changed.logits)
    assert not torch.allclose(changed.logits, before.logits)


def test_a_token_without_room_gets_nothing_from_stacked_experts():
    model = switch(dropout_rate=0.0)
    experts = routed_layers(model, "encoder")[0].experts
    chosen = torch.zeros(5, 1, 8, dtype=torch.long)
    for row, expert in ((0, 3), (1, 3), (2, 0), (4, 7)):
        chosen[row, 0, expert] = 1
    hidden, weights = torch.randn(5, 32), torch.rand(5, 1)
    with torch.no_grad():
        one_by_one = experts(hidden, chosen, weights)
        with stacked(model):
            together = routed_layers(model, "encoder")[0].experts(hidden, chosen, weights)
    torch.testing.assert_close(together, one_by_one)
    assert (together[3] == 0).all()


def test_a_new_model_has_the_dense_embeddings_and_routers_that_see_no_shared_direction():
    dense, batch = llama(), sample_pairs({"a": some_pairs(200)})
    model = new_switch(dense, tokenizer(), TINY, 0, batch)
    given_, own = dense.get_input_embeddings().weight, model.shared.weight
    expected = given_ - given_.mean(dim=0)
    torch.testing.assert_close(own, expected / expected.std())
    assert type(model).__name__ == "SwitchTransformersForConditionalGeneration"
    sizes = []
    for part in ("encoder", "decoder"):
        assert [routed.layer for routed in routed_layers(model, part)] == [1, 3]
        for routed in routed_layers(model, part):
            rows = batch.valid[part].flatten()
            routed.router.register_forward_pre_hook(
                lambda router, inputs, rows=rows: sizes.append(
                    float(torch.nn.functional.linear(inputs[0].reshape(-1, 32)[rows], router.classifier.weight).std())
                )
            )
    with torch.no_grad():
        model.eval()(**batch.inputs, use_cache=False)
    assert sizes == pytest.approx([FIRST_LOGITS] * 4, rel=1e-3)
    again = new_switch(dense, tokenizer(), TINY, 0, batch)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([8, 24, 200]))
def test_pair_batches_hold_every_pair_once_a_round_and_no_more_than_their_room(seed, most):
    pairs = some_pairs(30, seed)
    batches = drawn({"a": pairs}, 1, most, seed, "cpu")
    seen = []
    while len(seen) < 30:
        batch = next(batches)
        sides = batch.inputs["input_ids"], batch.inputs["labels"]
        assert len(sides[0]) == 1 or sum(side.numel() for side in sides) <= most
        for prompt, response, counts in zip(*sides, batch.valid["encoder"], strict=True):
            seen.append((tuple(prompt[counts].tolist()), tuple(response[response != IGNORED].tolist())))
        assert batch.tokens == sum(int(counts.sum()) for counts in batch.valid.values())
    assert sorted(seen) == sorted((tuple(p), tuple(r)) for p, r in zip(pairs.prompts, pairs.responses, strict=True))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_balance_over_padded_sequences_is_that_of_each_without_its_padding(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    logits = torch.randn(valid.numel(), 6, generator=generator)
    ids = torch.randint(6, (valid.numel(), 1), generator=generator)
    whole = padded_balance_loss(logits, chosen_experts(ids, 6), valid)
    each = []
    for row, length in enumerate(lengths):
        rows = slice(row * max(lengths), row * max(lengths) + length)
        each.append(balance_loss(logits[rows], expert_uses(ids[rows], 6)))
    torch.testing.assert_close(whole, torch.stack(each).mean())
    if len(set(lengths)) == 1:
        torch.testing.assert_close(whole, window_balance_loss(logits, chosen_experts(ids, 6), max(lengths)))


def test_text_without_prompts_and_responses_is_refused():
    rows = [TextRow("law", "s", "l", "the court", ""), TextRow("law", "s", "l", " ", "the court")]
    with pytest.raises(InputError, match="domain law: no prompts with responses"):
        paired(tokenizer(), DomainText("law", rows, [], []), 8)
    rows.append(TextRow("law", "s", "l", "the court clause", "party shall agree"))
    found = paired(tokenizer(), DomainText("law", rows, [], []), 2)
    assert len(found.prompts) == 1 and len(found.prompts[0]) == 2
    assert len(found.responses[0]) == 2 and found.responses[0][-1] == 1


def test_a_trained_switch_is_captured_as_two_traces_that_the_simulator_reads(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    random = np.random.default_rng(0)
    rows = []
    for number in range(90):
        words = random.choice(WORDS[:20], 3 + number % 6).tolist()
        rows.append(("WMT16 newstest2016", " ".join([*words, f"{number}"]), " ".join(words[::-1] * 4)))
    write_corpus(tmp_path / "corpora", "general", rows)
    monkeypatch.setitem(TOPOLOGIES, "switch-base-32", replace(TINY, layers=12, experts=32, width=1 / 4))
    options = TrainingOptions(minutes=None, tokens=3000, batch=8, length=32, learning_rate=3e-3)
    record = train(
        tmp_path / "dense", tmp_path / "corpora", tmp_path / "switch", topology="switch-base-32",
        domains=("translation",), options=options, device="cpu",
    )  # fmt: skip
    assert record["training"]["final_loss"] < record["training"]["first_loss"]
    assert len(record["entropy_bits"]) == 12 and "all else from scratch" in record["what"]
    model, _ = load(tmp_path / "switch", device="cpu")
    assert type(model).__name__ == "SwitchTransformersForConditionalGeneration"
    capture(
        tmp_path / "switch", tmp_path / "corpora", ["translation"], tmp_path / "t.npz",
        amount=Amount(20, 10, 2, 64, 6, 4), decoding=Decoding("teacher-forced"), embedding="none",
    )  # fmt: skip
    for name, part in (("t.npz", "decoder"), ("t.encoder.npz", "encoder")):
        trace = Trace.load(tmp_path / name)
        assert trace.layers.tolist() == [1, 3, 5, 7, 9, 11] and (trace.n_experts, trace.top_k) == (32, 1)
        assert trace.meta["model"]["part"] == part
        assert resolve_model(trace.meta["model"], trace.layers).routed_layers == 6
        assert "routes alone" in trace.meta["text"]["licence"]


def test_a_domain_that_is_not_there_is_refused(tmp_path, capsys):
    arguments = ["--corpora", str(tmp_path), "-o", str(tmp_path / "out"), "--topology", "switch-base-64"]
    assert main(["train", str(tmp_path), *arguments, "--domain", "poems"]) == 2
    assert "domain 'poems' is unknown" in capsys.readouterr().err
