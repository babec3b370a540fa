"""A schedule that regroups tokens, executed on real models: each sequence says what it says alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from sim.schedules.grouping import Regroup
from sim.schedules.lockstep import lockstep
from tests.support import tiny_families, tiny_moe
from tests.support.kv_rows import KvRows, merge, reindex
from tests.support.strategies import make_trace
from traces.capture.positions import cache_name
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

PROMPTS = [[5, 9, 11], [7, 8], [20, 6, 5, 13, 9], [30], [12, 14, 15, 16], [9, 9, 4]]
LENGTHS = [5, 6, 3, 6, 4, 5]
"""Decode rows of each sequence: ragged ends."""


class Decoder:
    """A decoder-only model: prompts with their cache, then a token of each sequence of a batch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, sequence: int) -> tuple[int, KvRows]:
        ids = torch.tensor([PROMPTS[sequence]])
        cache = DynamicCache()
        output = self.model(input_ids=ids, use_cache=True, **{cache_name(self.model): cache})
        return int(output.logits[0, -1].argmax()), KvRows(cache, [sequence], torch.ones_like(ids) > 0)

    def step(self, rows: KvRows, tokens: list[int]) -> list[int]:
        valid = torch.cat([rows.valid, torch.ones(len(tokens), 1, dtype=torch.bool)], dim=1)
        output = self.model(
            input_ids=torch.tensor(tokens)[:, None], attention_mask=valid.long(), use_cache=True,
            position_ids=valid.sum(dim=1, keepdim=True) - 1, **{cache_name(self.model): rows.cache},
        )  # fmt: skip
        rows.valid = valid
        return [int(one) for one in output.logits[:, -1].argmax(dim=-1)]


class EncoderDecoder:
    """The same of an encoder-decoder model: its encoder reads the prompt, its decoder begins with one token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, sequence: int) -> tuple[int, KvRows]:
        ids = torch.tensor([PROMPTS[sequence]])
        start = torch.tensor([[self.model.config.decoder_start_token_id]])
        encoded = self.model.get_encoder()(input_ids=ids)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        rows = KvRows(cache, [sequence], torch.ones_like(start) > 0, torch.ones_like(ids) > 0)
        named = {cache_name(self.model): cache}
        output = self.model(encoder_outputs=encoded, decoder_input_ids=start, use_cache=True, **named)
        return int(output.logits[0, -1].argmax()), rows

    def step(self, rows: KvRows, tokens: list[int]) -> list[int]:
        assert rows.read is not None
        valid = torch.cat([rows.valid, torch.ones(len(tokens), 1, dtype=torch.bool)], dim=1)
        states = torch.zeros(*rows.read.shape, self.model.config.d_model)  # what it says is cached
        output = self.model(
            encoder_outputs=MoEModelOutput(states), attention_mask=rows.read.long(), use_cache=True,
            decoder_input_ids=torch.tensor(tokens)[:, None], decoder_attention_mask=valid.long(),
            **{cache_name(self.model): rows.cache},
        )  # fmt: skip
        rows.valid = valid
        return [int(one) for one in output.logits[:, -1].argmax(dim=-1)]


def alone(model: Any, sequence: int) -> list[int]:
    """The tokens that a sequence says without others."""
    token, rows = model.prefill(sequence)
    said = [token]
    for _ in range(LENGTHS[sequence]):
        said += model.step(rows, said[-1:])
    return said


def regrouped(model: Any, trace: Trace, way: Regroup) -> tuple[list[list[int]], int]:
    """The tokens that each sequence says as the schedule has it, and how many rows changed their batch."""
    schedule = lockstep(trace, 2, way)
    said: list[list[int]] = [[] for _ in PROMPTS]
    batches: list[KvRows] = []
    for step, phase in enumerate(schedule.phase.tolist()):
        rows = schedule.rows[schedule.offsets[step] : schedule.offsets[step + 1]]
        wanted = list(dict.fromkeys(trace.sequence[rows].tolist()))
        if phase == PREFILL:
            token, fresh = model.prefill(wanted[0])
            said[wanted[0]].append(token)
            batches.append(fresh)
            continue
        touched = [one for one in batches if set(one.sequences) & set(wanted)]
        whole = merge(touched)
        left = [one for one in whole.sequences if one not in wanted]
        others = [one for one in batches if one not in touched]
        running = reindex(whole, wanted)
        batches = [*others, running, *([reindex(whole, left)] if left else [])]
        for sequence, token in zip(wanted, model.step(running, [said[one][-1] for one in wanted]), strict=True):
            said[sequence].append(token)
    assert schedule.moved is not None
    return said, int(schedule.moved.sum())


def rows_of(seed: int) -> Trace:
    """The rows that the model runs, with any predictions."""
    before = [len(prompt) for prompt in PROMPTS]
    phase = np.concatenate([np.repeat([PREFILL, DECODE], pair) for pair in zip(before, LENGTHS, strict=True)])
    sequence = np.repeat(np.arange(len(PROMPTS)), np.add(before, LENGTHS))
    routes = np.random.default_rng(seed).integers(0, 8, (len(phase), 3, 1)).astype(np.int16)
    return make_trace(
        routes, n_experts=8, phase=phase, sequence=sequence, predicted_experts=routes,
        predicted_probs=np.full(routes.shape, 9, np.uint8), meta={"predictor": {"sha256": "1" * 64}},
        domain=["general"] * len(PROMPTS), split=["eval"] * len(PROMPTS),
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [lambda: Decoder(tiny_moe.mixtral()), lambda: EncoderDecoder(tiny_families.switch())],
    ids=["mixtral", "switch"],
)
def test_each_sequence_says_what_it_says_alone(make: Callable[[], Any]) -> None:
    model = make()
    with torch.inference_mode():
        expected = [alone(model, sequence) for sequence in range(len(PROMPTS))]
        assert len({tuple(one) for one in expected}) > 1, "a model that says one thing shows nothing"
        for seed, way in enumerate(("kmeans", "random", "none")):
            said, moved = regrouped(model, rows_of(seed), way)  # type: ignore[arg-type]
            assert said == expected
            assert moved > 0 or way == "none"
