"""Run prompts through a causal language model as a server would: one batched prefill, then one token a step."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import InputError

if TYPE_CHECKING:
    import torch

MODES = ("sampled", "greedy", "teacher-forced")


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen: the most likely, drawn from the model, or read from the given response.

    Sampling uses ``temperature`` and keeps the most likely tokens that make up ``top_p``; a sequence's draws depend on
    ``seed`` and the sequence alone, not on the batch it is in.
    """

    mode: str = "sampled"
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"decoding mode {self.mode!r}; one of {', '.join(MODES)}")
        if not 0 < self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise InputError(f"temperature {self.temperature}, top_p {self.top_p}; both above 0, top_p at most 1")


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, those of its known response, and the number that seeds its draws."""

    ids: list[int]
    response: list[int]
    number: int


@dataclass(frozen=True)
class Pass:
    """One forward pass of a batch: token ids (B, N), the rows that count (B, N), and each one's position."""

    ids: "torch.Tensor"
    valid: "torch.Tensor"
    position: "torch.Tensor"
    prefill: bool


def passes(
    model: Any, prompts: list[Prompt], new_tokens: int, decoding: Decoding, pad: int, eos: set[int]
) -> Iterator[Pass]:
    """Yield each forward pass right after it ran: the left-padded prompts, then one row a sequence and step.

    A sequence that gets n new tokens has n - 1 decode rows: the last token chosen is never run. EOS is such a last
    token. Passes go on until every sequence has ended; rows of padding and of ended sequences are not valid.
    """
    import torch

    device = model.device
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[pad] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], device=device)
    valid = torch.tensor(
        [[False] * (longest - len(prompt.ids)) + [True] * len(prompt.ids) for prompt in prompts], device=device
    )
    position = (valid.cumsum(1) - 1).clamp(min=0)
    cache_name, cache = _new_cache(model)
    draws = _draws(prompts, new_tokens, decoding.seed)
    mask, alive, prefill = valid, torch.ones(len(prompts), dtype=torch.bool, device=device), True
    for step in range(new_tokens):
        output = model(
            input_ids=ids, attention_mask=mask.long(), position_ids=position, use_cache=True, **{cache_name: cache}
        )
        yield Pass(ids, valid, position, prefill)
        chosen = _choose(output.logits[:, -1].float(), prompts, step, decoding, draws[:, step])
        ended = torch.tensor([int(token) in eos for token in chosen.tolist()], device=device)
        if decoding.mode == "teacher-forced":
            ended |= torch.tensor([step + 1 >= len(prompt.response) for prompt in prompts], device=device)
        alive = alive & ~ended
        # new_tokens are chosen in steps 0 to new_tokens - 1; the last of them is not run.
        if step + 1 == new_tokens or not bool(alive.any()):
            return
        ids = torch.where(alive, chosen, pad).unsqueeze(1)
        valid, position, prefill = alive.unsqueeze(1), position[:, -1:] + 1, False
        mask = torch.cat([mask, torch.ones_like(valid)], dim=1)


def _choose(
    logits: "torch.Tensor", prompts: list[Prompt], step: int, decoding: Decoding, draw: np.ndarray
) -> "torch.Tensor":
    """The next token (B,) of each sequence."""
    import torch

    if decoding.mode == "teacher-forced":
        return torch.tensor(
            [(p.response[step] if step < len(p.response) else 0) for p in prompts], device=logits.device
        )
    if decoding.mode == "greedy":
        return logits.argmax(dim=-1)
    probs, order = torch.softmax(logits / decoding.temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    probs = torch.where(before < decoding.top_p, probs, 0.0)
    reached = probs.cumsum(dim=-1)
    target = torch.as_tensor(draw, device=logits.device, dtype=reached.dtype) * reached[:, -1]
    place = (reached <= target.unsqueeze(1)).sum(dim=-1).clamp(max=int(logits.shape[-1]) - 1)
    # A draw at the very end of the range must not reach a token that top_p cut off.
    place = torch.minimum(place, (before < decoding.top_p).sum(dim=-1) - 1)
    return order.gather(1, place.unsqueeze(1)).squeeze(1)


def _draws(prompts: list[Prompt], steps: int, seed: int) -> np.ndarray:
    """Uniform draws (B, steps), a row from the seed and the prompt's own number."""
    return np.stack([np.random.default_rng([seed, prompt.number]).random(steps) for prompt in prompts])


def _new_cache(model: Any) -> tuple[str, Any]:
    """An empty KV cache and the name that this model's forward gives it (transformers renamed it in 5.2x)."""
    from transformers import DynamicCache

    names = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in names), None)
    if name is None:
        raise InputError(f"{type(model).__name__} takes no KV cache; only decoder models are captured")
    return name, DynamicCache(config=model.config)
