import dataclasses
import json
import os

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file, save_file

from ground.errors import InputError
from tests.support.tiny_moe import llama, mixtral, tokenizer, write_corpora
from traces.__main__ import main
from traces.capture.batches import prefill_level, run_batch
from traces.capture.capture import Amount, capture
from traces.capture.checkpoint import end_tokens, load_model, unchanged, weight_bytes
from traces.capture.decoding import Decoding, Prompt, passes
from traces.capture.recorder import Recorder
from traces.capture.routers import routed_layers
from traces.trace import Trace

GREEDY = Decoding(mode="greedy")
PROMPTS = [[5, 9, 14], [22, 7, 30, 41, 11], [8, 8, 19, 27], [33, 6]]


def run(model, prompts=PROMPTS, new_tokens=6, decoding=GREEDY, words=None):
    """Arrays of one batch, states of decode rows and of prefill rows."""
    words = words or tokenizer()
    given = [Prompt(ids, [12, 13, 14, 15], number) for number, ids in enumerate(prompts)]
    with Recorder(model) as recorder:
        return unpacked(run_batch({"": recorder}, given, new_tokens, decoding, **ends(model, words)))


def ends(model, words):
    pad = next((i for i in (words.pad_token_id, words.eos_token_id) if i is not None), 0)
    return {"pad": pad, "eos": end_tokens(model, words)}


def unpacked(parts):
    rows = parts[""]
    return rows.arrays, rows.states.float().numpy(), rows.prefill_states.float().numpy(), rows.odd["tied"]


def without_end(model):
    """The same model, never ending a sequence."""
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def no_end_words():
    words = tokenizer()
    words.eos_token = None
    return words


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    mixtral().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def small(**more):
    return Amount(**{"profile_tokens": 30, "eval_tokens": 6, "eval_sequences": 2, "batch": 4, "new_tokens": 6} | more)


def test_six_prompt_tokens_and_four_new_ones_are_nine_rows():
    """Seen in huggingface/transformers#26174, vllm-project/vllm#28284:
    the prompt comes whole, the last token is never run.
    """
    arrays, states, prefill_states, _ = run(
        without_end(mixtral()), [[4, 5, 6, 7, 8, 9]], new_tokens=4, words=no_end_words()
    )
    assert arrays["phase"].tolist() == [0] * 6 + [1] * 3
    assert arrays["position"].tolist() == list(range(9))
    assert states.shape == (3, 4, 32) and prefill_states.shape == (6, 32)


def test_rows_are_those_of_generate():
    model = without_end(mixtral())
    arrays, *_ = run(model, new_tokens=5, words=no_end_words())
    for number, ids in enumerate(PROMPTS):
        said = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert arrays["token"][arrays["sequence"] == number].tolist() == said[0, :-1].tolist()


def test_ids_are_those_that_an_independent_record_of_the_experts_shows():
    model = without_end(mixtral())
    used = [[] for _ in range(3)]
    handles = [
        routed.experts.register_forward_pre_hook(lambda module, inputs, kept=kept: kept.append(inputs[1].clone()))
        for routed, kept in zip(routed_layers(model), used, strict=True)
    ]
    arrays, *_ = run(model, [PROMPTS[1]], words=no_end_words())
    for handle in handles:
        handle.remove()
    assert (arrays["experts"] == torch.stack([torch.cat(kept) for kept in used], dim=1).numpy()).all()


def test_padding_is_never_counted():
    """Seen in huggingface/transformers#28505, #28517: padding was counted among the router's statistics."""
    arrays, *_ = run(mixtral(), PROMPTS[:2], new_tokens=1)
    assert len(arrays["experts"]) == 3 + 5
    counts = [np.bincount(arrays["experts"][:, layer].ravel(), minlength=8).sum() for layer in range(3)]
    assert counts == [8 * 2] * 3


def test_a_genuine_end_token_in_a_prompt_is_kept_when_padding_is_the_same_token():
    """Seen in pytorch/torchtitan#4168: padding that is the end token looks like real load to a router."""
    words = tokenizer()
    words.pad_token = words.eos_token
    arrays, *_ = run(mixtral(), [[5, 9, 1], [22, 7, 30, 41, 11]], new_tokens=1, words=words)
    assert arrays["token"].tolist() == [5, 9, 1, 22, 7, 30, 41, 11]


def test_a_tokenizer_without_padding_serves_one_and_many():
    """Seen in delphi-suite/delphi#132: a tokenizer had no padding token."""
    words = tokenizer(pad=None)
    assert words.pad_token_id is None
    one, *_ = run(mixtral(), PROMPTS[:1], words=words)
    two, *_ = run(mixtral(), PROMPTS[:2], words=words)
    assert (two["experts"][two["sequence"] == 0] == one["experts"]).all()


@pytest.mark.parametrize("decoding", [GREEDY, Decoding(seed=3), Decoding(mode="teacher-forced")], ids=lambda d: d.mode)
def test_a_batch_of_one_equals_a_padded_batch(decoding):
    model = mixtral()
    together, states, prefill_states, _ = run(model, decoding=decoding)
    decode = together["phase"] == 1
    for number, ids in enumerate(PROMPTS):
        with Recorder(model) as recorder:
            prompt = Prompt(ids, [12, 13, 14, 15], number)
            one = run_batch({"": recorder}, [prompt], 6, decoding, **ends(model, tokenizer()))
            alone, own_states, own_prefill, _ = unpacked(one)
        mine = together["sequence"] == number
        for name in ("experts", "lookahead", "token", "position", "phase"):
            assert (together[name][mine] == alone[name]).all(), name
        assert np.abs(states[mine[decode]] - own_states).max(initial=0) < 1e-4
        assert np.abs(prefill_states[mine[~decode]] - own_prefill).max() < 1e-4


def test_an_ended_sequence_has_no_more_rows():
    model = mixtral()
    arrays, *_ = run(model, new_tokens=8)
    said = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False)[0, len(PROMPTS[0]) :].tolist()
    ends = said.index(1) if 1 in said else 7
    assert ((arrays["sequence"] == 0) & (arrays["phase"] == 1)).sum() == ends
    # Let every token end a sequence: the first one chosen is the last, and none is ever run.
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    arrays, states, *_ = run(model, new_tokens=8)
    assert not (arrays["phase"] == 1).any() and states.shape == (0, 4, 32)


def test_teacher_forcing_runs_the_given_response_but_its_last_token():
    arrays, *_ = run(mixtral(), new_tokens=10, decoding=Decoding(mode="teacher-forced"))
    for number, ids in enumerate(PROMPTS):
        assert arrays["token"][arrays["sequence"] == number].tolist() == [*ids, 12, 13, 14]


def test_sampling_follows_its_seed():
    texts = [run(mixtral(), decoding=Decoding(seed=seed))[0]["token"].tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_draws_of_a_sequence_are_those_of_its_number_however_many_tokens_may_come():
    from traces.capture.decoding import _draws

    prompts = [Prompt([1], [], number) for number in (0, 7)]
    draws = _draws(prompts, 3)
    whole = np.stack([np.random.default_rng([3, prompt.number]).random(50) for prompt in prompts])
    assert np.array_equal(np.stack([next(draws) for _ in range(50)], axis=1), whole)
    steps = passes(mixtral(), [Prompt([5, 9], [], 0)], 10**18, Decoding("greedy"), 2, set())
    assert len([next(steps) for _ in range(3)]) == 3


@pytest.mark.parametrize("found", ["shape", "absent"])
def test_a_checkpoint_whose_weights_would_be_made_up_is_one_line(found, tmp_path, capfd):
    mixtral().save_pretrained(tmp_path)
    if found == "shape":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
        said = "lm_head.weight is 64 x 32; expected 65 x 32 by config.json"
    else:
        weights = load_file(tmp_path / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if "layers.1.input_layernorm" not in name}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        said = "its files lack 1 tensors, model.layers.1.input_layernorm.weight is one; expected all of them"
    capfd.readouterr()
    with pytest.raises(InputError, match=f"^{tmp_path}: {said}$"):
        load_model(tmp_path, device="cpu")
    assert capfd.readouterr() == ("", "")


def test_the_bytes_of_a_checkpoint_are_those_of_its_weights(tmp_path):
    model = mixtral()
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    for shard in ("1GB", "100KB"):
        model.save_pretrained(tmp_path / shard, max_shard_size=shard)
        assert size <= weight_bytes(tmp_path / shard) <= size + 20_000
    assert len(list((tmp_path / "100KB").glob("*.safetensors"))) > 1
    (tmp_path / "100KB/model.safetensors.index.json").write_text("[]")
    assert weight_bytes(tmp_path / "100KB") == 0


def test_sampling_draws_with_the_model_s_probabilities_and_never_outside_top_p():
    from traces.capture.decoding import _choose

    logits = torch.log(torch.tensor([[0.1, 0.5, 0.4]])).repeat(4000, 1)
    draws = np.random.default_rng(0).random(4000)
    whole = _choose(logits, [], 0, Decoding(temperature=1.0, top_p=1.0), draws)
    assert torch.bincount(whole, minlength=3).numpy() / 4000 == pytest.approx([0.1, 0.5, 0.4], abs=0.03)
    cut = _choose(logits, [], 0, Decoding(temperature=1.0, top_p=0.8), np.append(draws[1:], 1.0))
    assert torch.bincount(cut, minlength=3).numpy() / 4000 == pytest.approx([0, 5 / 9, 4 / 9], abs=0.03)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_of_running_experts_is_captured(implementation, dtype):
    model = mixtral().to(dtype)
    model.set_experts_implementation(implementation)
    arrays, states, *_ = run(model, new_tokens=4)
    assert arrays["experts"].shape[1:] == (3, 2)
    assert np.isfinite(states).all()
    if dtype == torch.float32:
        reference, *_ = run(mixtral(), new_tokens=4)
        assert (arrays["experts"] == reference["experts"]).all()


def test_gates_and_probabilities_are_those_of_the_routers():
    arrays, states, *_ = run(mixtral(), new_tokens=4)
    decode = arrays["phase"] == 1
    for index, routed in enumerate(routed_layers(mixtral())):
        probs = torch.softmax(torch.from_numpy(states[:, 1 + index]) @ routed.router.weight.T, dim=-1).detach().numpy()
        assert np.abs(arrays["probs"][decode, index] / 255 - probs).max() <= 0.5 / 255 + 1e-6
        chosen = np.take_along_axis(probs, arrays["experts"][decode, index].astype(int), axis=1)
        assert arrays["gates"][decode, index] == pytest.approx(chosen / chosen.sum(axis=1, keepdims=True), abs=1e-3)


def test_look_ahead_applies_the_next_router_to_this_layer_s_input():
    arrays, states, *_ = run(mixtral(), new_tokens=4)
    ahead = arrays["lookahead"][arrays["phase"] == 1]
    layers = routed_layers(mixtral())
    for index in range(2):
        scores = torch.from_numpy(states[:, 1 + index]) @ layers[index + 1].router.weight.T
        assert (ahead[:, index] == scores.topk(2).indices.numpy()).all()
    assert (ahead[:, 2] == -1).all()


def test_a_bypassed_router_is_an_error_naming_its_layer():
    """Seen in vllm-project/vllm#57793: a hook on a bypassed router captured nothing and said nothing."""
    model = mixtral()
    block = model.model.layers[1].mlp

    def fused(hidden):
        flat = hidden.view(-1, hidden.shape[-1])
        probs = torch.softmax(torch.nn.functional.linear(flat, block.gate.weight).float(), dim=-1)
        weights, ids = probs.topk(2)
        return block.experts(flat, ids, weights).reshape(hidden.shape)

    block.forward = fused
    with pytest.raises(InputError, match=r"layer 1 captured 0 rows of 20 \(model.layers.1.mlp.gate"):
        run(model)


def test_experts_that_are_not_the_router_s_are_an_error():
    model = mixtral()
    experts = model.model.layers[2].mlp.experts
    forward = experts.forward
    experts.register_forward_pre_hook(lambda module, inputs: (inputs[0], inputs[1].flip(1) * 0 + 3, inputs[2]))
    experts.forward = forward
    with pytest.raises(InputError, match="layer 2: the experts that ran are not those of its router"):
        run(model)


def test_a_dense_model_is_refused():
    """Seen in huggingface/trl#7222, huggingface/transformers#48886:
    MoE was told by a config field that DeepSeek lacks.
    """
    with pytest.raises(InputError, match="LlamaForCausalLM: no MoE layer with a known router"):
        Recorder(llama())


def test_jitter_is_off_whatever_mode_the_model_was_left_in():
    """Seen in huggingface/transformers#33969, vllm-project/vllm#35499:
    routers jittered in a model left in training mode.
    """
    model = mixtral(router_jitter_noise=0.4).train()
    one, *_ = run(model)
    model.train()
    two, *_ = run(model)
    assert all((one[name] == two[name]).all() for name in one)
    assert not model.training


def test_ties_are_counted_and_the_ids_are_the_model_s():
    """Seen in pytorch/pytorch#127196, #27542: equal scores have different top-k indices on CPU and GPU."""
    model = without_end(mixtral())
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    arrays, _, _, ties = run(model, words=no_end_words())
    assert ties == len(arrays["experts"])
    assert (arrays["experts"][:, 0] == arrays["experts"][0, 0]).all()


def test_hooks_are_gone_afterwards():
    model = mixtral()
    run(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_capture_is_a_valid_trace_that_says_what_it_is(checkpoint, corpora, tmp_path):
    path = tmp_path / "law.npz"
    capture(checkpoint, corpora, ["law"], path, amount=small(), basis_path=tmp_path / "b.npz", embedding="16x3")
    trace = Trace.load(path)
    assert (trace.n_layers, trace.top_k, trace.n_experts) == (3, 2, 8)
    assert set(trace.split) == {"profile", "eval"} and set(trace.domain) == {"law"}
    decode = trace.phase == 1
    assert (decode & trace.row_split("profile")).sum() >= 30 and (trace.split == "eval").sum() >= 2
    assert trace.embeddings.shape == (decode.sum(), 4, 16)
    assert trace.prefill_embeddings.shape == ((~decode).sum(), 16)
    meta = trace.meta
    assert meta["embedding"]["prefill_layer"] == prefill_level(3) == 1
    assert meta["text"]["licence"] == "CC BY 4.0" and meta["text"]["sources"]
    assert meta["decoding"]["template"] == "plain" and meta["decoding"]["mode"] == "sampled"
    assert meta["captured"]["what"].startswith("MixtralForCausalLM from")
    assert len(meta["captured"]["checkpoint_sha256"]) == 64
    assert meta["model"]["config"]["num_local_experts"] == 8


def test_two_captures_are_equal_to_the_byte(checkpoint, corpora, tmp_path):
    for name in ("one", "two"):
        capture(
            checkpoint, corpora, ["law", "code"], tmp_path / name, amount=small(), embedding="16x3",
            basis_path=tmp_path / name / "basis.npz",
        )  # fmt: skip
    for file in ("law.npz", "code.npz", "basis.npz"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_later_capture_reuses_the_basis(checkpoint, corpora, tmp_path):
    options = {"amount": small(), "basis_path": tmp_path / "basis.npz"}
    capture(checkpoint, corpora, ["law"], tmp_path / "law.npz", embedding="16x3", **options)
    capture(checkpoint, corpora, ["code"], tmp_path / "code.npz", embedding="8x2", **options)
    traces = [Trace.load(tmp_path / f"{domain}.npz") for domain in ("law", "code")]
    assert traces[0].meta["embedding"]["basis_sha256"] == traces[1].meta["embedding"]["basis_sha256"]
    assert Trace.concat(traces).embeddings is not None


def test_embeddings_can_be_left_out(checkpoint, corpora, tmp_path):
    capture(checkpoint, corpora, ["law"], tmp_path / "law.npz", amount=small(), embedding="none")
    trace = Trace.load(tmp_path / "law.npz")
    assert trace.embeddings is None and trace.prefill_embeddings is None and "embedding" not in trace.meta


def test_statistics_and_a_note_when_the_text_runs_out(checkpoint, corpora, tmp_path):
    paths = capture(
        checkpoint, corpora, ["law", "code"], tmp_path, amount=small(profile_tokens=9999), embedding="16x3",
        basis_path=tmp_path / "basis.npz", statistics_path=tmp_path / "routing.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "routing.json").read_text())["routing"]
    assert 0.2 < result["neighbour_recall"]["law"]["law"] <= 1
    assert len(result["entropy_bits"]) == 3 and len(result["adjacent_layer_cosine"]) == 2
    trace = Trace.load(paths[0])
    assert any("profile text ran out" in note for note in trace.meta["notes"])
    # Recomputed from the trace alone.
    rows = np.flatnonzero(trace.row_split("eval") & (trace.phase == 1))
    same = (trace.experts[rows][:, :, :, None] == trace.experts[rows - 1][:, :, None, :]).any(axis=3).mean()
    assert result["previous_token_recall"]["law"] == pytest.approx(same)


def test_the_command_captures_and_wrong_input_is_one_line(checkpoint, corpora, tmp_path, capsys):
    arguments = ["capture", str(checkpoint), "--corpora", str(corpora), "--domain", "law", "-o"]
    sizes = ["--profile-tokens", "8", "--eval-tokens", "3", "--eval-sequences", "1", "--embedding", "none"]
    assert main([*arguments, str(tmp_path / "law.npz"), *sizes]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "law.npz")
    for wrong in ("embedding big", "template odd", "decoding magic", "batch 0", "temperature 1e-38", "top-p 0"):
        assert main([*arguments, str(tmp_path / "x.npz"), *sizes, *f"--{wrong}".split()]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "x.npz").exists()


def test_a_folder_that_is_no_checkpoint_is_refused(corpora, tmp_path):
    with pytest.raises(InputError, match="no checkpoint of a model"):
        capture(tmp_path, corpora, ["law"], tmp_path / "law.npz")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(InputError, match="not a model that can be captured"):
        capture(tmp_path, corpora, ["law"], tmp_path / "law.npz")


@pytest.mark.parametrize("change", ["written", "replaced", "removed", "added"])
def test_weights_that_change_while_they_are_read_are_refused(change, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old weights")
    with unchanged(tmp_path):
        path.read_bytes()
    with pytest.raises(InputError, match=r"\.safetensors: changed while it was read"), unchanged(tmp_path):
        if change == "written":
            path.write_bytes(b"new weights")
        elif change == "replaced":
            (tmp_path / "new").write_bytes(b"old weights")
            (tmp_path / "new").replace(path)
        elif change == "removed":
            path.unlink()
        else:
            (tmp_path / "more.safetensors").touch()


def test_a_capture_of_weights_that_change_leaves_nothing(checkpoint, corpora, tmp_path, monkeypatch):
    def loaded(folder, *_):
        os.utime(next(folder.glob("*.safetensors")))
        return None, None

    monkeypatch.setattr("traces.capture.capture.load", loaded)
    with pytest.raises(InputError, match="changed while it was read"):
        capture(checkpoint, corpora, ["law"], tmp_path / "law.npz")
    assert not list(tmp_path.iterdir())


def test_amounts_must_be_positive():
    with pytest.raises(InputError, match="new_tokens is 0"):
        dataclasses.replace(Amount(), new_tokens=0)
