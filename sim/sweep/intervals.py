"""How sure a speed is: an interval from drawing the replayed sequences anew, with replacement.

It covers the draw of sequences alone: not other texts, another model or a machine that is modelled and not measured.
Every design has the same draws, so that two designs over the same sequences can be compared draw by draw.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

DRAWS = 2000
CONFIDENCE = 0.95


@lru_cache(maxsize=16)
def _drawn(sequences: int) -> np.ndarray:
    """How often each sequence is drawn (DRAWS, sequences)."""
    return np.random.default_rng(0).multinomial(sequences, np.full(sequences, 1 / sequences), DRAWS).astype(float)


def _speeds(shares: Mapping[str, Sequence[int]]) -> np.ndarray | None:
    """Decode tokens a second of every draw (DRAWS,); None with fewer than two sequences, or a draw without tokens."""
    tokens, ns = (np.array(shares[name], float) for name in ("tokens", "ns"))
    if len(tokens) < 2:
        return None
    drawn = _drawn(len(tokens))
    time = drawn @ ns
    return None if (time == 0).any() else drawn @ tokens * 1e9 / time


def interval(shares: Mapping[str, Sequence[int]] | None) -> tuple[float | None, float | None]:
    """Low and high end of the decode speed in tokens/s; None without sequences to draw."""
    return _ends(None if shares is None else _speeds(shares))


def ratio_interval(
    one: Mapping[str, Sequence[int]] | None, other: Mapping[str, Sequence[int]] | None
) -> tuple[float | None, float | None]:
    """The same of the quotient of two decode speeds over the same sequences."""
    if one is None or other is None or len(one["ns"]) != len(other["ns"]):
        return None, None
    above, below = _speeds(one), _speeds(other)
    return _ends(None if above is None or below is None or (below == 0).any() else above / below)


def _ends(draws: np.ndarray | None) -> tuple[float | None, float | None]:
    if draws is None:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)
