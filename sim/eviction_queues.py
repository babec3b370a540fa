"""Rules of web and page caches, after their papers: ARC, S3-FIFO and W-TinyLFU.

Each is told how many experts its pool holds (``holds``). What the papers leave open: they put one object in at a time,
and whoever goes may go at once. Here a call needs several experts together, and whoever is pinned or on its way is
passed over for the next that the rule would let go. A ghost is an expert that has left and is remembered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from sim.ranking import Rule

Queue = OrderedDict[int, None]


class _Queues(Rule):
    """What they have in common: a size, and queues whose first goes first."""

    def __init__(self, first_call: np.ndarray) -> None:
        self.size = len(first_call)

    def holds(self, experts: int) -> None:
        """So many experts fit the pool."""
        self.size = max(1, experts)


class ARC(_Queues):
    """Adaptive replacement (N. Megiddo, D. S. Modha, FAST 2003, figure 4): once and often used ones, and their ghosts.

    ``p``, how many of the slots are for those used once, grows when one of their ghosts is needed and shrinks when one
    of the others' is.
    """

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self.once, self.often, self.once_ghosts, self.often_ghosts = (Queue() for _ in range(4))
        self._coming: dict[int, bool] = {}
        """Absent ones that a call needs: whether they were ghosts, and so are of those used often."""
        self._of_often_ghosts = False
        """Whether the last of them was a ghost of those used often."""
        self.p = 0.0

    def needed(self, expert: int, next_call: int) -> None:
        if expert in self.once or expert in self.often:
            self.once.pop(expert, None)
            self.often[expert] = None
            self.often.move_to_end(expert)
        else:
            self._remember(expert)

    def _remember(self, expert: int) -> None:
        """An absent expert is needed, or is asked for."""
        once, often = len(self.once_ghosts), len(self.often_ghosts)
        of_once, self._of_often_ghosts = expert in self.once_ghosts, expert in self.often_ghosts
        if of_once:
            self.p = min(float(self.size), self.p + max(1.0, often / once))
            del self.once_ghosts[expert]
        elif self._of_often_ghosts:
            self.p = max(0.0, self.p - max(1.0, once / often))
            del self.often_ghosts[expert]
        self._coming[expert] = of_once or self._of_often_ghosts or self._coming.get(expert, False)

    def loaded(self, expert: int) -> None:
        if expert not in self._coming:
            self._remember(expert)
        (self.often if self._coming.pop(expert) else self.once)[expert] = None
        if self.once_ghosts and len(self.once) + len(self.once_ghosts) > self.size:
            self.once_ghosts.popitem(last=False)
        if self.often_ghosts and self._known() > 2 * self.size:
            self.often_ghosts.popitem(last=False)

    def _known(self) -> int:
        return len(self.once) + len(self.once_ghosts) + len(self.often) + len(self.often_ghosts)

    def evicted(self, expert: int) -> None:
        for held, ghosts in ((self.once, self.once_ghosts), (self.often, self.often_ghosts)):
            if expert in held:
                del held[expert]
                ghosts[expert] = None

    def candidates(self) -> Iterable[int]:
        many = len(self.once)
        from_once = many > self.p or (self._of_often_ghosts and many == self.p)
        return [*self.once, *self.often] if many and from_once else [*self.often, *self.once]


class S3FIFO(_Queues):
    """Three first-in-first-out queues (J. Yang et al., SOSP 2023, algorithm 1): small, main, and ghosts.

    A tenth of the slots is the small queue's. What is needed twice there moves to the main queue, whose members go
    round again as often as they were needed, three times at most. A ghost that is needed goes to the main queue at
    once; there are as many ghosts as the main queue has slots.
    """

    SMALL, MOST = 0.1, 3

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self.small, self.main, self.ghosts = Queue(), Queue(), Queue()
        self._uses: dict[int, int] = {}

    def needed(self, expert: int, next_call: int) -> None:
        if expert in self._uses:
            self._uses[expert] = min(self.MOST, self._uses[expert] + 1)

    def loaded(self, expert: int) -> None:
        self._uses[expert] = 0
        if expert in self.ghosts:
            del self.ghosts[expert]
            self.main[expert] = None
        else:
            self.small[expert] = None

    def evicted(self, expert: int) -> None:
        for other in _leaving(self.small, self.main, self._uses, self._small_size()):
            if other == expert:  # until here the queues have moved on
                break
        self._uses.pop(expert, None)
        self.main.pop(expert, None)
        if expert in self.small:
            del self.small[expert]
            self.ghosts[expert] = None
            if len(self.ghosts) > self.size - self._small_size():
                self.ghosts.popitem(last=False)

    def _small_size(self) -> int:
        return max(1, int(self.size * self.SMALL))

    def candidates(self) -> Iterable[int]:
        return _leaving(self.small.copy(), self.main.copy(), self._uses.copy(), self._small_size())


def _leaving(small: Queue, main: Queue, uses: dict[int, int], quota: int) -> Iterator[int]:
    """Who of S3-FIFO's queues leaves, one after another; they move on as whoever is passed over stays where it is."""
    order = (_of_small, _of_main) if len(small) >= quota or not main else (_of_main, _of_small)
    for queue in order:
        yield from queue(small, main, uses)


def _of_small(small: Queue, main: Queue, uses: dict[int, int]) -> Iterator[int]:
    for expert in list(small):
        if uses[expert] > 1:
            del small[expert]
            main[expert] = None
            uses[expert] = 0
        else:
            yield expert


def _of_main(small: Queue, main: Queue, uses: dict[int, int]) -> Iterator[int]:
    offered: set[int] = set()
    while len(offered) < len(main):
        for expert in [one for one in main if one not in offered]:
            if uses[expert]:
                main.move_to_end(expert)
                uses[expert] -= 1
            else:
                offered.add(expert)
                yield expert


class WTinyLFU(_Queues):
    """A small window before a segmented LRU that only the more frequent may enter (G. Einziger et al., ACM TOS 2017).

    A hundredth of the slots, one at least, is the window's; of the others four fifths are protected. Of the window's
    oldest and the oldest on probation the less frequent leaves. Frequencies are counted exactly, up to 15, where the
    paper has a sketch, since experts are few; all are halved after ten times as many uses as there are slots.
    """

    WINDOW, PROTECTED, MOST, SAMPLE = 0.01, 0.8, 15, 10

    def __init__(self, first_call: np.ndarray) -> None:
        super().__init__(first_call)
        self.window, self.probation, self.protected = Queue(), Queue(), Queue()
        self._uses = [0] * len(first_call)
        self._counted = 0

    def needed(self, expert: int, next_call: int) -> None:
        self._uses[expert] = min(self.MOST, self._uses[expert] + 1)
        self._counted += 1
        if self._counted >= self.SAMPLE * self.size:
            self._uses = [uses // 2 for uses in self._uses]
            self._counted //= 2
        if expert in self.window:
            self.window.move_to_end(expert)
        elif expert in self.protected:
            self.protected.move_to_end(expert)
        elif expert in self.probation:
            del self.probation[expert]
            self.protected[expert] = None
            while len(self.protected) > int((self.size - self._window_size()) * self.PROTECTED):
                self.probation[self.protected.popitem(last=False)[0]] = None

    def loaded(self, expert: int) -> None:
        self.window[expert] = None
        while len(self.window) > self._window_size():
            self.probation[self.window.popitem(last=False)[0]] = None

    def evicted(self, expert: int) -> None:
        for queue in (self.window, self.probation, self.protected):
            queue.pop(expert, None)

    def _window_size(self) -> int:
        return max(1, int(self.size * self.WINDOW))

    def candidates(self) -> Iterable[int]:
        entering = next(iter(self.window), None) if len(self.window) >= self._window_size() else None
        oldest = next(iter(self.probation or self.protected), None)
        rest = [*self.probation, *self.protected, *self.window]
        if entering is None or oldest is None or self._uses[entering] > self._uses[oldest]:
            return rest
        return [entering, *(expert for expert in rest if expert != entering)]
