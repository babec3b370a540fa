"""How many experts are launched before the host looks at the link again."""

from collections.abc import Sequence

AT_ONCE = 8
"""Rows that one launch of the kernels takes, each with its expert."""
SEVERAL_AT_ONCE = 2
"""Experts of many rows that are launched one after the other before the host looks at the link. Launching one took an
H200's host some 80 us, half of a copy of 9.4 MB, of which two are handed over ahead: after four the link is dry."""
_LAUNCHED_BYTES = 80e-6 * 4.4e12
"""What an H200 reads while its host launches one expert of many rows."""


def few_rows(expert_bytes: int) -> int:
    """Rows up to which an expert goes through the kernels, which read its bytes for each: no longer than launching."""
    return int(min(AT_ONCE, max(1, _LAUNCHED_BYTES // expert_bytes)))


def portions(pairs: Sequence[tuple[int, int]], few: int = 1) -> list[list[int]]:
    """The places of ``pairs``, each in one portion, as many as are launched without a look at the link between.

    Experts of up to ``few`` rows go through the kernels, which take ``AT_ONCE`` rows of them.
    """
    found: list[list[int]] = []
    room = 0
    for place, (first, end) in enumerate(pairs):
        if end - first <= few:
            if end - first > room:
                found.append([])
                room = AT_ONCE
            found[-1].append(place)
            room -= end - first
    several = [place for place, (first, end) in enumerate(pairs) if end - first > few]
    return found + [several[first : first + SEVERAL_AT_ONCE] for first in range(0, len(several), SEVERAL_AT_ONCE)]
