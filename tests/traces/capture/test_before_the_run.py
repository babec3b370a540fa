"""What would spoil a capture is found before its first forward pass, and what a trace cannot show is noted in it."""

import json
import logging
import os
from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from ground.errors import InputError
from tests.support.tiny_families import SCALED, decoder
from tests.support.tiny_moe import tokenizer
from tests.traces.capture.test_families import PROMPTS, arrays, run, without_end
from traces.__main__ import main
from traces.capture.batches import run_batch
from traces.capture.capture import capture_prompts
from traces.capture.checkpoint import in_words, load_tokenizer, skeleton
from traces.capture.decoding import Decoding, Prompt, passes
from traces.capture.domain_run import DomainRun
from traces.capture.recorder import ODD_ROUTES, Recorder, recorders
from traces.capture.routers import routed_layers
from traces.embeddings import Basis
from traces.models.configs import READERS
from traces.trace import Trace
from traces.validation import check_meta


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("deepseek_v3", "e_score_correction_bias", float("-inf")),
        ("gpt_oss", "bias", float("nan")),
        ("olmoe", "weight", float("inf")),
        ("qwen3_moe", "weight", float("nan")),
    ],
)
def test_a_router_that_holds_a_value_that_is_not_finite_is_refused_by_name(family, field, value):
    model = decoder(family)
    router = routed_layers(model)[1].router
    with torch.no_grad():
        getattr(router, field).flatten()[5] = value
    where = r"^layer \d: router model\.layers\.\d\.mlp\.\w+"
    with pytest.raises(InputError, match=rf"{where}: {field}, entry .* is {value}; expected finite numbers"):
        Recorder(model)


def test_a_router_that_accelerate_keeps_elsewhere_is_looked_at_there_and_captured_alike():
    from accelerate import cpu_offload

    plain = arrays(without_end(decoder("deepseek_v3")))
    model = without_end(decoder("deepseek_v3"))
    cpu_offload(model.model.layers, execution_device="cpu")
    assert routed_layers(model)[0].router.weight.is_meta
    assert all((arrays(model)[name] == plain[name]).all() for name in plain)
    spoilt = decoder("deepseek_v3")
    routed_layers(spoilt)[0].router.e_score_correction_bias[3] = float("-inf")
    cpu_offload(spoilt.model.layers, execution_device="cpu")
    with pytest.raises(InputError, match=r"e_score_correction_bias, entry \[3\] is -inf"):
        Recorder(spoilt)


@pytest.mark.parametrize("known", [True, False])
def test_costs_that_the_simulator_could_not_read_are_told_before_anything_runs(known, tmp_path, capsys, monkeypatch):
    decoder("olmoe").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("the court\n\nlaw judge\n")
    monkeypatch.delattr(DomainRun, "domain")
    if not known:
        monkeypatch.delitem(READERS, "olmoe")
    with pytest.raises(AttributeError, match="domain"):
        capture_prompts(tmp_path / "model", tmp_path / "prompts.txt", tmp_path / "mine.npz", device="cpu")
    said = [line for line in capsys.readouterr().err.splitlines() if "--model NAME" in line]
    assert len(said) == (0 if known else 1)
    assert known or "model_type is 'olmoe'" in said[0]


@pytest.mark.parametrize("small", [True, False])
def test_weights_and_probabilities_too_small_to_be_stored_are_counted(small):
    model = without_end(decoder("deepseek_v3", norm_topk_prob=False, routed_scaling_factor=1.0))
    for routed in routed_layers(model):
        def shift(module, inputs, output):
            logits, _, ids = output
            return (logits - 18.4, (logits - 18.4).sigmoid().gather(1, ids), ids)

        if small:
            routed.router.register_forward_hook(shift)
    rows = run(model)[""]
    assert bool((rows.arrays["gates"] == 0).any()) == bool((rows.arrays["probs"].sum(axis=2) == 0).all()) == small
    assert rows.odd["weights"] == (rows.arrays["gates"] == 0).sum()
    assert rows.odd["probs"] == (rows.arrays["probs"].sum(axis=2) == 0).sum()


def checkpoint(folder, family="mixtral", **more):
    decoder(family, **more).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def captured(folder, prompts, path, *more):
    given = [os.fsdecode(os.fsencode(one)) for one in (folder, "--prompts", prompts, "-o", path, *more)]
    return main(["capture", *given, "--embedding", "none", "--new-tokens", "3", "--device", "cpu"])


def test_notes_of_small_weights_are_in_the_trace(tmp_path):
    folder = checkpoint(tmp_path / "model", "deepseek_v3", norm_topk_prob=False, routed_scaling_factor=1e-8)
    (tmp_path / "p.txt").write_text("the court\n")
    assert captured(folder, tmp_path / "p.txt", tmp_path / "o.npz") == 0
    trace = Trace.load(tmp_path / "o.npz")
    count = int((trace.gates == 0).sum())
    assert count and ODD_ROUTES["weights"].format(count) in trace.meta["notes"]


def test_infinite_numbers_of_a_configuration_and_bytes_that_are_no_text_are_stored_in_words(tmp_path):
    """Granite-MoE-hybrid's configuration holds an infinite number."""
    folder = checkpoint(tmp_path / "model", "granitemoehybrid")
    prompts = tmp_path / os.fsdecode(b"p\xff.jsonl")
    prompts.write_text('{"prompt": "the court", "domain": "law"}\n')
    assert captured(folder, prompts, tmp_path / "o.npz", "--licence", os.fsdecode(b"mine \xff")) == 0
    trace = Trace.load(tmp_path / "o.npz")
    assert trace.meta["model"]["config"]["time_step_limit"] == [0.0, "inf"]
    assert trace.meta["text"]["source"].endswith("prompts of p\ufffd.jsonl")
    assert trace.meta["text"]["licence"] == "mine \ufffd"


def test_a_file_of_prompts_whose_name_is_no_text_names_its_domain_in_words(tmp_path):
    prompts = tmp_path / os.fsdecode(b"p\xff.txt")
    prompts.write_text("the court\n")
    assert captured(checkpoint(tmp_path / "model"), prompts, tmp_path / "o.npz") == 0
    assert Trace.load(tmp_path / "o.npz").domain.tolist() == ["p\ufffd"]


@pytest.mark.parametrize(
    "odd", [float("nan"), -float("inf"), "a\ud800b", b"\xff", {1: {2.5, 3.5}}, [{"x": (float("inf"),)}], np.float32(2)]
)
def test_whatever_a_configuration_holds_can_be_stored(odd):
    check_meta({"schema": 1, "model": {"name": "m", "experts": 1, "top_k": 1, "config": in_words({"odd": odd})}})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("{", "no record of training"),
        ("[1]", "no record of training"),
        ('{"topology": {"name": 3}, "training": {}}', "no record of training"),
        (json.dumps({"topology": {"name": "a\nb"}, "training": {}}), "meta.model.name"),
    ],
)
def test_what_a_trace_cannot_hold_is_refused_before_anything_is_run(record, said, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "model")
    (folder / "training.json").write_text(record)
    (tmp_path / "p.txt").write_text("the court\n")
    monkeypatch.setattr("traces.capture.domain_run.run_batch", lambda *_, **__: pytest.fail("a forward pass"))
    with pytest.raises(InputError, match=said) as caught:
        capture_prompts(folder, tmp_path / "p.txt", tmp_path / "o.npz", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("embedding", "basis", "said"),
    [
        ("auto", (16, 4), "the basis is for 16 hidden units and 4 levels; expected 32 and 4"),
        ("auto", (32, 9), "the basis is for 32 hidden units and 9 levels; expected 32 and 4"),
        ("96x3", None, "embedding 96x3: dims lie in 2..32"),
        ("8x40", None, "embedding 8x40: dims lie in 2..32, bits in 2..8"),
    ],
)
def test_an_embedding_that_does_not_go_with_the_model_is_refused_before_anything_is_run(
    embedding, basis, said, tmp_path, monkeypatch
):
    if basis:
        hidden, levels = basis
        Basis(np.eye(hidden, 8, dtype=np.float32), np.ones(levels, np.float32), 4).save(tmp_path / "basis.npz")
    (tmp_path / "p.txt").write_text("the court\n")
    monkeypatch.setattr("traces.capture.domain_run.run_batch", lambda *_, **__: pytest.fail("a forward pass"))
    with pytest.raises(InputError, match=said):
        capture_prompts(
            checkpoint(tmp_path / "model"), tmp_path / "p.txt", tmp_path / "o.npz", device="cpu", embedding=embedding,
            basis_path=tmp_path / "basis.npz",
        )  # fmt: skip


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_one_line():
    model = decoder("mixtral")
    with pytest.raises(InputError, match=r"tokenizer gives token 64, and the model embeds tokens 0 to 63"):
        run(model, [[5, 64], [9]])
    with pytest.raises(InputError, match=r"tokenizer gives token 70"):
        list(passes(model, [Prompt([5], [7, 70], 0)], 4, Decoding("teacher-forced"), 2, set()))


def test_a_padding_token_beyond_the_embeddings_pads_all_the_same():
    model = without_end(decoder("mixtral"))
    plain = arrays(model)
    with ExitStack() as hooks:
        found = {part: hooks.enter_context(one) for part, one in recorders(model).items()}
        given = [Prompt(ids, [12, 13, 14, 15], number) for number, ids in enumerate(PROMPTS)]
        padded = run_batch(found, given, 5, Decoding("greedy"), 64, set())[""].arrays
    assert all((padded[name] == plain[name]).all() for name in plain)


def test_nothing_but_the_line_is_said_where_transformers_warns_of_a_configuration(tmp_path, monkeypatch):
    """The frequencies of Phi-3.5-MoE's positions have fields of its own, of which transformers warns."""
    folder = checkpoint(tmp_path / "model", "phimoe", **SCALED["longrope with the cache dropped"][1])
    said = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    logging.getLogger("transformers").addHandler(handler)
    try:
        for read in (skeleton, load_tokenizer):
            transformers.utils.logging.warning_once.cache_clear()
            read(folder)
        assert not said
        transformers.AutoConfig.from_pretrained(folder)
        assert said
    finally:
        logging.getLogger("transformers").removeHandler(handler)
