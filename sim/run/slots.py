"""The GPU's expert slots: who holds one, who may lose it.

Capacity is in bytes, so layers with experts of different sizes share a budget exactly; with equal sizes it is a number
of slots. Slots may be one pool or be split over layers (a pool each); a pool has its own eviction rule.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, filterfalse
from typing import cast

import numpy as np

from ground.errors import InputError
from sim.eviction import NEVER, Eviction, eviction_rule
from sim.ranking import MANY

ABSENT, LOADING, RESIDENT = 0, 1, 2
NEAR = 32
"""Of many candidates the first so many are looked at one by one, the rest together."""


class ExpertCache:
    """Slots for experts, each absent, loading or resident.

    Args:
        sizes: bytes of one expert, a routed layer (L,).
        n_experts: experts a layer, E. An expert's number is ``layer * E + expert``.
        capacity: bytes of each pool.
        pool: the pool of each routed layer (L,).
        eviction: a name in ``sim.eviction.EVICTIONS`` or a class like those.
        first_call: the first call that needs each expert (L * E,), for clairvoyant rules alone.
        reserved: experts that have a slot each beside the pools: together they are one more pool, which holds them all.
        shared: layers share one pool by shares (``sim.shares``), each with a rule of its own.

    Raises InputError if a pool cannot hold one expert of a layer that it serves, or no rule is called ``eviction``.
    """

    def __init__(
        self, sizes: Sequence[int], n_experts: int, capacity: Sequence[int], pool: Sequence[int],
        eviction: str | Callable[[np.ndarray], Eviction] = "lru", first_call: np.ndarray | None = None,
        reserved: Sequence[int] = (), shared: bool = False,
    ) -> None:  # fmt: skip
        total = len(sizes) * n_experts
        for layer, size in enumerate(sizes):
            if capacity[pool[layer]] < size:
                raise InputError(
                    f"cache: {capacity[pool[layer]]} bytes for routed layer {layer} cannot hold one expert "
                    f"of {size} bytes; give at least that"
                )
        if first_call is None:
            first_call = np.full(total, NEVER, np.int64)
        rule = eviction_rule(eviction)
        self.size = [size for size in sizes for _ in range(n_experts)]
        self.pool = [p for p in pool for _ in range(n_experts)]
        self.fit = [capacity[p] // size for p, size in zip(pool, sizes, strict=True) for _ in range(n_experts)]
        """How many experts of each one's layer their pool can hold at once."""
        self.capacity = [*capacity, sum(self.size[expert] for expert in reserved)] if reserved else list(capacity)
        for expert in reserved:
            self.pool[expert] = len(capacity)
        self.reserved = frozenset(reserved)
        self.free = list(self.capacity)
        self.group = [layer for layer in range(len(sizes)) for _ in range(n_experts)] if shared else self.pool
        """Whose rule each expert goes by: its layer's where layers have shares, else its pool's."""
        self.rules: list[Eviction] = [rule(first_call) for _ in (sizes if shared else self.capacity)]
        for expert in range(0, total, n_experts):  # where layers of a pool differ in size, the last one's counts
            if hasattr(own := self.rules[self.group[expert]], "holds"):
                own.holds(self.fit[expert])
        self.shares = [0] * len(sizes) if shared else None
        """How many slots each layer should have, where that is said."""
        self._held = [0] * len(sizes)
        self.before_eviction: Callable[[], object] | None = None
        """Called before anybody is chosen to leave."""
        self.state = bytearray(total)
        self.pinned = bytearray(total)
        """1 while a running call needs the slot: `pin` and `unpin` alone write it."""
        self.used = bytearray(total)
        """1 once a resident expert has been needed since it was loaded."""
        self.wanted_until = [-1] * total
        """The last call that a prefetch asked each expert for."""
        self._listed = total > MANY and getattr(rule, "listed", False)
        self._two_orders = hasattr(rule, "for_prefetch")
        self._wanted = bytearray(total)
        """1 while that call has not passed, for rules that are listed: some policies want nearly all experts."""
        self._last_wanted: dict[int, list[int]] = {}
        """The experts whose last call each was when they were asked for."""
        self._passed = -1

    def needed(self, expert: int, next_call: int = NEVER) -> None:
        """A call needs ``expert``: tell its pool's rule."""
        self.rules[self.group[expert]].needed(expert, next_call)

    def requested(self, expert: int, call: int) -> None:
        """A prefetch asks for ``expert`` to be there for ``call``."""
        if call > self.wanted_until[expert]:
            self.wanted_until[expert] = call
            if self._listed and call > self._passed:
                self._wanted[expert] = 1
                self._last_wanted.setdefault(call, []).append(expert)
        if self.state[expert] == RESIDENT:
            self.rules[self.group[expert]].requested(expert)

    def allot(self, expert: int, passed: int, demand: bool) -> list[int] | None:
        """Give ``expert`` room and return whom that evicted, or None if nobody may go.

        Pinned and loading experts never go. Experts that a prefetch wants for a call after ``passed`` go only for a
        demand, and only when nobody else can. ``passed`` never falls.
        """
        pool, size = self.pool[expert], self.size[expert]
        missing = size - self.free[pool]
        victims: list[int] = []
        if missing > 0 and self.before_eviction is not None:
            self.before_eviction()
        if missing > 0 and self.shares is not None:
            missing = self._look_through_layers(self.group[expert], missing, passed, demand, victims)
        elif missing > 0:
            candidates = self._candidates(pool, demand)
            if self._listed and isinstance(candidates, array) and candidates.typecode == "q":
                missing = self._search(candidates, missing, passed, demand, victims)
            else:
                missing = self._look_through(candidates, missing, passed, demand, victims)
        if missing > 0:
            return None
        for other in victims:
            self.release(other)
        if self.shares is not None:
            self._held[self.group[expert]] += 1
        self.free[pool] -= size
        self.state[expert] = LOADING
        self.used[expert] = 0
        self.rules[self.group[expert]].loaded(expert)
        return victims

    def share_out(self, shares: list[int]) -> None:
        """Let each layer have so many slots from now on."""
        self.shares = shares

    def _look_through_layers(self, own: int, missing: int, passed: int, demand: bool, victims: list[int]) -> int:
        """As `_look_through`, in layers that have shares; ``own`` is the layer that will hold one more."""
        beyond = [held - share for held, share in zip(self._held, self.shares or (), strict=True)]
        beyond[own] += 1
        for wanted in (False, True) if demand else (False,):
            leaving = [self._may_leave(layer, passed, demand, wanted) for layer in range(len(beyond))]
            while missing > 0:
                for layer in sorted(range(len(beyond)), key=lambda layer: (-beyond[layer], -layer)):
                    if (victim := next(leaving[layer], None)) is not None:
                        break
                else:
                    break
                victims.append(victim)
                missing -= self.size[victim]
                beyond[layer] -= 1
        return missing

    def _may_leave(self, group: int, passed: int, demand: bool, wanted: bool) -> Iterator[int]:
        """Who of a group may leave, those that a request wants or those that none does, in the order of its rule."""
        for other in self._candidates(group, demand):
            free = self.state[other] == RESIDENT and not self.pinned[other]
            if free and (self.wanted_until[other] > passed) == wanted:
                yield other

    def _candidates(self, group: int, demand: bool) -> Iterable[int]:
        rule = self.rules[group]
        if self._two_orders and not demand:
            return cast(Iterable[int], rule.for_prefetch())  # type: ignore[attr-defined]
        return rule.candidates()

    def _look_through(
        self, candidates: Iterable[int], missing: int, passed: int, demand: bool, victims: list[int]
    ) -> int:
        """Add to ``victims`` of ``candidates``, one by one, until no bytes are ``missing``; how many still are."""
        state, pinned, wanted_until = self.state, self.pinned, self.wanted_until
        wanted: list[int] = []
        for other in candidates:
            if state[other] != RESIDENT or pinned[other]:
                continue
            if wanted_until[other] > passed:
                if demand:
                    wanted.append(other)
                continue
            victims.append(other)
            missing -= self.size[other]
            if missing <= 0:
                break
        if hasattr(candidates, "close"):
            candidates.close()
        for other in wanted if missing > 0 else ():
            victims.append(other)
            missing -= self.size[other]
            if missing <= 0:
                break
        return missing

    def _search(self, candidates: "array[int]", missing: int, passed: int, demand: bool, victims: list[int]) -> int:
        """The same of many ``candidates``."""
        if passed > self._passed:
            self._pass(passed)
        state, pinned = self.state, self.pinned
        near = candidates[:NEAR]
        for wanted in (False, True):
            if wanted and not demand:
                break
            fits = filter if wanted else filterfalse
            for other in chain(fits(self._wanted.__getitem__, near), self._beyond(candidates, NEAR, wanted)):
                if state[other] == RESIDENT and not pinned[other]:
                    victims.append(other)
                    missing -= self.size[other]
                    if missing <= 0:
                        return missing
        return missing

    def _beyond(self, candidates: "array[int]", first: int, wanted: bool) -> Iterator[int]:
        """Those of ``candidates`` from place ``first`` on that are wanted, or not, in order, all found at once."""
        flags = np.frombuffer(self._wanted, np.uint8).take(np.frombuffer(candidates, np.int64)).tobytes()
        flag = b"\x01" if wanted else b"\x00"  # bytes find the next place faster than numpy finds all
        place = flags.find(flag, first)
        while place >= 0:
            yield candidates[place]
            place = flags.find(flag, place + 1)

    def _pass(self, passed: int) -> None:
        """Note that nobody wants experts any more for the calls up to ``passed``."""
        calls: Sequence[int] = range(self._passed + 1, passed + 1)
        if len(calls) > len(self._last_wanted):
            calls = [call for call in self._last_wanted if call <= passed]
        for call in calls:
            for expert in self._last_wanted.pop(call, ()):
                if self.wanted_until[expert] <= passed:
                    self._wanted[expert] = 0
        self._passed = passed

    def landed(self, expert: int) -> None:
        """The transfer of ``expert`` is complete."""
        self.state[expert] = RESIDENT

    def pin(self, experts: Iterable[int]) -> None:
        """A running call needs ``experts``: none of them is evicted until `unpin`."""
        pinned = self.pinned
        for expert in experts:
            pinned[expert] = 1

    def unpin(self, experts: Iterable[int]) -> None:
        """The kernels of ``experts`` have ended."""
        pinned = self.pinned
        for expert in experts:
            pinned[expert] = 0

    def use(self, expert: int) -> None:
        """A call has needed ``expert`` since it was loaded."""
        self.used[expert] = 1

    def fill(self) -> None:
        """Have every expert there and used, before a run begins; there must be room for all."""
        for expert in range(len(self.state)):
            self.allot(expert, -1, demand=True)
            self.landed(expert)
            self.use(expert)

    def release(self, expert: int) -> None:
        """Empty the slot of ``expert``: evicted, dropped after use, or its transfer abandoned."""
        pool = self.pool[expert]
        self.free[pool] += self.size[expert]
        self.state[expert] = ABSENT
        if self.shares is not None:
            self._held[self.group[expert]] -= 1
        self.rules[self.group[expert]].evicted(expert)

    def valued(self, first: int, values: np.ndarray) -> None:
        """Hand the rules of their groups new values of being kept for the experts from ``first`` on."""
        for group in dict.fromkeys(self.group[first : first + len(values)]):
            self.rules[group].valued(first, values)


def waves(cache: ExpertCache, experts: list[int], queued: Sequence[int] = ()) -> list[list[int]]:
    """Split the experts of one call into waves that fit its layer's slots.

    Residents come first, then what is loading, then what is queued in the order given, then the absent: so whatever is
    under way finds a slot in the wave that uses it, and is not evicted by an earlier one. Experts with reserved slots
    take no others.
    """
    slots, reserved = cache.fit[experts[0]], cache.reserved
    if len(experts) - len(reserved.intersection(experts) if reserved else ()) <= slots:
        return [experts]
    state, turn = cache.state, {expert: place for place, expert in enumerate(queued)}
    order = sorted(experts, key=lambda e: (-state[e], turn.get(e, len(turn))))
    parts: list[list[int]] = [[]]
    room = slots
    for expert in order:
        if expert not in reserved:
            if not room:
                parts.append([])
                room = slots
            room -= 1
        parts[-1].append(expert)
    return parts
