"""What waits for the link, and whose turn it is: the same rules in simulated time and with real copies.

Order of service, by discipline:

- ``fifo``: as issued, whatever it is for.
- ``demand-first``: demands before prefetches; whatever runs is finished first.
- ``preemptive``: also, a running prefetch gives way to a demand at its next chunk boundary and resumes afterwards.

A prefetch is dropped once its call has passed: from the queue without a trace on the link, at a boundary where it gave
way with the bytes that it had moved. The victim is chosen when a transfer starts, not when it is queued.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from sim.log import Counters
from sim.plan import Discipline
from sim.run.observer import Observer, Outcome
from sim.run.slots import ExpertCache


class Transfer:
    """One expert on its way to the GPU. ``body`` and ``moved`` are in its link's unit of work (`LinkQueue`)."""

    __slots__ = (
        "begin", "body", "demand", "event", "expert", "handed", "lead", "leaving", "moved", "needed", "phase",
        "prefetch", "priority", "serial", "started", "startup",
    )  # fmt: skip

    def __init__(
        self, expert: int, startup: int, body: int, serial: int, prefetch: bool, priority: int, phase: int
    ) -> None:
        self.expert = expert
        self.startup = startup  # ns before the first byte on an idle link, paid again on resuming
        self.lead = startup  # that of the present stretch
        self.body = body  # units of work in all, at least 1
        self.serial = serial
        self.prefetch = prefetch  # issued as a prefetch; stays so when a demand joins
        self.demand = not prefetch  # somebody waits for it
        self.needed = not prefetch  # and will run it
        self.priority = priority
        self.phase = phase
        self.moved = 0  # units of work done at the last boundary
        self.begin = 0  # when the present stretch began, ns
        self.handed = -1  # simulated: when the host has handed it over, ns
        self.started = False
        self.leaving: list[int] = []  # whom it evicted, while they are still to be copied to the host
        self.event: Any = None  # the engine's own: tells those who wait that the expert is there


class LinkQueue(ABC):
    """The queue of a link, on which one transfer runs at a time. A subclass is the copy engine.

    Args:
        cache: slots; ``allot`` is asked when a transfer starts.
        chunks: pieces a transfer is cut into; boundaries lie at equal shares of its bytes.
        discipline: see the module.
        counters: where bytes and prefetch outcomes are counted.
        observer: told of every request and eviction, or None.

    A subclass measures a transfer in a unit of work of its own: nanoseconds of copying in simulated time, bytes where
    copies are real. Nothing here depends on which, since both grow alike.

    A subclass must define `now`, `moving` and `kick`, and three steps that the queue asks for, named ``_do_...`` as in
    SimPy's resources: `_do_measure`, `_do_start` and `_do_stop`. For these it calls `_next` when the link has become
    idle, and `_land` when a transfer is complete. It keeps three marks of its own: ``_running`` is the transfer on the
    link, ``_committed`` one that was handed over to follow it, and ``_paused`` a prefetch that gave way. Each may be
    None. It may ask whether anything stands in ``_demands`` and ``_queue``. It overrides nothing else.
    """

    def __init__(
        self, cache: ExpertCache, chunks: int, discipline: Discipline, counters: Counters,
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.chunks = chunks
        self.discipline = discipline
        self.counters = counters
        self.observer = observer
        self.transfers: dict[int, Transfer] = {}
        """Everything queued, running or paused, by expert."""
        self.passed = -1
        """The last call whose route is known and whose experts have been looked up."""
        self.phase = 0
        self.awaited: set[int] = set()
        """Experts that the running call will demand once its present wave is done: it serves requests for them too."""
        self.most_issued = 0
        """The most copies that the requests of one moment issue; 0 for no such limit."""
        self.only_idle = False
        """Requests that are made while something moves issue no copy."""
        self.write_back = False
        """Whoever is evicted is copied to the host first."""
        self._demands: list[Transfer] = []
        self._queue: list[tuple[int, int, Transfer]] = []
        self._running: Transfer | None = None
        self._committed: Transfer | None = None
        self._paused: Transfer | None = None
        self._serial = 0

    # -- what a subclass defines ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def now(self) -> int:
        """The present as the observer is told it, ns."""

    @property
    @abstractmethod
    def moving(self) -> bool:
        """Something crosses the link now."""

    @abstractmethod
    def kick(self) -> None:
        """Start what can be started, and let demands overtake; called after every change that the engine makes."""

    @abstractmethod
    def _do_measure(self, expert: int) -> tuple[int, int]:
        """The start-up of a copy of ``expert``, ns, and its body in this link's unit of work, at least 1."""

    @abstractmethod
    def _do_start(self, transfer: Transfer) -> None:
        """It is the turn of ``transfer``, which holds a slot: begin it, or go on with it from ``transfer.moved``.

        Those in ``transfer.leaving`` are copied to the host before it, and `_written_back` then says so.
        The link is idle when this is called, and ``_running`` is None.
        """

    @abstractmethod
    def _do_stop(self, transfer: Transfer) -> None:
        """The run is over while ``transfer`` is on the link: bring what it has moved, and its count, up to date."""

    # -- what the engine says ------------------------------------------------------------------------------------

    def demand(self, expert: int) -> Transfer:
        """Ask for ``expert`` now; joins its prefetch if that is queued or under way."""
        transfer = self.transfers.get(expert)
        if transfer is None:
            transfer = self._new(expert, False, 0)
        elif transfer.demand:
            return transfer
        transfer.demand = transfer.needed = True
        handed = transfer is self._running or transfer is self._committed
        if not handed and transfer.moved < transfer.body:  # something of it is left to start
            if self.discipline == "fifo":  # a demand that joins keeps the place in line of its prefetch
                insort(self._demands, transfer, key=attrgetter("serial"))
            else:
                self._demands.append(transfer)
        if transfer is self._paused:
            self._paused = None
        return transfer

    def insist(self, expert: int) -> Transfer:
        """Wait for the prefetch of ``expert``, which is queued or under way, though nobody needs it now."""
        transfer = self.demand(expert)
        transfer.needed = False
        return transfer

    def request(self, expert: int, call: int, priority: int) -> None:
        """Ask for ``expert`` to be there for ``call``; see ``sim.plan.Requests`` for experts resident or queued."""
        self.request_all(((expert, call, priority),))

    def request_moment(self, requests: Iterable[tuple[int, int, int]]) -> None:
        """``request_all`` of a moment of the plan, as many as the plan lets issue a copy now."""
        self.request_all(requests, self.may_issue)

    @property
    def may_issue(self) -> int:
        """How many copies the requests of a moment may issue if they are made now, -1 for any number."""
        return 0 if self.only_idle and self.moving else self.most_issued or -1

    def request_all(self, requests: Iterable[tuple[int, int, int]], most: int = -1) -> None:
        """``request`` one (expert, call, priority) after the other; what is for a call that has passed is left out.

        So are those that would issue more than ``most`` copies; -1 for any number.
        """
        cache, transfers, passed, queued = self.cache, self.transfers, self.passed, self.discipline != "fifo"
        state, observer = cache.state, self.observer
        outcome: Outcome
        for expert, call, priority in requests:
            if call <= passed:
                continue
            transfer = transfers.get(expert)
            if transfer is not None and self._out_of_date(transfer, passed + 1):
                self._cancel(transfer)
                transfer = None
            if most >= 0 and transfer is None and not state[expert] and expert not in self.awaited:
                if not most:
                    continue
                most -= 1
            cache.requested(expert, call)
            if transfer is not None:
                outcome = "queued"
                if priority < transfer.priority and not transfer.started and not transfer.demand:
                    transfer.priority = priority
                    if queued:
                        self._enqueue(transfer)
            elif state[expert]:
                outcome = "resident"
            elif expert in self.awaited:
                outcome = "queued"
            else:
                outcome = "issued"
                self.counters.issued[self.phase] += 1
                self._enqueue(self._new(expert, True, priority))
            if observer:
                observer.requested(self.now, expert, call, outcome)

    def request_present(self, requests: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Make the requests for what is there or under way, which keeps it, and return the others."""
        state, transfers, passed = self.cache.state, self.transfers, self.passed
        kept: list[tuple[int, int, int]] = []
        others: list[tuple[int, int, int]] = []
        for request in requests:
            transfer = transfers.get(request[0])
            under_way = transfer is not None and not self._out_of_date(transfer, passed + 1)
            (kept if under_way or state[request[0]] else others).append(request)
        self.request_all(kept)
        return others

    def forget_if_passed(self, expert: int, call: int) -> None:
        """Drop a queued prefetch of ``expert`` that was for a call before ``call``."""
        transfer = self.transfers.get(expert)
        if transfer is not None and self._out_of_date(transfer, call):
            self._cancel(transfer)

    def _out_of_date(self, transfer: Transfer, call: int) -> bool:
        """Whether that is a queued prefetch for a call before ``call``."""
        wanted_until = self.cache.wanted_until
        return wanted_until[transfer.expert] < call and not transfer.started and not transfer.demand

    @property
    def demanded(self) -> list[int]:
        """Experts that are waited for and not being copied now, in the order in which they will be."""
        return [transfer.expert for transfer in self._demands]

    @property
    def idle(self) -> bool:
        """Nothing moves and nothing waits to."""
        return not self.transfers

    def close(self) -> None:
        """End of the run: queued prefetches are cancelled, those under way counted as such."""
        for transfer in list(self.transfers.values()):
            if transfer.prefetch and not transfer.needed:  # whoever needed it counted it as late
                if transfer.started:
                    self.counters.in_flight[transfer.phase] += 1
                    if transfer is self._running:
                        self._do_stop(transfer)
                    self.counters.wasted[transfer.phase] += self._bytes(transfer)
                else:
                    self.counters.cancelled[transfer.phase] += 1
        for expert in list(self.counters.landed_unused):
            self.counters.unused_prefetch(expert, self.cache.size[expert])

    # -- the queue -----------------------------------------------------------------------------------------------

    def _new(self, expert: int, prefetch: bool, priority: int) -> Transfer:
        self._serial += 1
        startup, body = self._do_measure(expert)
        transfer = Transfer(expert, startup, body, self._serial, prefetch, priority, self.phase)
        self.transfers[expert] = transfer
        return transfer

    def _enqueue(self, transfer: Transfer) -> None:
        heappush(self._queue, (0 if self.discipline == "fifo" else transfer.priority, transfer.serial, transfer))

    def _next(self) -> None:
        """The link is idle: start the transfer whose turn it is."""
        while self._demands:
            transfer = self._demands[0]
            if self.discipline == "fifo" and self._start_prefetch(before=transfer.serial):
                return
            if not transfer.started and not self._allot(transfer):
                # Nothing may be evicted. A prefetch that gave way holds a slot and waits for us: it must go.
                if self._paused is None:
                    return
                self._abandon(self._paused)
                continue
            del self._demands[0]
            self._do_start(transfer)
            return
        if self._paused is not None:
            paused = self._paused
            if self.cache.wanted_until[paused.expert] > self.passed:
                self._paused = None
                self._do_start(paused)
                return
            self._abandon(paused)
        self._start_prefetch()

    def _start_prefetch(self, before: int | None = None) -> bool:
        """Start the first queued prefetch that may start; one whose pool has no room waits in its place."""
        queue, cache = self._queue, self.cache
        if not queue:
            return False
        blocked: list[tuple[int, int, Transfer]] = []
        full: set[int] = set()
        started = False
        while queue:
            entry = queue[0]
            priority, serial, transfer = entry
            if before is not None and serial > before:
                break
            stale = priority != transfer.priority and self.discipline != "fifo"
            if stale or transfer.started or transfer.demand or self.transfers.get(transfer.expert) is not transfer:
                heappop(queue)
                continue
            if cache.wanted_until[transfer.expert] <= self.passed:
                heappop(queue)
                self._cancel(transfer)
                continue
            pool = cache.pool[transfer.expert]
            if pool not in full:
                started = self._allot(transfer)
                if not started:
                    full.add(pool)
                    if len(full) == len(cache.capacity):
                        break
            heappop(queue)
            if started:
                self._do_start(transfer)
                break
            blocked.append(entry)
        for entry in blocked:
            heappush(queue, entry)
        return started

    def _allot(self, transfer: Transfer) -> bool:
        victims = self.cache.allot(transfer.expert, self.passed, transfer.demand)
        if victims is None:
            return False
        for victim in victims:
            self.counters.evictions[self.phase] += 1
            if not self.cache.used[victim]:
                self.counters.unused_prefetch(victim, self.cache.size[victim])
        if self.write_back:
            transfer.leaving = victims
        if victims and self.observer:
            self.observer.evicted(self.now, victims, transfer.expert)
        return True

    def _land(self, transfer: Transfer) -> None:
        """``transfer`` is complete: its expert is there."""
        del self.transfers[transfer.expert]
        self.cache.landed(transfer.expert)
        if transfer.prefetch and not transfer.needed:
            self.counters.landed_unused[transfer.expert] = transfer.phase

    def _written_back(self, transfer: Transfer) -> None:
        """Whoever ``transfer`` evicted has been copied to the host."""
        self.counters.written_back[transfer.phase] += sum(self.cache.size[expert] for expert in transfer.leaving)
        transfer.leaving = []

    def _bytes(self, transfer: Transfer) -> int:
        size = self.cache.size[transfer.expert]
        return size * transfer.moved // transfer.body

    def _cancel(self, transfer: Transfer) -> None:
        self.counters.cancelled[transfer.phase] += 1
        del self.transfers[transfer.expert]

    def _abandon(self, transfer: Transfer) -> None:
        """Give up a prefetch that gave way: its slot is free, its bytes were for nothing."""
        self._paused = None
        self.counters.wasted[transfer.phase] += self._bytes(transfer)
        self._cancel(transfer)
        self.cache.release(transfer.expert)
