"""How long a copy over the link takes by its size."""

import bisect
import itertools
import math
from fractions import Fraction

from sim.machine.figures import Curve


class CopyTime:
    """Time over size as straight pieces, in exact rationals, so that rounding never breaks monotony."""

    def __init__(self, points: list[tuple[int, Fraction]], last_slope: Fraction) -> None:
        self.sizes = [size for size, _ in points]
        self.times = [time for _, time in points]
        steps = itertools.pairwise(points)
        self.slopes = [(t1 - t0) / (b1 - b0) for (b0, t0), (b1, t1) in steps] + [last_slope]

    @classmethod
    def plain(cls, latency_us: float, gbps: float) -> "CopyTime":
        """Latency and bandwidth; decimal fractions are taken as they are written."""
        return cls([(0, Fraction(math.ceil(Fraction(str(latency_us)) * 1000)))], 1 / Fraction(str(gbps)))

    @classmethod
    def measured(cls, curve: Curve) -> "CopyTime":
        """The curve, continued to 0 bytes at its first slope and beyond its end at its last."""
        points = [(size, Fraction(time)) for size, time in curve.points]
        (b0, t0), (b1, t1) = points[0], points[1]
        start = max(Fraction(0), t0 - b0 * (t1 - t0) / (b1 - b0))
        (b2, t2), (b3, t3) = points[-2], points[-1]
        return cls([(0, start), *points], (t3 - t2) / (b3 - b2))

    def __call__(self, size: int) -> int:
        """Nanoseconds of a copy of ``size`` bytes, rounded up. Raises ValueError for a negative size."""
        size = int(size)
        if size < 0:
            raise ValueError(f"size is {size}; expected 0 bytes or more")
        piece = bisect.bisect_right(self.sizes, size) - 1
        return math.ceil(self.times[piece] + (size - self.sizes[piece]) * self.slopes[piece])

    @property
    def peak_bytes_per_s(self) -> float:
        """Size over time rises or falls along each piece, so its maximum is at a point or in the limit."""
        at_points = [size / time for size, time in zip(self.sizes, self.times, strict=True) if size]
        exact = max([*at_points, 1 / self.slopes[-1]]) * 10**9
        rounded = float(exact)
        return rounded if rounded >= exact else math.nextafter(rounded, math.inf)
