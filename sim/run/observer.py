"""What may watch a simulated run: a timeline, a test."""

from typing import Protocol


class Observer(Protocol):
    """Told of everything that happens in a run; times in nanoseconds."""

    def transfer(self, begin: int, end: int, expert: int, kind: str, whole: bool) -> None:
        """One stretch of link time: ``kind`` demand, prefetch or joined; ``whole`` if the expert is there after it."""

    def evicted(self, now: int, victims: list[int], by: int) -> None:
        """``victims`` left their slots for expert ``by``."""

    def compute(self, begin: int, end: int, what: str, call: int) -> None:
        """GPU time: ``what`` is attention, experts, predict, prompt or head."""

    def stall(self, begin: int, end: int, expert: int, call: int, kind: str) -> None:
        """The GPU waited for ``expert``: ``kind`` demand or late."""

    def requested(self, now: int, expert: int, call: int, outcome: str) -> None:
        """A prefetch was asked for: ``outcome`` issued, queued (already under way) or resident."""

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None:
        """A step is over."""
