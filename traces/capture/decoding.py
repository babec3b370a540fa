"""Run prompts through a causal language model as a server would: one batched prefill, then one token a step."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from ground.foreign_code import errors_name
from traces.capture.positions import LengthTables, cache_name

if TYPE_CHECKING:
    import torch

MODES = ("sampled", "greedy", "teacher-forced")
LEAST_TEMPERATURE = 1e-6
"""By less logits are not divided: they would be more than float32 holds."""

# What a checkpoint may have been trained with, and what the code here relies on. Outputs of training cost memory, and
# router losses fail on the masks of decoding.
_PLAIN_OUTPUTS = {
    "output_router_logits": False, "output_attentions": False, "output_hidden_states": False, "return_dict": True,
    "torchscript": False,
}  # fmt: skip


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
        if not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            wanted = f"expected {LEAST_TEMPERATURE:g} or more; decoding greedy takes the most likely token"
            raise InputError(f"temperature {self.temperature}; {wanted}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}; expected more than 0, at most 1")


class NoTokenError(InputError):
    """Logits that no token can be chosen by."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, those of its known response, and the number that seeds its draws."""

    ids: list[int]
    response: list[int]
    number: int


@dataclass(frozen=True)
class Pass:
    """One forward pass of a batch: token ids (B, N), the rows that count (B, N), and each one's position.

    A pass that is no ``prefill`` has a row a sequence that counts. ``part`` is "encoder" or "decoder" of a model that
    has both.
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

    Where rotary frequencies depend on length, each sequence routes and goes on as transformers' ``generate`` has it go
    on alone: a batch of several may not pass `LengthTables.limit`, and a sequence that does may be prefilled again, in
    a pass of which the last row alone counts. Outputs of training (losses, router logits) are switched off.

    Raises InputError for a token that the model does not embed, for such a batch, for logits that no token can be
    chosen by (NaN, +inf), and for what the model raises.
    """
    embedded = len(model.get_input_embeddings().weight)
    _refuse_unknown_tokens(model, prompts, embedded)
    pad = pad if pad < embedded else 0  # padding counts nowhere
    _switch_off_training_outputs(model)
    if getattr(model.config, "is_encoder_decoder", False):
        yield from _encoded_passes(model, prompts, new_tokens, decoding, pad, eos)
        return
    tables = LengthTables(model)
    longest = max(len(prompt.ids) for prompt in prompts)
    if len(prompts) > 1 and tables.limit is not None and longest + new_tokens - 1 > tables.limit:
        raise InputError(
            f"{type(model).__name__}: a batch of sequences that may grow over {tables.limit} tokens, where positions "
            f"depend on length; expected each of them alone"
        )
    tables.begin()
    run = _DecoderOnly(model, tables)
    ids, valid = _padded(prompts, pad, model.device, left=True)
    position = _positions(valid)
    while chunk and len(prompts) == 1 and ids.shape[1] > chunk:
        piece = Pass(ids[:, :chunk], valid[:, :chunk], position[:, :chunk], True)
        with tables.as_long_as(longest):
            run(piece)
        yield piece
        ids, valid, position = ids[:, chunk:], valid[:, chunk:], position[:, chunk:]
    yield from _steps(prompts, new_tokens, decoding, pad, eos, run, Pass(ids, valid, position, True))


def _encoded_passes(
    model: Any, prompts: list[Prompt], new_tokens: int, decoding: Decoding, pad: int, eos: set[int]
) -> Iterator[Pass]:
    """The passes of an encoder-decoder model."""
    # Padding on the right: tokens claim room in an expert in order, and padding must come after those that count.
    ids, valid = _padded(prompts, pad, model.device, left=False)
    with _forward(model):
        encoded = model.get_encoder()(input_ids=ids, attention_mask=valid.long())
    yield Pass(ids, valid, _positions(valid), True, "encoder")
    start = next(i for i in (model.config.decoder_start_token_id, pad) if i is not None)
    run = _decoder_of(model, encoded, valid)
    prompts = [Prompt([start], prompt.response, prompt.number) for prompt in prompts]
    ids, valid = _padded(prompts, pad, model.device, left=True)
    first = Pass(ids, valid, _positions(valid), True, "decoder")
    yield from _steps(prompts, new_tokens, decoding, pad, eos, run, first)


def _refuse_unknown_tokens(model: Any, prompts: list[Prompt], embedded: int) -> None:
    """Raise InputError for a token id beyond the ``embedded`` ones of the model."""
    largest = max(max((*prompt.ids, *prompt.response), default=0) for prompt in prompts)
    if largest >= embedded:
        raise InputError(
            f"{type(model).__name__}: the tokenizer gives token {largest}, and the model embeds tokens 0 to "
            f"{embedded - 1}; expected the tokenizer of this very model"
        )


def _switch_off_training_outputs(model: Any) -> None:
    """Have forward passes give what decoding needs, whatever a checkpoint's configuration asks for."""
    for module in model.modules():
        for name, value in _PLAIN_OUTPUTS.items() if hasattr(module, "config") else ():
            if getattr(module.config, name, value) != value:
                setattr(module.config, name, value)


def _steps(
    prompts: list[Prompt],
    new_tokens: int,
    decoding: Decoding,
    pad: int,
    eos: set[int],
    run: "Callable[[Pass], tuple[torch.Tensor, Pass]]",
    one: Pass,
) -> Iterator[Pass]:
    """Run the pass ``one``, then choose and run token after token; see :func:`passes`."""
    import torch

    device = one.ids.device
    draws = _draws(prompts, decoding.seed)
    forced = decoding.mode == "teacher-forced"
    lengths = torch.tensor([len(prompt.response) if forced else sys.maxsize for prompt in prompts], device=device)
    ends = torch.tensor(sorted(eos), dtype=torch.long, device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(new_tokens):
        logits, one = run(one)
        yield one
        last = logits[:, -1].float()
        odd = torch.zeros_like(alive) if forced else alive & ~last.amax(dim=-1).isfinite()
        chosen = _choose(last, prompts, step, decoding, next(draws))
        alive = alive & ~torch.isin(chosen, ends) & (lengths > step + 1)
        # The only wait for the device in a step.
        refused, goes_on = torch.stack((odd.any(), alive.any())).tolist()
        if refused:
            found = f"step {step}: sequence {int(odd.nonzero()[0])} of the batch has a logit that is NaN or +inf"
            raise NoTokenError(f"{found}, or none above -inf; expected logits that a token can be chosen by")
        # new_tokens are chosen in steps 0 to new_tokens - 1; the last of them is not run.
        if step + 1 == new_tokens or not goes_on:
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
    place = torch.minimum(place, (before < decoding.top_p).sum(dim=-1) - 1).clamp(min=0)
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


class _DecoderOnly:
    """Runs passes of a decoder-only model one after another, with the KV cache that the model makes itself.

    A call gives logits (B, any, V), the last column those needed, and the pass as it was run.
    """

    def __init__(self, model: Any, tables: LengthTables) -> None:
        self._model, self._tables = model, tables
        self._cache_name = cache_name(model)
        # Logits of a whole prompt over a large vocabulary would dwarf everything else in memory.
        named = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
        self._ids: list[torch.Tensor] = []
        self._mask: torch.Tensor | None = None

    def __call__(self, one: Pass) -> "tuple[torch.Tensor, Pass]":
        import torch

        self._ids.append(one.ids)
        # A sequence that has ended goes on attending: its rows do not count, and a row of no attention would be NaN.
        new = one.valid.long() if one.prefill else torch.ones_like(one.ids)
        mask = self._mask = new if self._mask is None else torch.cat((self._mask, new), dim=1)
        limit = self._tables.limit
        if limit is not None and not one.prefill and int(one.position.max()) == limit and self._tables.starts_anew():
            del self._options[self._cache_name]
            ids = torch.cat(self._ids, dim=1)
            places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            one = Pass(ids, places == places[:, -1:], places, False)
        with _forward(self._model):
            output = self._model(
                input_ids=one.ids, attention_mask=mask, position_ids=one.position, use_cache=True, **self._options
            )
        self._options[self._cache_name] = output[self._cache_name]
        return output.logits, one


def _decoder_of(model: Any, encoded: Any, valid: "torch.Tensor") -> "Callable[[Pass], tuple[torch.Tensor, Pass]]":
    """Runs passes of an encoder-decoder model's decoder after its encoder."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache = EncoderDecoderCache(DynamicCache(config=model.config.get_text_config(decoder=True)), DynamicCache())
    options = {"encoder_outputs": encoded, "attention_mask": valid.long(), cache_name(model): cache}

    def run(one: Pass) -> "tuple[torch.Tensor, Pass]":
        with _forward(model):
            return model(decoder_input_ids=one.ids, use_cache=True, **options).logits, one

    return run


def _forward(model: Any) -> AbstractContextManager[None]:
    """Around a forward pass: what the model (or an adapter that reads its routers) raises is one line."""
    remedy = "a smaller --batch or --chunk or --device spread may help"
    return errors_name(type(model).__name__, "its forward pass failed", remedy)
