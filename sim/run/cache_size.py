"""How much GPU memory experts get, as a person writes it."""

import re

from ground.errors import InputError
from ground.text import amount
from sim.workload import MOST

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "b": 1}
LAYER = "/layer"
AUTO = "auto"
"""What the card leaves; `sim.run.memory` works it out."""


def parse_capacity(text: str, expert_bytes: tuple[int, ...], n_experts: int) -> int:
    """Bytes meant by ``64`` (slots of the largest expert), ``16/layer``, ``25%`` (of all experts), or ``4000MiB``.

    ``16/layer`` is the room of 16 experts of each layer. It says nothing of how a policy splits that room.
    ``expert_bytes`` are those of one expert, a routed layer. Raises InputError for anything else, or too little.
    """
    number, unit = as_typed(text)
    total = sum(expert_bytes) * n_experts
    if unit == "%":
        size = int(total * number / 100)
    elif unit == LAYER:
        size = int(number) * sum(expert_bytes)
    else:
        size = int(number * (_UNITS[unit] if unit else max(expert_bytes)))
    if size > MOST:
        raise InputError(f"--cache {text!r}: {size:.1e} bytes; expected at most {MOST:.1e}")
    if size < max(expert_bytes):
        raise InputError(
            f"--cache {text!r}: {describe_capacity(size, expert_bytes, n_experts)} cannot hold one expert of "
            f"{max(expert_bytes)} bytes; give at least that"
        )
    return size


def as_typed(text: str) -> tuple[float, str]:
    """Number and unit of a cache size: ``%``, ``/layer``, one of bytes, or none for slots.

    Raises InputError for anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(%|/\s*layer|[a-zA-Z]*)\s*", text, re.ASCII | re.IGNORECASE)
    unit = "".join(match[2].lower().split()) if match else ""
    if match is None or (unit and unit not in ("%", LAYER) and unit not in _UNITS):
        raise InputError(
            f"--cache {text!r}: expected slots (64), a share (25%), slots of each layer (16/layer), or bytes (4000MiB, "
            f"16GiB, 16GB)"
        )
    number = float(match[1])
    if unit in ("", LAYER) and number != int(number):
        raise InputError(f"--cache {text!r}: expected a whole number of slots, or a unit (25%, 4000MiB)")
    return number, unit


def is_relative(text: str) -> bool:
    """Whether that size follows the model's layers and experts, as ``25%`` and ``16/layer`` do."""
    return as_typed(text)[1] in ("%", LAYER)


def describe_capacity(size: int, expert_bytes: tuple[int, ...], n_experts: int) -> str:
    """``size`` bytes in slots, share and MiB, or less where it is less."""
    total = sum(expert_bytes) * n_experts
    shown = f"{size / 2**20:,.0f} MiB" if size >= 2**20 else amount(size)
    return f"{size // max(expert_bytes)} slots = {100 * size / total:.1f}% of all experts = {shown}"
