"""Designs that no other beats in two goals at once, and the one after which more memory buys little."""

from collections.abc import Sequence

Point = tuple[float, float]
"""What a design costs, and what it is worth."""


def front(points: Sequence[Point]) -> list[int]:
    """Places of points that no other beats: none costs less or as much and is worth more. From cheap to dear."""
    order = sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1]))
    best = float("-inf")
    found = []
    for at in order:
        if points[at][1] > best:
            best = points[at][1]
            found.append(at)
    return found


def knee(points: Sequence[Point]) -> int | None:
    """The place of the point of a front that lies farthest above the straight line from its first to its last.

    Both goals are scaled to the front's own range, as in Satopaa and others, Finding a "Kneedle" in a Haystack (2011).
    None for fewer than three points, or if none lies above the line.
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    above = [(y - y0) / (y1 - y0) - (x - x0) / (x1 - x0) for x, y in points]
    best = max(range(len(points)), key=above.__getitem__)
    return best if above[best] > 1e-9 else None
