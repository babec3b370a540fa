"""What a form of record gives: requests, one after another, and what is true of all of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Rows(Protocol):
    """An array, or what gives parts of one when they are asked for."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of it."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Some rows."""


@dataclass
class Request:
    """n rows of one request over L recorded layers, as the engine wrote them; all but the routes may be unknown.

    ``start`` is the position of its first row. In a conversation rows before it come with earlier turns; elsewhere they
    were not recorded. ``where`` and ``row`` say in messages where the rows lie: an array or an answer, and the number
    of its first row there.
    """

    routes: np.ndarray  # (n, L, k) integers
    tokens: np.ndarray | None = None  # (n,) token ids, or (n + 1,) with the last one, which was sampled and not run
    prompt: int | None = None  # tokens of the whole prompt; None: not known
    start: int | None = None
    conversation: int | str | None = None  # turns of one conversation have the same
    domain: str | None = None
    name: str | None = None  # the sequence's id
    gates: np.ndarray | None = None  # (n, L, k) floats: weights as the model used them
    probs: "Rows | None" = None  # (n, L, E) floats: router probabilities
    states: "Rows | None" = None  # (n, L, H) floats: router inputs
    where: str = "array 'routed_experts'"
    row: int = 0
    padded: bool = False  # filler before the first real row is padding too

    @property
    def rows(self) -> "dict[str, Rows]":
        """What there is of each row beside its route, by name."""
        named = (("gates", self.gates), ("probs", self.probs), ("states", self.states))
        return {name: array for name, array in named if array is not None}


@dataclass
class Record:
    """Requests, read as they are asked for, and what the record says of all of them; None: it does not say."""

    requests: Iterable[Request]
    layers: np.ndarray | None = None  # (L,) model layer numbers
    experts: int | None = None
    model: str | None = None  # a built-in name, where the form or the file tells it
    among: tuple[str, ...] | None = None  # the models that it can be of
    expert_bytes: list[int] | None = None
    captured: str = "routes as a serving engine returned them"
    decoding: str = "not stated"
    hardware: str = "not stated"
    reduced: bool = False  # the run may take fewer experts a token than the model's config says
    buffers: bool = True  # written by an engine into buffers: filler, dummy rows and repeated turns are looked for
    split: str | None = None  # of all sequences; None: split in order
    count: int | None = None  # of requests, where it is known before they are read
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)  # read beside those that were given

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)
