"""Times over the work that they took as a straight line, a fixed time and a rate, and whether to trust it.

Relative misses are made least, so that small sizes count as much as large ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realrun.calibrate.timing import Timing

MOST_MISSED = 0.25
"""By how much a line may miss a time and be trusted."""


@dataclass(frozen=True)
class Line:
    """``fixed_ns + work / rate``, work in bytes or FLOP, rate in the same a nanosecond; the worst relative miss."""

    fixed_ns: float
    rate: float
    worst: float

    @staticmethod
    def through(points: Sequence[tuple[float, float]], most: float = math.inf) -> "Line":
        """The line through (work, ns) points that misses least in relative terms.

        Neither number is below 0, and the rate is at most ``most``: sizes that hardly differ in time say nothing of it.
        """
        work, ns = np.array(points, float).T
        # Dividing by the time makes each residual relative.
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / ns, work / ns], 1), np.ones(len(ns)), rcond=None)
        if slope <= 0:  # no size matters yet: launches are all
            fixed, slope = float(ns.max()), 0.0
        elif fixed < 0:
            fixed, slope = 0.0, float(np.mean(ns / work))
        if slope * most < 1:
            slope = 1 / most
            fixed = max(0.0, float(np.sum((ns - slope * work) / ns**2) / np.sum(1 / ns**2)))
        missed = np.abs((fixed + slope * work) / ns - 1)
        return Line(float(fixed), float(1 / max(slope, 1e-9)), float(missed.max()))


def doubt(line: Line, ns: Sequence[float], timings: Sequence[Timing], rises: bool) -> str:
    """Why ``line`` through ``ns``, in rising order of work, should not be trusted, in words; empty if it should.

    ``timings`` are what ``ns`` come from; ``rises`` says whether more work must take longer.
    """
    reasons = []
    if line.worst > MOST_MISSED:
        reasons.append("no line fits")
    if any(later < 0.8 * max(ns[:i]) for i, later in enumerate(ns) if i):
        reasons.append("more took less time")
    if rises and ns[-1] < 1.5 * ns[0]:
        reasons.append("more took no longer")
    if sum(t.ns > 2 * t.low for t in timings) > len(timings) / 2:
        reasons.append("half of the runs took more than twice what others took")
    return f"NOT TO BE TRUSTED: {', '.join(reasons)}" if reasons else ""
