"""What a path predictor reads of a trace: the prompt of each sequence, its tokens, and the routes that these took."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ground.errors import InputError
from traces.schema import PREFILL
from traces.trace import Trace

LONGEST_PROMPT = 512
"""Tokens of a prompt that are read, the first ones."""


@dataclass(frozen=True)
class PathSequence:
    """One sequence: ``prompt`` (P,) token ids, ``tokens`` (S,) those of its rows, ``routes`` (S, L, K), -1 for none.

    ``start`` is its first row in the trace. A decoder's tokens follow its start token; a prompt that is no stack's of
    its own is the first of the tokens as well.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    routes: np.ndarray
    start: int


def load_with_prompts(path: str | Path) -> tuple[Trace, Trace]:
    """A trace and the one that holds its prompts: the encoder's beside a decoder's, else the trace itself.

    Raises InputError if the encoder's is not there, or if the prompts' tokens are not recorded.
    """
    trace = prompts = Trace.load(path)
    if trace.meta["model"].get("part") == "decoder":
        beside = Path(path).with_suffix(".encoder.npz")
        if not beside.is_file():
            raise InputError(f"{path}: is of a decoder; expected its encoder's trace beside it, {beside.name}")
        prompts = Trace.load(beside)
    for one in (trace, prompts):
        if (one.token < 0).all():
            raise InputError(f"{one.source}: holds no token ids, which the predictor reads; expected the full capture")
    return trace, prompts


def path_sequences(trace: Trace, prompts: Trace, split: str) -> list[PathSequence]:
    """The sequences of one split, profile or eval. Raises InputError if ``prompts`` lacks one of them."""
    return list(_sequences(trace, prompts, np.flatnonzero(trace.split == split)))


def _sequences(trace: Trace, prompts: Trace, numbers: Sequence[int] | np.ndarray) -> Iterator[PathSequence]:
    offsets, others = trace.offsets.tolist(), prompts.offsets.tolist()
    place = {name: number for number, name in enumerate(prompts.sequence_id.tolist())}
    for number in numbers:
        rows = slice(offsets[number], offsets[number + 1])
        name = str(trace.sequence_id[number])
        if name not in place:
            raise InputError(f"{prompts.source or 'the prompts'}: no sequence {name!r}, which the trace has")
        read = slice(others[place[name]], others[place[name] + 1])
        prompt = prompts.token[read][prompts.phase[read] == PREFILL]
        tokens = trace.token[rows]
        # Without a prompt on record the first token is what is known when the first row runs.
        prompt = prompt if len(prompt) else tokens[:1]
        yield PathSequence(prompt[:LONGEST_PROMPT], tokens, trace.experts[rows], rows.start)
