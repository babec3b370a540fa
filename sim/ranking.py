"""What eviction rules are made of: one that hears nothing, and one that keeps experts in an order that changes."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter

import numpy as np

MANY = 256
"""More candidates than these are not looked at one by one."""
_NUMBER = itemgetter(2)


class Rule:
    """The parts that most rules leave empty."""

    def __init__(self, first_call: np.ndarray) -> None:
        """``first_call``: the first call that needs each expert (NEVER for none), for clairvoyant rules alone."""

    def needed(self, expert: int, next_call: int) -> None:
        pass

    def requested(self, expert: int) -> None:
        pass

    def valued(self, first: int, values: np.ndarray) -> None:
        pass


class Ranked(Rule):
    """Experts by a key that changes, the smallest first.

    Keys change with every look-up, the order is asked for when somebody must leave: until then it stays as it was, and
    those whose key has changed since are kept apart.
    """

    listed = True

    def __init__(self, first_call: np.ndarray) -> None:
        self._key: dict[int, tuple[int, int, int]] = {}
        """Rank, tie and number of each expert."""
        self._order: list[tuple[int, int, int]] = []
        self._numbers: array[int] | None = None
        """The experts in that order, once they are many."""
        self._moved: dict[int, tuple[int, int, int] | None] = {}
        """Those whose key has changed, and the key under which each still stands in the order, if it does."""
        self._clock = 0

    def _place(self, expert: int, rank: int, tie: int) -> None:
        self._moved.setdefault(expert, self._key.get(expert))
        self._key[expert] = (rank, tie, expert)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def loaded(self, expert: int) -> None:
        if expert not in self._key:
            self._place(expert, self._rank(expert), self._tick())

    def _rank(self, expert: int) -> int:
        """What ranks an expert that is given a slot before it is needed."""
        return 0

    def evicted(self, expert: int) -> None:
        key = self._key.pop(expert, None)
        if key is not None:
            self._moved.setdefault(expert, key)

    def candidates(self) -> Iterable[int]:
        if self._moved:
            self._arrange()
        if len(self._order) <= MANY:
            return map(_NUMBER, self._order)
        if self._numbers is None:
            self._numbers = array("q", map(_NUMBER, self._order))
        return self._numbers

    def _arrange(self) -> None:
        """Put those whose key has changed in their places: one by one if they are few, or all anew."""
        order, numbers, key = self._order, self._numbers, self._key
        if 4 * len(self._moved) > len(order):
            order[:] = sorted(key.values())
            self._numbers = None
        else:
            for expert, before in self._moved.items():
                if before is not None:
                    place = bisect_left(order, before)
                    del order[place]
                    if numbers is not None:
                        del numbers[place]
                now = key.get(expert)
                if now is not None:
                    place = bisect_left(order, now)
                    order.insert(place, now)
                    if numbers is not None:
                        numbers.insert(place, expert)
        self._moved.clear()
