"""What may watch a simulated run: a timeline, a test."""

from typing import Literal, Protocol

Copy = Literal["demand", "prefetch", "joined"]
"""What a transfer is for; a prefetch that a call waits for by now is joined."""
Work = Literal["attention", "experts", "predict", "prompt", "head", "move"]
Aside = Literal["predict", "schedule"]
"""What runs beside the GPU: a path predictor, and the scheduler that regroups tokens."""
Stall = Literal["demand", "late", "host"]
Outcome = Literal["issued", "queued", "resident"]
"""What a request came to; one for an expert that is under way already is queued."""


class Observer(Protocol):
    """Told of everything that happens in a run; times in nanoseconds."""

    def transfer(self, begin: int, end: int, expert: int, kind: Copy, whole: bool) -> None:
        """One stretch of link time; ``whole`` if the expert is there after it."""

    def written_back(self, begin: int, end: int, expert: int) -> None:
        """One stretch of link time in which ``expert``, which has left its slot, was copied to the host."""

    def evicted(self, now: int, victims: list[int], by: int) -> None:
        """``victims`` left their slots for expert ``by``."""

    def compute(self, begin: int, end: int, what: Work, call: int) -> None:
        """GPU time."""

    def beside(self, begin: int, end: int, what: Aside, step: int) -> None:
        """Work beside the GPU that ``step`` waits for, and steps after it; told when ``step`` asks for it."""

    def stall(self, begin: int, end: int, expert: int, call: int, kind: Stall) -> None:
        """The GPU waited for a copy of ``expert`` (demand, late), or for the host, which ran it last."""

    def requested(self, now: int, expert: int, call: int, outcome: Outcome) -> None:
        """A prefetch was asked for."""

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None:
        """A step is over."""
