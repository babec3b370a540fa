"""States that stay on a GPU, spill into a file, or begin in one: the same rows, and the same trace."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from tests.support.tiny_moe import WORDS, mixtral, tokenizer
from traces.capture.capture import Amount, capture_prompts
from traces.capture.decoding import Decoding
from traces.capture.kept_states import KeptStates
from traces.trace import Trace


@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_rows_come_back_in_order_wherever_they_were(room, monkeypatch):
    """``room`` blocks stay where they are given; the next one moves all of them into a file."""
    blocks = [torch.arange(12.0).reshape(2, 2, 3) + 100 * number for number in range(4)]
    monkeypatch.setattr(KeptStates, "_fits", lambda self, rows: len(self._blocks) < room)
    first, second = KeptStates(), KeptStates()
    for block in blocks[:3]:
        first.add(block)
    second.add(blocks[3])
    first.extend(second)
    found = first.read()
    assert isinstance(found, torch.Tensor) == (room > 3)
    assert np.array_equal(np.asarray(found), torch.cat(blocks).numpy())


@pytest.mark.parametrize("embedding", ["16x4", "auto"])
def test_a_trace_is_the_same_whether_states_stay_where_the_model_is_or_not(embedding, tmp_path, monkeypatch):
    model = mixtral()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    lines = [" ".join(WORDS[(5 * i + j * j) % len(WORDS)] for j in range(2 + i % 6)) for i in range(20)]
    (tmp_path / "p.txt").write_text("\n".join(lines) + "\n")
    found = []
    for name in ("file", "device"):
        (path,) = capture_prompts(
            tmp_path / "model", tmp_path / "p.txt", tmp_path / f"{name}.npz", decoding=Decoding("greedy"),
            embedding=embedding, amount=Amount(None, None, prompt_tokens=9, new_tokens=6, batch=8), device="cpu",
            basis_path=tmp_path / f"{name}-basis.npz", statistics_path=tmp_path / f"{name}.json",
        )  # fmt: skip
        found.append((Trace.load(path), json.loads((tmp_path / f"{name}.json").read_text())["routing"]))
        monkeypatch.setattr(KeptStates, "_fits", lambda self, rows: True)
    (one, about), (other, said) = found
    for name in ("experts", "gates", "probs", "lookahead", "token", "sequence", "split"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.meta["embedding"]["dims"] == other.meta["embedding"]["dims"]
    assert np.abs(one.embedding_scale / other.embedding_scale - 1).max() < 1e-3
    # A principal direction has either sign, and so has what is stored along it.
    assert (np.abs(one.embeddings[..., :8]).astype(int) - np.abs(other.embeddings[..., :8])).max() <= 1
    assert about["neighbour_recall"]["p"]["p"] == pytest.approx(said["neighbour_recall"]["p"]["p"], abs=0.01)
