"""How sure a ratio of two policies is: a bootstrap over the sequences that both replayed.

What an interval covers: the draw of sequences. Both policies run the same sequences in the same order, each through one
cache that stays warm from one sequence to the next, so a sequence's time and hits are its share of that run. Sequences
are drawn with replacement and both policies' shares of a drawn sequence go together (paired).

What it does not cover: another order, another text, another training of the model (repeat the run on traces of a second
seed), other tables (the profile split is the same), or that the machine is modelled and not measured.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.report.shares import Shares

RESAMPLES = 9999
CONFIDENCE = 0.95


def check() -> None:
    """Raise ModuleNotFoundError where scipy is not installed: called before the replays that intervals need."""
    import scipy.stats  # noqa: F401


@dataclass(frozen=True)
class Ratio:
    """A ratio with its interval; ``draws`` (RESAMPLES,) is its bootstrap distribution, None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    draws: np.ndarray | None = None

    def to_json(self) -> dict[str, float | None]:
        """Value and interval, rounded to what a reader can use."""
        return {name: None if (v := getattr(self, name)) is None else round(v, 4) for name in ("value", "low", "high")}


def mean_ratio(ratios: list[Ratio]) -> Ratio:
    """The mean of ratios of different workloads, each of which was drawn by itself."""
    if not ratios or any(r.value is None for r in ratios):
        return Ratio(None)
    value = float(np.mean([r.value for r in ratios]))
    drawn = [r.draws for r in ratios if r.draws is not None]
    return _with_interval(value, np.mean(drawn, axis=0)) if len(drawn) == len(ratios) else Ratio(value)


Rate = tuple[np.ndarray, np.ndarray]
"""Numerator and denominator, one a sequence: the quotient of their sums is the rate of a set of sequences."""

METRICS: dict[str, Callable[[Shares], Rate]] = {
    "throughput": lambda run: (run.tokens, run.ns),
    "hit ratio": lambda run: (run.hits, run.lookups),
    "hit or late": lambda run: (run.hits + run.late, run.lookups),
}
"""What runs are compared by, all of decode. Hit or late: no misses, so a prefetch may be queued or under way."""


def compared(metric: str, one: Shares, other: Shares, seed: int = 0) -> Ratio:
    """One of METRICS of ``one`` over that of ``other``, over the same sequences."""
    return ratio(METRICS[metric](one), METRICS[metric](other), seed)


def ratio(one: Rate, other: Rate, seed: int = 0) -> Ratio:
    """The quotient of two rates with a percentile interval; what has no value (over nothing) has none."""
    if len(one[0]) != len(other[0]):
        raise ValueError(f"{len(one[0])} sequences against {len(other[0])}: runs of different traces")

    def quotient(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> Any:
        above = a.sum(axis=axis) * d.sum(axis=axis)
        below = b.sum(axis=axis) * c.sum(axis=axis)
        return np.divide(above, below, out=np.full_like(np.asarray(below), np.nan), where=below > 0)

    a, b, c, d = (part.astype(float) for part in (*one, *other))
    value = float(quotient(a, b, c, d))
    if not np.isfinite(value):
        return Ratio(None)
    if len(one[0]) < 2:
        return Ratio(value)
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # draws over nothing, which _with_interval sees to
        drawn = bootstrap(
            (a, b, c, d), quotient, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=1000,
            confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed),
        )  # fmt: skip
    return _with_interval(value, drawn.bootstrap_distribution)


def _with_interval(value: float, draws: np.ndarray) -> Ratio:
    """Percentile interval of what was drawn; none where some draws have no ratio."""
    if not np.isfinite(draws).all():
        return Ratio(value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Ratio(value, float(low), float(high), draws)
