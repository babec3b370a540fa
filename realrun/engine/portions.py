"""How many experts are launched before the host looks at the link again."""

from collections.abc import Sequence

AT_ONCE = 8
"""Experts of one row each that one launch of the kernels takes."""
SEVERAL_AT_ONCE = 2
"""Experts of several rows that are launched one after the other before the host looks at the link. Launching one took
an H200's host some 80 us, half of a copy of 9.4 MB, of which two are handed over ahead: after four the link is dry."""


def portions(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The places of ``pairs``, each in one portion, as many as are launched without a look at the link between."""
    single = [place for place, (first, end) in enumerate(pairs) if end - first == 1]
    several = [place for place, (first, end) in enumerate(pairs) if end - first != 1]
    found = [single[first : first + AT_ONCE] for first in range(0, len(single), AT_ONCE)]
    return found + [several[first : first + SEVERAL_AT_ONCE] for first in range(0, len(several), SEVERAL_AT_ONCE)]
