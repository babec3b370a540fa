"""Layer numbers in words, both ways: ``1-26`` or ``1, 3, 5-7``."""

import re
from collections.abc import Sequence
from itertools import pairwise

from ground.errors import InputError


def parse_layers(text: str) -> list[int]:
    """Layer numbers of a text such as ``1-26`` or ``1,3,5-7``, increasing; raises InputError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part, re.ASCII)
        if not match:
            raise InputError(f"layers {text!r}: {part!r}, expected numbers and ranges such as 1-26 or 1,3,5")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return increasing(numbers, f"layers {text!r}")


def increasing(numbers: list[int], where: str) -> list[int]:
    """The numbers, if there are any and they increase from 0 on; raises InputError naming ``where``."""
    fall = next(((a, b) for a, b in pairwise(numbers) if b <= a), None)
    if not numbers or numbers[0] < 0 or fall:
        found = f"{fall[1]} after {fall[0]}" if fall else str(numbers[0]) if numbers else "none"
        raise InputError(f"{where}: {found}, expected increasing layer numbers from 0")
    return numbers


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """Increasing numbers in words, runs joined and no number cut: ``1-26``, ``1, 3, 5-7``, ``1, 3, 5 and 40 more``.

    At most ``most`` numbers and runs are named.
    """
    starts = [i for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    runs = [(numbers[a], numbers[b - 1]) for a, b in pairwise([*starts, len(numbers)])]
    words = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs[:most])
    rest = sum(high - low + 1 for low, high in runs[most:])
    return f"{words} and {rest} more" if rest else words
