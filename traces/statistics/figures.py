"""The statistics of a trace's routing that are published of released models, as plain data."""

from typing import Any

import numpy as np

from traces.schema import DECODE, PREFILL
from traces.statistics.domain_use import divergence, evenness, most_over_least, own_over_other
from traces.statistics.repetition import repetition, repetition_at_random
from traces.statistics.usage import chances, domain_shares, reuse, reuse_by_popularity
from traces.trace import Trace

PHASES = {"prompt": PREFILL, "decode": DECODE}
REPETITIONS = {"first_repeated": 1, "first_or_second_repeated": 2}
"""Statistics of repetition, and how many of the router's choices each looks at."""


def figures(trace: Trace) -> dict[str, dict[str, Any] | None]:
    """Statistics of the prompt rows and of the decode rows, each as JSON; None where the trace has no such rows.

    Every statistic is an object of numbers by what they are of: a layer's number, ``mean``, ``middle``, ``least`` or
    ``highest`` of the layers; ``random`` is what chance gives. A number that is not defined (one domain, an expert
    never used) is None. Domains count alike. ``first_repeated`` and ``first_or_second_repeated``: see `repetition`;
    ``..._by_domain`` has the lowest and the highest domain of each layer. ``entropy``: `evenness`.
    ``most_over_least``: see `domain_use`. ``divergence`` (bits) and ``own_over_other`` (of tables of top K): see
    `parting`. ``reuse_over_popularity``: `reuse` at distance 1, mean over layers, over what independent rows of the
    same popularity would have.
    """
    return {name: _of_rows(trace, phase) for name, phase in PHASES.items()}


def _of_rows(trace: Trace, phase: int) -> dict[str, Any] | None:
    share = domain_shares(trace, phase)
    share = share[:, share.any(axis=(0, 2))]  # a layer that these rows skip says nothing
    if not share.size:
        return None
    even, spread = evenness(share), most_over_least(share)
    chance = chances(trace.experts[trace.phase == phase], trace.n_experts)
    again, alone = reuse(trace, 1, phase), reuse_by_popularity(chance)
    has_pairs = np.isfinite(again)
    found: dict[str, Any] = {"rows": int((trace.phase == phase).sum()), "domains": len(share)}
    for name, choices in REPETITIONS.items():
        found |= _repetition(trace, phase, name, min(choices, trace.top_k))
    return found | {
        "entropy": {"least": rounded(even.min()), "mean": rounded(even.mean())},
        "most_over_least": {"middle": rounded(np.median(spread)), "mean": rounded(spread.mean())},
        **parting(trace, phase),
        "reuse_over_popularity": {"mean": rounded(_mean(again[has_pairs]) / _mean(alone[has_pairs]))},
    }


def parting(trace: Trace, phase: int | None = None) -> dict[str, dict[str, float | None]]:
    """How far the domains of a trace part, in two numbers: ``divergence`` and ``own_over_other``, as in `figures`.

    Of rows of ``phase``, of all rows where it is None; None in place of a number with fewer than two domains. The
    fewer rows, the further domains part by chance: ``random`` is what the same rows give, dealt to domains anew.
    """
    shares = {key: domain_shares(trace, phase, dealt=key == "random") for key in ("random", "mean")}
    return {
        "divergence": {key: rounded(divergence(share)) for key, share in shares.items()},
        "own_over_other": {key: rounded(own_over_other(share, trace.top_k)) for key, share in shares.items()},
    }


def _repetition(trace: Trace, phase: int, name: str, choices: int) -> dict[str, Any]:
    by_domain = repetition(trace, phase, choices)
    mean = np.array([_mean(own[np.isfinite(own)]) for own in by_domain.T])
    low, high, numbers = np.fmin.reduce(by_domain), np.fmax.reduce(by_domain), trace.layers.tolist()
    return {
        name: {
            "random": rounded(repetition_at_random(trace.n_experts, choices)),
            "mean": rounded(_mean(mean[np.isfinite(mean)])),
            "highest": rounded(np.fmax.reduce(mean)),
            **{str(number): rounded(value) for number, value in zip(numbers, mean, strict=True)},
        },
        f"{name}_by_domain": {
            str(number): [rounded(least), rounded(most)] for number, least, most in zip(numbers, low, high, strict=True)
        },
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def rounded(value: Any) -> float | None:
    """A number as records hold it: four digits, None where it is not finite."""
    return None if not np.isfinite(value) else round(float(value), 4)
