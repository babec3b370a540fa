"""Run prompts through a causal language model as a server would: one batched prefill, then one token a step."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from ground.foreign_code import running

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
    """One forward pass of a batch: token ids (B, N), the rows that count (B, N), and each one's position.

    ``part`` is "encoder" or "decoder" of a model that has both.
    """

    ids: "torch.Tensor"
    valid: "torch.Tensor"
    position: "torch.Tensor"
    prefill: bool
    part: str = ""


def passes(
    model: Any,
    prompts: list[Prompt],
    new_tokens: int,
    decoding: Decoding,
    pad: int,
    eos: set[int],
    chunk: int | None = None,
) -> Iterator[Pass]:
    """Yield each forward pass right after it ran: the prompts (left-padded), then one row a sequence and step.

    A sequence that gets n new tokens has n - 1 decode rows: the last token chosen is never run. EOS is such a last
    token. Passes go on until every sequence has ended; rows of padding and of ended sequences are not valid. A prompt
    longer than ``chunk`` tokens, alone in its batch, is prefilled in pieces of that length.

    Of an encoder-decoder model the encoder's pass over the prompts comes first; then the decoder starts with one token
    a sequence, which is its prefill, and goes on one token a step.
    """
    part = ""
    if getattr(model.config, "is_encoder_decoder", False):
        # Padding on the right: tokens claim room in an expert in order, and padding must come after those that count.
        ids, valid = _padded(prompts, pad, model.device, left=False)
        with _forward(model):
            encoded = model.get_encoder()(input_ids=ids, attention_mask=valid.long())
        yield Pass(ids, valid, _positions(valid), True, "encoder")
        part, run = "decoder", _decoder_of(model, encoded, valid)
        start = next(i for i in (model.config.decoder_start_token_id, pad) if i is not None)
        prompts = [Prompt([start], prompt.response, prompt.number) for prompt in prompts]
    else:
        run = _decoder_only(model)
    ids, valid = _padded(prompts, pad, model.device, left=True)
    position = _positions(valid)
    while chunk and len(prompts) == 1 and ids.shape[1] > chunk:
        piece = Pass(ids[:, :chunk], valid[:, :chunk], position[:, :chunk], True, part)
        run(piece)
        yield piece
        ids, valid, position = ids[:, chunk:], valid[:, chunk:], position[:, chunk:]
    yield from _steps(prompts, new_tokens, decoding, pad, eos, run, Pass(ids, valid, position, True, part))


def _steps(
    prompts: list[Prompt],
    new_tokens: int,
    decoding: Decoding,
    pad: int,
    eos: set[int],
    run: "Callable[[Pass], torch.Tensor]",
    one: Pass,
) -> Iterator[Pass]:
    """Run the pass ``one``, then choose and run token after token; see :func:`passes`."""
    import torch

    device = one.ids.device
    draws = _draws(prompts, decoding.seed)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(new_tokens):
        logits = run(one)
        yield one
        chosen = _choose(logits[:, -1].float(), prompts, step, decoding, next(draws))
        ended = torch.tensor([int(token) in eos for token in chosen.tolist()], device=device)
        if decoding.mode == "teacher-forced":
            ended |= torch.tensor([step + 1 >= len(prompt.response) for prompt in prompts], device=device)
        alive = alive & ~ended
        # new_tokens are chosen in steps 0 to new_tokens - 1; the last of them is not run.
        if step + 1 == new_tokens or not bool(alive.any()):
            return
        ids = torch.where(alive, chosen, pad).unsqueeze(1)
        one = Pass(ids, alive.unsqueeze(1), one.position[:, -1:] + 1, False, one.part)


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


def _draws(prompts: list[Prompt], seed: int) -> Iterator[np.ndarray]:
    """Uniform draws (B,), step after step; each sequence's from the seed and the prompt's own number."""
    sources = [np.random.default_rng([seed, prompt.number]) for prompt in prompts]
    while True:
        yield np.array([source.random() for source in sources])


def _padded(prompts: list[Prompt], pad: int, device: Any, left: bool) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids (B, N) of prompts padded to one length, and which of them count."""
    import torch

    longest = max(len(prompt.ids) for prompt in prompts)
    rows, counts = [], []
    for prompt in prompts:
        fill = longest - len(prompt.ids)
        pads, real = [pad] * fill, [True] * len(prompt.ids)
        rows.append(pads + prompt.ids if left else prompt.ids + pads)
        counts.append([False] * fill + real if left else real + [False] * fill)
    return torch.tensor(rows, device=device), torch.tensor(counts, device=device)


def _positions(valid: "torch.Tensor") -> "torch.Tensor":
    """Place (B, N) of each token in its sequence, padding left out."""
    return (valid.cumsum(1) - 1).clamp(min=0)


def _decoder_only(model: Any) -> "Callable[[Pass], torch.Tensor]":
    """Runs passes of a decoder-only model one after another; gives logits (B, any, V), the last column those needed."""
    import torch

    cache_name, cache = new_cache(model)
    # Logits of a whole prompt over a large vocabulary would dwarf everything else in memory.
    named = inspect.signature(model.forward).parameters
    options = {cache_name: cache} | ({"logits_to_keep": 1} if "logits_to_keep" in named else {})
    mask: list[torch.Tensor] = []

    def run(one: Pass) -> "torch.Tensor":
        # A sequence that has ended goes on attending: its rows do not count, and a row of no attention would be NaN.
        mask.append(one.valid if one.prefill else torch.ones_like(one.valid))
        whole = torch.cat(mask, dim=1).long()
        with _forward(model):
            return model(
                input_ids=one.ids, attention_mask=whole, position_ids=one.position, use_cache=True, **options
            ).logits

    return run


def _decoder_of(model: Any, encoded: Any, valid: "torch.Tensor") -> "Callable[[Pass], torch.Tensor]":
    """Runs passes of an encoder-decoder model's decoder after its encoder."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache_name, _ = new_cache(model)
    cache = EncoderDecoderCache(DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache())
    options = {"encoder_outputs": encoded, "attention_mask": valid.long(), cache_name: cache}

    def run(one: Pass) -> "torch.Tensor":
        with _forward(model):
            return model(decoder_input_ids=one.ids, use_cache=True, **options).logits

    return run


def _forward(model: Any) -> AbstractContextManager[None]:
    """Around a forward pass: what the model (or an adapter that reads its routers) raises is one line."""
    remedy = "a smaller --batch or --chunk or --device spread may help"
    return running(type(model).__name__, "its forward pass failed", remedy)


def new_cache(model: Any) -> tuple[str, Any]:
    """An empty KV cache and the name that this model's forward gives it (transformers renamed it in 5.2x)."""
    from transformers import DynamicCache

    names = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in names), None)
    if name is None:
        raise InputError(f"{type(model).__name__} takes no KV cache; a model that generates text is needed")
    return name, DynamicCache(config=model.config)
