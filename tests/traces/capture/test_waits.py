"""How often a capture waits for the device: a bound that hangs on neither the layers nor, but once, on the steps."""

import sys
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from ground.errors import InputError
from tests.support.tiny_moe import mixtral
from traces.capture.batches import run_batch
from traces.capture.capture import Amount
from traces.capture.corpora import DomainText, TextRow
from traces.capture.decoding import Decoding, Prompt
from traces.capture.domain_run import DomainRun
from traces.capture.recorder import Recorder, recorders

WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__getitem__")


def waits(monkeypatch, layers, new_tokens, decoding):
    """What the code of captures itself called of these, in a batch of three sequences."""
    counted = Counter()
    model = mixtral(layers=layers)
    given = [Prompt([5, 9, 14 + number], [], number) for number in range(3)]
    with monkeypatch.context() as patched, Recorder(model) as recorder:
        for name in WAITS:
            plain = getattr(torch.Tensor, name)

            def counting(tensor, *more, name=name, plain=plain, **named):
                masked = any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in more)
                if (name != "__getitem__" or masked) and "/traces/capture/" in sys._getframe(1).f_code.co_filename:
                    counted[name] += 1
                return plain(tensor, *more, **named)

            patched.setattr(torch.Tensor, name, counting)
        run_batch({"": recorder}, given, new_tokens, decoding, 2, set())
    return counted


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_step_waits_once_however_many_layers_there_are(mode, monkeypatch):
    found = waits(monkeypatch, 2, 5, Decoding(mode))
    assert found == waits(monkeypatch, 6, 5, Decoding(mode))
    longer = waits(monkeypatch, 2, 12, Decoding(mode))
    assert longer - found == Counter(tolist=7)


def test_a_change_in_a_late_pass_is_named_though_checks_come_at_the_end():
    model = mixtral()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    experts, calls = model.model.layers[1].mlp.experts, []

    def swap(module, inputs):
        calls.append(0)
        return (inputs[0], inputs[1].flip(1), inputs[2]) if len(calls) == 5 else inputs

    experts.register_forward_pre_hook(swap)
    with Recorder(model) as recorder, pytest.raises(InputError, match="layer 1: the experts that ran are not those of"):
        run_batch({"": recorder}, [Prompt([5, 9], [], 0)], 9, Decoding("greedy"), 2, set())
    assert len(calls) == 9


def test_a_recorder_forgets_a_batch_that_failed():
    model = mixtral()
    with Recorder(model) as recorder:
        before = run_batch({"": recorder}, [Prompt([5, 9], [], 0)], 4, Decoding("greedy"), 2, set())[""]
        spoil = model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))
        with pytest.raises(InputError, match="NaN"):
            run_batch({"": recorder}, [Prompt([5, 9, 3], [], 0)], 4, Decoding("greedy"), 2, set())
        spoil.remove()
        after = run_batch({"": recorder}, [Prompt([5, 9], [], 0)], 4, Decoding("greedy"), 2, set())[""]
    assert all(np.array_equal(before.arrays[name], after.arrays[name]) for name in before.arrays)


class Ids:
    pad_token_id = eos_token_id = None

    def __init__(self):
        self.calls = 0

    def __call__(self, text, **_):
        self.calls += 1
        return {"input_ids": [3 + int(word) for word in text.split()]}

    def decode(self, ids):
        return ""


def captured(amount, count=20, ends=True):
    """Rows of a domain, and how many sequences each batch held."""
    model, held = mixtral(), []
    if not ends:
        model.config.eos_token_id = model.generation_config.eos_token_id = None
    rows = [TextRow("law", "law", "MIT", f"{i % 50} {3 * i % 50} {7 * i % 50}", "") for i in range(2 * count)]
    model.register_forward_pre_hook(
        lambda module, inputs, named: held.append(len(named["input_ids"])) if named["input_ids"].shape[1] > 1 else None,
        with_kwargs=True,
    )
    text = DomainText("law", train=[], profile=rows[:count], eval=rows[count:], about="")
    with recorders(model)[""] as recorder:
        return DomainRun({"": recorder}, Ids(), amount, Decoding("greedy"), "plain").domain(text)[""], held


def test_one_batch_may_hold_both_splits_and_their_rows_are_those_of_batches_of_one():
    together, held = captured(Amount(None, None, 1, 9, 5, 8), count=10)
    alone, each = captured(Amount(None, None, 1, 9, 5, 1), count=10)
    assert held == [8, 8, 4] and each == [1] * 20
    assert together.sequence_id == alone.sequence_id == [
        f"law-{split}-{number:04d}" for split in ("profile", "eval") for number in range(10)
    ]  # fmt: skip
    for name in ("experts", "lookahead", "token", "sequence", "position", "phase"):
        assert np.array_equal(together.arrays[name], alone.arrays[name]), name
    assert np.abs(together.states - alone.states).max() < 1e-4
    assert np.abs(together.prefill_states - alone.prefill_states).max() < 1e-4


def test_no_more_sequences_are_run_than_can_be_needed():
    """Nine of four decode rows each are 36 rows; two splits wanted 20 and 16."""
    rows, held = captured(Amount(20, 16, 4, 9, 5, 8), ends=False)
    assert held == [8, 1] and rows.split == ["profile"] * 5 + ["eval"] * 4
    rows, held = captured(Amount(20, 4, 3, 9, 5, 16), ends=False)
    assert held == [8] and rows.split == ["profile"] * 5 + ["eval"] * 3
