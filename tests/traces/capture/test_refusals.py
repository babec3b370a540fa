"""Models that cannot be captured: one line that names the model, the place and the reason."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from ground.errors import InputError
from tests.support.tiny_families import decoder, switch
from tests.support.tiny_moe import llama, tokenizer
from tests.traces.capture.test_families import arrays, run
from traces.__main__ import main
from traces.capture.checkpoint import load
from traces.capture.decoding import Decoding
from traces.capture.families import FAMILIES
from traces.capture.recorder import Recorder, recorders
from traces.capture.routers import routed_layers

DEBUG = "MOE_REPLAY_DEBUG"


def packed(gate, name, tensor):
    """The router with its weight in a buffer instead."""
    del gate.weight
    gate.register_buffer(name, tensor)


@pytest.mark.parametrize("name", ["weight", "qweight"])
def test_a_router_packed_into_a_buffer_is_refused(name):
    """Seen in huggingface/transformers#44588, unslothai/unsloth-zoo#850: loading in 4 bits packed routers too."""
    model = decoder("olmoe")
    packed(model.model.layers[1].mlp.gate, name, torch.zeros(8, 4, dtype=torch.int32))
    message = rf"layer 1: router model.layers.1.mlp.gate is quantised \({name} is int32\)"
    with pytest.raises(InputError, match=message):
        Recorder(model)


def test_a_buffer_of_counters_is_no_packed_weight():
    model = decoder("olmoe")
    model.model.layers[1].mlp.gate.register_buffer("seen", torch.zeros(8, dtype=torch.int64))
    assert arrays(model)["experts"].shape[1:] == (3, 2)


@pytest.mark.parametrize("shape", [(8, 16), (4, 32), None])
def test_a_router_whose_weights_have_another_shape_is_refused(shape):
    """Packed as numbers of the model's own type, and unpacked by a forward of its own."""
    model = decoder("olmoe")
    gate = model.model.layers[1].mlp.gate
    whole, forward = gate.weight.detach().clone(), type(gate).forward

    def unpacking(hidden):
        whole_gate = decoder("olmoe").model.layers[1].mlp.gate
        whole_gate.weight = torch.nn.Parameter(whole)
        return forward(whole_gate, hidden)

    gate.forward = unpacking
    packed(gate, "weight" if shape else "codes", torch.zeros(shape or 64))
    said = " x ".join(map(str, shape)) if shape else "not there"
    with pytest.raises(InputError, match=rf"layer 1: router .* is packed \(weight is {said}, expected 8 x 32"):
        arrays(model)


def test_a_router_that_holds_only_buffers_is_captured():
    plain = arrays(decoder("olmoe"))
    model = decoder("olmoe")
    for routed in routed_layers(model):
        packed(routed.router, "weight", routed.router.weight.detach().clone())
    assert not list(routed_layers(model)[1].router.parameters())
    found = arrays(model)
    assert all((found[name] == plain[name]).all() for name in plain)


def failing(model, error):
    """Raise inside the second layer's experts, or inside the encoder's of a Switch."""

    def fail(*_):
        raise error

    part = "encoder" if model.config.is_encoder_decoder else ""
    routed_layers(model, part)[1].experts.register_forward_hook(fail)
    return model


@pytest.mark.parametrize("family", ["olmoe", "switch"])
def test_an_error_inside_the_model_is_one_line(family, monkeypatch):
    monkeypatch.delenv(DEBUG, raising=False)
    model = switch() if family == "switch" else decoder(family)
    name = type(model).__name__
    with pytest.raises(InputError, match=rf"^{name}: its forward pass failed \(KeyError: 'a b'; {DEBUG}=1") as caught:
        run(failing(model, KeyError("a b")))
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(KeyError):
        run(model)


OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_is_named_as_such(error, tmp_path, monkeypatch):
    monkeypatch.delenv(DEBUG, raising=False)
    with pytest.raises(InputError, match=r"^OlmoeForCausalLM: out of memory, a smaller --batch"):
        run(failing(decoder("olmoe"), error))
    decoder("olmoe").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patched, pytest.raises(InputError, match=r": out of memory, --device spread may"):
        patched.setattr(transformers.OlmoeForCausalLM, "to", fail)
        load(tmp_path, device="cpu")
    monkeypatch.setattr(transformers.OlmoeForCausalLM, "_load_pretrained_model", fail)
    with pytest.raises(InputError, match=r": out of memory, --device spread may help"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("stage", ["domain_run.run_batch", "capture.settled_basis"])
def test_memory_that_runs_out_for_what_is_recorded_is_one_line(stage, tmp_path, monkeypatch, capsys):
    decoder("olmoe").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "p.txt").write_text("law\n")

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(f"traces.capture.{stage}", fail)
    command = ["capture", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.txt"), "-o", str(tmp_path / "o.npz")]
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: out of memory for what is recorded, a smaller --batch or --chunk may help (CUDA")
    assert not (tmp_path / "o.npz").exists()


def test_a_device_that_is_not_there_is_one_line(tmp_path, capsys):
    decoder("olmoe").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "p.txt").write_text("law\n")
    command = ["capture", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.txt"), "-o", str(tmp_path / "o.npz")]
    assert main([*command, "--device", "abacus"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "cannot be moved to device 'abacus'" in error
    assert not (tmp_path / "o.npz").exists()


@pytest.mark.parametrize(("token", "place"), [(41, "token 3 of sequence 1"), (None, "token 5 of sequence 1")])
def test_a_router_that_gives_nan_is_named_with_layer_and_token(token, place):
    """In the prompt, by the embedding of its fourth token; in decoding, by that of the first token chosen."""
    model = decoder("mixtral")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    if token is None:
        found = arrays(model, new_tokens=2)
        token = int(found["token"][(found["sequence"] == 1) & (found["position"] == 5)][0])
        assert token not in found["token"][found["phase"] == 0]
        assert (found["token"][found["phase"] == 1] == token).nonzero()[0].tolist() == [1]
    gate = model.model.layers[1].mlp.gate
    marked = model.get_input_embeddings()
    seen = []
    marked.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0] == token))

    def lose(module, inputs, output):
        lost = seen[-1].reshape(-1, 1)
        return tuple(one.masked_fill(lost, float("nan")) if one.is_floating_point() else one for one in output)

    gate.register_forward_hook(lose)
    message = rf"^layer 1: router model.layers.1.mlp.gate gave a value that is not finite in 16 bits, for {place} of"
    with pytest.raises(InputError, match=message):
        run(model)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_logit_that_is_nan_or_infinite_is_refused_where_a_token_is_chosen_by_it(odd, mode):
    """Sampling failed with a traceback, and greedy decoding chose a token all the same."""
    model = decoder("mixtral")
    lost = torch.tensor([0.0, 0.0, odd, 0.0]).reshape(-1, 1)
    spoil = model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + lost.unsqueeze(1))
    with pytest.raises(InputError, match=r"^step 0: sequence 2 of the batch has a logit that is NaN or \+inf"):
        run(model, decoding=Decoding(mode=mode))
    assert run(model, decoding=Decoding(mode="teacher-forced"))
    spoil.remove()
    low = torch.zeros(model.config.vocab_size).index_fill(0, torch.arange(3), -torch.inf)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + low)
    assert run(model, decoding=Decoding(mode=mode))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_checkpoint_whose_last_layer_holds_nan_generates_nothing(mode):
    model = decoder("mixtral")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(InputError, match=r"^step 0: sequence 0 of the batch has a logit that is NaN"):
        run(model, decoding=Decoding(mode=mode))


def test_a_dense_model_is_told_which_families_are_known():
    with pytest.raises(InputError) as one:
        recorders(llama())
    assert len(str(one.value)) < 480 and "docs/capture.md" in str(one.value)
    assert all(family.models and family.models in str(one.value) for family in FAMILIES.values())


def test_a_dense_encoder_decoder_is_told_the_same():
    config = transformers.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(InputError, match=r"no MoE layer with a known router; known are those of Mixtral, .*capture\."):
        recorders(model)
