"""Text as batches that a model is trained on: blocks of running text, or pairs of a prompt and its response."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from traces.capture.corpora import DomainText, documents

if TYPE_CHECKING:
    import torch

# Pairs of alike lengths share a batch: they are sorted within so many.
_SORTED_TOGETHER = 4096
IGNORED = -100
"""The label of a token that no loss is taken of."""


@dataclass(frozen=True)
class Pairs:
    """Prompts and responses of one domain as token ids; a response ends with EOS."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(map(len, (*self.prompts, *self.responses)))


@dataclass(frozen=True)
class TokenBatch:
    """What a model is called with in a step, and the rows (B, N) that count of each of its parts (None: all)."""

    inputs: dict[str, "torch.Tensor"]
    valid: "dict[str, torch.Tensor | None]"
    tokens: int


def pack(tokenizer: Any, text: DomainText, length: int, seed: int) -> np.ndarray:
    """Training rows as blocks (n, length) int32 of token ids: documents in seeded order, each ended by EOS.

    Raises InputError if the text does not fill one block.
    """
    rows = [text.train[index] for index in np.random.default_rng(seed).permutation(len(text.train))]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for ids in tokenizer(documents(rows, text.domain), add_special_tokens=False)["input_ids"] if rows else ():
        stream += [*ids, *end]
    count = len(stream) // length
    if not count:
        raise InputError(f"domain {text.domain}: {len(stream)} training tokens do not fill one block of {length}")
    return np.array(stream[: count * length], np.int32).reshape(count, length)


def paired(tokenizer: Any, text: DomainText, length: int) -> Pairs:
    """Training rows as pairs, each side cut to ``length`` tokens; a response is at least its EOS.

    Raises InputError if there is no row, or the tokenizer has no EOS.
    """
    rows = [row for row in text.train if row.prompt.strip() and row.response.strip()]
    if not rows or tokenizer.eos_token_id is None:
        raise InputError(f"domain {text.domain}: no prompts with responses to train on, or a tokenizer without EOS")
    sides = (tokenizer([getattr(row, side) for row in rows], add_special_tokens=False)["input_ids"]
             for side in ("prompt", "response"))  # fmt: skip
    prompts, responses = sides
    return Pairs([ids[:length] for ids in prompts], [[*ids[: length - 1], tokenizer.eos_token_id] for ids in responses])


def drawn(
    text: Mapping[str, np.ndarray] | Mapping[str, Pairs], size: int, length: int, seed: int, device: Any
) -> Iterator[TokenBatch]:
    """Endless seeded batches of ``size`` x ``length`` tokens, padding included, on ``device``."""
    import torch

    if all(isinstance(one, Pairs) for one in text.values()):
        yield from _pair_batches(text, size * length, seed, device)  # type: ignore[arg-type]
        return
    for rows in batches(text, size, seed):  # type: ignore[arg-type]
        ids = torch.as_tensor(rows, dtype=torch.long, device=device)
        yield TokenBatch({"input_ids": ids, "labels": ids}, {"": None}, ids.numel())


def batches(blocks: Mapping[str, np.ndarray], size: int, seed: int) -> Iterator[np.ndarray]:
    """Endless seeded batches of token ids (size, length).

    A domain is drawn by the square root of its size, its blocks come in shuffled rounds.
    """
    arrays = list(blocks.values())
    weights = np.sqrt([len(array) for array in arrays])
    random = np.random.default_rng([seed, 1])
    queues: list[list[int]] = [[] for _ in arrays]
    while True:
        rows = []
        for domain in random.choice(len(arrays), size, p=weights / weights.sum()):
            if not queues[domain]:
                queues[domain] = random.permutation(len(arrays[domain])).tolist()
            rows.append(arrays[domain][queues[domain].pop()])
        yield np.stack(rows)


def _pair_batches(text: Mapping[str, Pairs], most: int, seed: int, device: Any) -> Iterator[TokenBatch]:
    """Batches of one domain each, drawn by the square root of its tokens; its pairs come in shuffled rounds."""
    domains = list(text.values())
    weights = np.sqrt([pairs.tokens for pairs in domains])
    random = np.random.default_rng([seed, 1])
    queues: list[list[list[int]]] = [[] for _ in domains]
    while True:
        domain = int(random.choice(len(domains), p=weights / weights.sum()))
        if not queues[domain]:
            queues[domain] = _rounds(domains[domain], most, random)
        yield pair_batch(domains[domain], queues[domain].pop(), device)


def _rounds(pairs: Pairs, most: int, random: np.random.Generator) -> list[list[int]]:
    """All pairs once, cut into batches of at most ``most`` padded tokens (one pair at least), in random order."""
    lengths = [(len(one), len(other)) for one, other in zip(pairs.prompts, pairs.responses, strict=True)]
    order = random.permutation(len(lengths))
    found: list[list[int]] = []
    for start in range(0, len(order), _SORTED_TOGETHER):
        batch: list[int] = []
        widest = (0, 0)
        for index in sorted(order[start : start + _SORTED_TOGETHER].tolist(), key=lambda i: sum(lengths[i])):
            wider = max(widest[0], lengths[index][0]), max(widest[1], lengths[index][1])
            if batch and sum(wider) * (len(batch) + 1) > most:
                found.append(batch)
                batch, wider = [], lengths[index]
            batch.append(index)
            widest = wider
        found.append(batch)
    return [found[place] for place in random.permutation(len(found))]


def pair_batch(pairs: Pairs, chosen: Sequence[int], device: Any) -> TokenBatch:
    """Some pairs as one batch, both sides padded on the right; padding has no label and does not count."""
    import torch

    sides = []
    for rows in ([pairs.prompts[i] for i in chosen], [pairs.responses[i] for i in chosen]):
        ids = np.full((len(rows), max(map(len, rows))), IGNORED, np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        sides.append(torch.from_numpy(ids).to(device))
    prompt, labels = sides
    counts = prompt != IGNORED
    inputs = {"input_ids": prompt.clamp(min=0), "attention_mask": counts.long(), "labels": labels}
    tokens = sum(len(pairs.prompts[i]) + len(pairs.responses[i]) for i in chosen)
    return TokenBatch(inputs, {"encoder": counts, "decoder": labels != IGNORED}, tokens)


def sample(blocks: Mapping[str, np.ndarray], tokens: int = 2048) -> "torch.Tensor":
    """Token ids (n, T) of some blocks of every domain, about ``tokens`` in all."""
    import torch

    length = min(128, *(array.shape[1] for array in blocks.values()))
    count = max(1, tokens // (length * len(blocks)))
    return torch.as_tensor(np.concatenate([array[:count, :length] for array in blocks.values()]), dtype=torch.long)


def sample_pairs(text: Mapping[str, Pairs], tokens: int = 4096) -> TokenBatch:
    """The first pairs of every domain, about ``tokens`` in all, on the CPU."""
    some = Pairs([], [])
    for pairs in text.values():
        each = max(1, pairs.tokens // len(pairs.prompts))
        count = math.ceil(tokens / len(text) / each)
        some.prompts.extend(one[:128] for one in pairs.prompts[:count])
        some.responses.extend(one[:128] for one in pairs.responses[:count])
    return pair_batch(some, range(len(some.prompts)), "cpu")
