"""The hidden states of a capture, whole and as stored, against hooks of the test's own."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

import traces.capture.capture
from tests.support.tiny_families import decoder, switch
from tests.support.tiny_moe import WORDS, tokenizer
from traces.capture.capture import Amount, capture_prompts
from traces.capture.checkpoint import load
from traces.capture.decoding import Decoding
from traces.embeddings import Basis
from traces.trace import Trace

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "switch")


def saved(family, folder):
    model = switch() if family == "switch" else decoder(family)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def hooked(model, stack, ids, encoded):
    """(n, L+1, H) of one sequence run whole: the embedding layer's output, then each router's input by layer."""
    routers = [module for module in stack.modules() if type(module).__name__.endswith("Router")]
    kept = [None] * (1 + len(routers))

    def keep(level, tensor):
        kept[level] = tensor.detach().reshape(-1, tensor.shape[-1]).clone()

    handles = [stack.get_input_embeddings().register_forward_hook(lambda module, inputs, output: keep(0, output))]
    for level, router in enumerate(routers, 1):
        hook = router.register_forward_pre_hook(lambda module, inputs, level=level: keep(level, inputs[0]))
        handles.append(hook)
    with torch.inference_mode():
        if encoded is None:
            model(input_ids=torch.tensor([ids]))
        else:
            model(input_ids=torch.tensor([encoded]), decoder_input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(kept, dim=1).numpy()


def check_stored(stored, projected, scale, limits):
    """Each integer is within half a step of its value, or the largest there is with the value beyond it."""
    wide = np.abs(stored * scale - projected) <= scale * 0.501
    cut = (np.abs(stored) == limits) & (projected * np.sign(stored) >= (limits - 0.501) * scale)
    assert (wide | cut).all()
    assert wide.mean() > 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_embedding_layer_s_output_and_the_routers_inputs(family, tmp_path, monkeypatch):
    """Captured in padded batches step by step; hooked in one pass a sequence over the tokens that the trace names."""
    whole = []
    session = traces.capture.capture
    trace_of_domain = session.trace_of_domain
    monkeypatch.setattr(session, "trace_of_domain", lambda one, *more: whole.append(one) or trace_of_domain(one, *more))
    folder = saved(family, tmp_path / "model")
    lines = [" ".join(WORDS[(5 * i + j * j) % len(WORDS)] for j in range(2 + i % 6)) for i in range(12)]
    (tmp_path / "mine.txt").write_text("\n".join(lines) + "\n")
    paths = capture_prompts(
        folder, tmp_path / "mine.txt", tmp_path / "mine.npz", decoding=Decoding(mode="greedy"), embedding="16x4",
        amount=Amount(None, None, prompt_tokens=99, new_tokens=6, batch=5), basis_path=tmp_path / "basis.npz",
    )  # fmt: skip
    trace, encoder = Trace.load(paths[0]), Trace.load(paths[1]) if family == "switch" else None
    (captured,) = [one for one in whole if len(one.states)]
    model, _ = load(folder, device="cpu")
    expected = np.concatenate([
        hooked(
            model, model.decoder if encoder else model, trace.token[trace.sequence == number].tolist(),
            encoder and encoder.token[encoder.sequence == number].tolist(),
        )
        for number in range(trace.n_sequences)
    ])  # fmt: skip
    decode, level = trace.phase == 1, trace.meta["embedding"]["prefill_layer"]
    assert decode.sum() >= 40 and expected.shape[1] == trace.n_layers + 1
    assert np.abs(captured.states - expected[decode]).max() < 1e-4
    assert np.abs(captured.prefill_states - expected[~decode, level]).max() < 1e-4
    basis = Basis.load(tmp_path / "basis.npz")
    projected, scale = expected @ basis.vectors, trace.embedding_scale
    check_stored(trace.embeddings, projected[decode], scale[:, None], basis.limits)
    check_stored(trace.prefill_embeddings, projected[~decode, level], scale[level], basis.limits)
