"""What a card's memory is for: weights, keys and values, activations and a reserve; what is left is for experts."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ground.errors import InputError
from sim.machine.hardware import Hardware
from sim.run.cache_size import parse_capacity
from sim.schedules.kv_cache import cache_bytes, peak_cache
from sim.workload import Schedule
from traces.models.quantised import quantised
from traces.models.spec import ModelSpec
from traces.trace import Trace

RESERVE = "1024MiB"
"""What llama.cpp leaves free on a device by default (``--fit-target``)."""
ROWS = 512
"""Rows that are computed at once, at most: llama.cpp's ``--ubatch-size``, by default."""
_STEP = 256
"""Contexts are proposed in multiples of this."""
_SMALLER_KV = ("q8_0", "q4_0")
_SMALLER_WEIGHTS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xxs")


def reserved(text: str | None) -> int:
    """Bytes of a reserve, ``0`` or ``1024MiB``. Raises InputError."""
    text = RESERVE if text is None else text.strip()
    if text == "0":
        return 0
    if not text[-1:].isalpha():
        raise InputError(f"--reserve {text!r}: expected bytes with a unit, such as {RESERVE}, or 0")
    try:
        return parse_capacity(text, (1,), 1)
    except InputError:
        raise InputError(f"--reserve {text!r}: expected bytes with a unit, such as {RESERVE}, or 0") from None


@dataclass(frozen=True)
class Memory:
    """Bytes of a card, and of what lies on it besides experts.

    Attributes:
        card: all of it.
        weights: all that is not a routed expert, the embedding too.
        kv: keys, values and states of ``sequences`` of ``context`` tokens; or of what a trace fills, if that is None.
        activations: of ``rows`` rows: a row of the vocabulary and one of the hidden width in float32, as llama.cpp's
            compute buffer has them.
        reserve: what stays free.
        least: tokens of the longest sequence, which a context has room for.
    """

    card: int
    weights: int
    kv: int
    activations: int
    reserve: int
    sequences: int
    context: int | None = None
    least: int = 1

    @property
    def beside(self) -> dict[str, int]:
        """What lies beside weights and experts."""
        return {"kv": self.kv, "activations": self.activations, "reserve": self.reserve}

    @property
    def left(self) -> int:
        """What is left for experts; below 0 if it is too little for the rest."""
        return self.card - self.weights - sum(self.beside.values())

    def fitting(self, model: ModelSpec, card: str) -> int:
        """Bytes for experts of ``model``, of all at the most. Raises InputError if none fits, with what would."""
        if self.left >= max(model.expert_bytes):
            return min(self.left, model.all_expert_bytes)
        parts = {"weights": self.weights, **self.beside, "one expert": max(model.expert_bytes)}
        told = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        changes = list(self._changes(model))
        would = f"any of these would fit: {'; '.join(changes)}" if changes else "no single change of these would fit"
        raise InputError(f"--cache auto: {card} has {self.card / 2**30:.2f} GiB; wanted in GiB: {told}; {would}")

    def _changes(self, model: ModelSpec) -> Iterator[str]:
        """Single changes with which an expert fits, each the smallest of its kind."""
        lacking = max(model.expert_bytes) - self.left
        if self.reserve >= lacking:
            yield f"--reserve {(self.reserve - lacking) // 2**20}MiB"
        token = model.kv_bytes_per_token
        for form in _SMALLER_KV if token else ():
            smaller = replace(model, kv_format=form).kv_bytes_per_token
            if (
                smaller < token
                and (self.kv - self.sequences * model.state_bytes_per_sequence) * (token - smaller) >= lacking * token
            ):
                yield f"--kv {form}"
                break
        if self.context is not None:
            if context := self._most_context(model, self.kv - lacking):
                yield f"--context {context}"
            most = (self.kv - lacking) * self.sequences // self.kv if self.kv else 0
            if 0 < most < self.sequences:
                yield f"--batch {most}"
        if model.stored is None:
            for form in _SMALLER_WEIGHTS:
                smaller_model = quantised(model, form)
                room = self.left + self.weights - smaller_model.resident_bytes
                if room >= max(smaller_model.expert_bytes):
                    yield f"--quant {form}"
                    break

    def _most_context(self, model: ModelSpec, most: int) -> int:
        """The longest context whose keys and values take ``most`` bytes; 0 if the longest sequence has no room."""
        whole = range((self.context or 0) // _STEP + 1)
        steps = bisect_right(whole, most, key=lambda steps: kept_bytes(model, self.sequences, steps * _STEP))
        context = _STEP * (steps - 1)
        return context if context >= self.least else 0


def kept_bytes(model: ModelSpec, sequences: int, context: int) -> int:
    """Bytes of keys, values and states of so many sequences of ``context`` tokens each."""
    return sequences * (model.cached_bytes(context) + model.state_bytes_per_sequence)


def activation_bytes(model: ModelSpec, rows: int = ROWS) -> int:
    """Bytes of what ``rows`` rows compute: logits and a hidden row in float32."""
    return 4 * rows * (model.vocab + model.hidden)


def memory_of(
    trace: Trace, schedule: Schedule, model: ModelSpec, hardware: Hardware, batch: int, context: int | None = None,
    reserve: str | None = None, most: int | None = None,
) -> Memory:  # fmt: skip
    """What the memory of ``hardware`` is for in a run that computes ``most`` rows at once (`ROWS`).

    Raises InputError for a context that a sequence outgrows.
    """
    longest = int(trace.position.max()) + 1
    if context is not None and context < longest:
        raise InputError(f"--context {context}: a sequence of the trace has {longest} tokens; expected at least that")
    sequences = peak_cache(trace, schedule)[1]
    if context is None:
        rows, kv = min(most or ROWS, int(np.diff(schedule.offsets).max())), cache_bytes(trace, schedule, model)
    else:
        rows = min(most or ROWS, context)
        sequences = max(batch, sequences)
        kv = kept_bytes(model, sequences, context)
    return Memory(
        hardware.gpu_bytes, model.resident_bytes, kv, activation_bytes(model, rows), reserved(reserve), sequences,
        context, longest,
    )  # fmt: skip
