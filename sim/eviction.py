"""Who leaves when a slot is needed: one small class a rule.

A rule keeps the experts of one pool in the order in which they should go. The cache tells it what happens and asks for
candidates; which of them may really go (nothing pinned, nothing still loading) is the cache's business. Experts are
known by their flat number, ``layer * E + expert``.

A rule of your own is any class with these methods; hand the class itself to ``Plan(eviction=...)``. A rule that says
``clairvoyant = True`` is told the future, and only a policy that calls itself clairvoyant may use it. One that says
``listed = True`` gives more than ``sim.ranking.MANY`` candidates as an ``array("q")``, which the cache searches faster.
One whose experts go in another order for a prefetch than for a demand has a second method, ``for_prefetch``, like
``candidates``. One that goes by the number of slots has ``holds(experts)``, which is told beforehand how many its pool
holds.

A new rule with a name: its class stands here, in `EVICTIONS` too, and its compiled twin in ``sim.compiled.order``.
Without that twin its runs are the SimPy engine's.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from ground.errors import InputError
from sim.eviction_queues import ARC, S3FIFO, WTinyLFU
from sim.ranking import Ranked, Rule

NEVER = np.iinfo(np.int64).max
"""Next use of an expert that is not used again."""
COUNTS = 2**32
"""More than any expert is needed in a run (``score-count``)."""
OCTAVE, HALF = 256, 64
"""A worth twice as high stands so much higher on the scale of ``decayed-lfu``; and the passes in which worths halve."""
ADDED = np.array([round(OCTAVE * math.log2(1 + 2 ** (-d / OCTAVE))) for d in range(10 * OCTAVE)], np.int64)
"""What a use of equal worth, or of one ``d`` lower, adds to a worth on that scale."""


class Eviction(Protocol):
    """An eviction rule for one pool of slots."""

    def needed(self, expert: int, next_call: int) -> None:
        """Note that a layer call needs ``expert``, resident or not.

        Experts of a call come in rising order. ``next_call`` is the call that needs it next, or NEVER: for none, and
        for every rule that is not clairvoyant.
        """

    def requested(self, expert: int) -> None:
        """Note that a prefetch asks for ``expert``, which is resident."""

    def loaded(self, expert: int) -> None:
        """Note that ``expert`` was given a slot."""

    def evicted(self, expert: int) -> None:
        """Note that ``expert`` left its slot."""

    def valued(self, first: int, values: np.ndarray) -> None:
        """Take new values of being kept for the experts from ``first`` on, larger for longer."""

    def candidates(self) -> Iterable[int]:
        """Experts from the first that should go to the last.

        May include experts that hold no slot yet; the cache passes over those. The cache stops reading as soon as it
        has what it needs and calls ``evicted`` only after it has closed what it reads.
        """


class FIFO(Rule):
    """First in, first out."""

    def __init__(self, first_call: np.ndarray) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def loaded(self, expert: int) -> None:
        self._order[expert] = None

    def evicted(self, expert: int) -> None:
        self._order.pop(expert, None)

    def candidates(self) -> Iterator[int]:
        return iter(self._order)


class LRU(FIFO):
    """Least recently used, where a prefetch that asks for a resident expert counts as a use.

    Recency is that of the look-up, so the experts of one call keep their order whether they were resident or not.
    """

    def needed(self, expert: int, next_call: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def requested(self, expert: int) -> None:
        self._order.move_to_end(expert)


class LFU(Ranked):
    """Least often needed since it was loaded; ties by recency."""

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._uses: dict[int, int] = {}

    def needed(self, expert: int, next_call: int) -> None:
        self._uses[expert] = uses = self._uses.get(expert, 0) + 1
        self._place(expert, uses, self._tick())

    def _rank(self, expert: int) -> int:
        return self._uses.get(expert, 0)

    def evicted(self, expert: int) -> None:
        super().evicted(expert)
        self._uses.pop(expert, None)


class PerfectLFU(LFU):
    """Least often needed since the run began, in a slot or not; ties by recency."""

    def evicted(self, expert: int) -> None:
        Ranked.evicted(self, expert)


class LFRU(LFU):
    """Lowest product of uses since it was loaded and the number of the last: frequency times recency.

    Pull request 37190 of github.com/vllm-project/vllm names it; that the product is meant is read off the words.
    """

    def needed(self, expert: int, next_call: int) -> None:
        super().needed(expert, next_call)
        self._place(expert, self._uses[expert] * self._clock, self._clock)


class DecayedLFU(PerfectLFU):
    """Least often needed since the run began, where a use of `HALF` passes ago counts half; ties by recency.

    Pull request 32738 of github.com/microsoft/onnxruntime has counters that decay; their half-life is chosen here. All
    decay alike, so what is kept is their logarithm less that of the decay: it changes with a use alone. A pass begins
    where the experts' numbers rise no more, since they do within a step.
    """

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._last, self._passes = -1, 0

    def needed(self, expert: int, next_call: int) -> None:
        self._passes += expert <= self._last
        self._last = expert
        fresh, worth = len(ADDED) + self._passes * OCTAVE // HALF, self._uses.get(expert, 0)
        apart = abs(fresh - worth)
        self._uses[expert] = worth = max(fresh, worth) + (int(ADDED[apart]) if apart < len(ADDED) else 0)
        self._place(expert, worth, self._tick())


class LeastStale(Ranked):
    """Whoever this pass has used goes first, the latest first; then all others, least recently used first.

    SpecMD (arXiv 2602.03921): layers come in turn, so what was used just now is needed again last. The order of the
    others is chosen here. Passes begin as in ``decayed-lfu``.
    """

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._last = -1
        self._fresh: list[int] = []

    def needed(self, expert: int, next_call: int) -> None:
        if expert <= self._last:
            for one in self._fresh:
                if one in self._key and self._key[one][0] == 0:
                    self._place(one, 1, -self._key[one][1])
            self._fresh.clear()
        self._last = expert
        self._fresh.append(expert)
        self._place(expert, 0, -self._tick())

    def _rank(self, expert: int) -> int:
        return 1  # of one that comes in before it is needed


class LFUMFU(LFU):
    """As ``lfu`` for a demand; for a prefetch the most often needed goes first.

    So it stands in the code of MoE-Infinity (commit d617801, ``RemoveCachedSparseNode``), maybe by a slip of the sign.
    """

    def for_prefetch(self) -> Iterable[int]:
        return [*self.candidates()][::-1]


class Score(Ranked):
    """Lowest value first, as a policy last said; ties by recency. Values change by ``valued``."""

    by_values = True

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._values = [0] * len(first_call)

    def _rank(self, expert: int) -> int:
        return self._values[expert]

    def needed(self, expert: int, next_call: int) -> None:
        self._place(expert, self._rank(expert), self._tick())

    def valued(self, first: int, values: np.ndarray) -> None:
        end = first + len(values)
        self._values[first:end] = values.tolist()
        key = self._key
        for expert in [e for e in key if first <= e < end] if len(key) < len(values) else range(first, end):
            if expert in key:
                rank, tie, _ = key[expert]
                if rank != self._rank(expert):
                    self._place(expert, self._rank(expert), tie)


class RecentScore(Score):
    """As ``score``, where each new value counts half and all before it the other half."""

    def valued(self, first: int, values: np.ndarray) -> None:
        before = np.array(self._values[first : first + len(values)], np.int64)
        super().valued(first, (before + values) // 2)


class ScoreLFU(Score):
    """Lowest product of value and uses since it was loaded; ties by recency.

    With a predictor's probabilities as values this evicts the largest 1 / (p x frequency), as FineMoE does (arXiv
    2502.05370, EuroSys 2026). An expert that a prefetch brought counts as used once before it is: a product of 0 would
    send away first what was just predicted.
    """

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._uses: dict[int, int] = {}

    def _rank(self, expert: int) -> int:
        return self._values[expert] * max(1, self._uses.get(expert, 0))

    def needed(self, expert: int, next_call: int) -> None:
        self._uses[expert] = self._uses.get(expert, 0) + 1
        super().needed(expert, next_call)

    def evicted(self, expert: int) -> None:
        super().evicted(expert)
        self._uses.pop(expert, None)


class ScoreCount(Score):
    """Lowest value first; of equal ones whoever was needed least often since the run began; ties by recency.

    So a policy says who is needed soon, and of all others the counts of the traffic at hand decide, as in
    ``perfect-lfu``.
    """

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._uses = [0] * len(first_call)

    def _rank(self, expert: int) -> int:
        return self._values[expert] * COUNTS + self._uses[expert]

    def needed(self, expert: int, next_call: int) -> None:
        self._uses[expert] += 1
        super().needed(expert, next_call)


class Scored(Rule):
    """Lowest worth first, as a plan's scorer reckons it while the run goes (``sim.scorer``); ties by recency."""

    def __init__(self, first_call: np.ndarray) -> None:
        self.worths = np.zeros(len(first_call), np.int64)
        """Of all experts; whoever runs the scorer puts its own array here. A plan's values say nothing to it."""
        self._seen: dict[int, int] = {}
        self._clock = 0

    def needed(self, expert: int, next_call: int) -> None:
        self._clock += 1
        self._seen[expert] = self._clock

    def loaded(self, expert: int) -> None:
        if expert not in self._seen:
            self.needed(expert, NEVER)

    def evicted(self, expert: int) -> None:
        self._seen.pop(expert, None)

    def candidates(self) -> Iterable[int]:
        return sorted(self._seen, key=lambda expert: (self.worths[expert], self._seen[expert]))


class NextUse(Ranked):
    """Belady's MIN: the expert needed farthest in the future goes first (L. A. Belady, IBM Systems J. 5(2), 1966)."""

    clairvoyant = True

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self._next = first_call.tolist()

    def needed(self, expert: int, next_call: int) -> None:
        self._next[expert] = next_call
        self._place(expert, -next_call, expert)

    def loaded(self, expert: int) -> None:
        if expert not in self._key:
            self._place(expert, -self._next[expert], expert)


EVICTIONS: dict[str, Callable[[np.ndarray], Eviction]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "perfect-lfu": PerfectLFU,
    "lfu-mfu": LFUMFU,
    "lfru": LFRU,
    "decayed-lfu": DecayedLFU,
    "least-stale": LeastStale,
    "score": Score,
    "score-recent": RecentScore,
    "score-lfu": ScoreLFU,
    "score-count": ScoreCount,
    "scored": Scored,
    "arc": ARC,
    "s3-fifo": S3FIFO,
    "w-tinylfu": WTinyLFU,
    "next-use": NextUse,
}
"""The rules by name."""


def eviction_rule(eviction: str | Callable[[np.ndarray], Eviction]) -> Callable[[np.ndarray], Eviction]:
    """The rule of that name, or the class itself. Raises InputError for an unknown name."""
    if not isinstance(eviction, str):
        return eviction
    if eviction not in EVICTIONS:
        raise InputError(f"eviction {eviction!r} is unknown; expected one of {', '.join(EVICTIONS)}")
    return EVICTIONS[eviction]


def foresees(eviction: str | Callable[[np.ndarray], Eviction]) -> bool:
    """Whether that rule is told the future. Raises InputError for an unknown name."""
    return bool(getattr(eviction_rule(eviction), "clairvoyant", False))


def goes_by_values(eviction: str | Callable[[np.ndarray], Eviction]) -> bool:
    """Whether that is the name of a rule that needs a plan's values. Raises InputError for an unknown name."""
    return isinstance(eviction, str) and bool(getattr(eviction_rule(eviction), "by_values", False))


def largest_factor(eviction: str | Callable[[np.ndarray], Eviction], uses: int) -> int:
    """What a rule of that name multiplies values by at most, in a run of so many uses of an expert.

    Raises InputError for an unknown name.
    """
    rule = eviction_rule(eviction)
    return uses if rule is ScoreLFU else 2 * COUNTS if rule is ScoreCount else 1  # and counts are added
