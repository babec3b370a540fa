"""The PCIe link: one copy engine that moves experts from host to GPU, one transfer at a time.

Order of service, by discipline:

- ``fifo``: as issued, whatever it is for.
- ``demand-first``: demands before prefetches; whatever runs is finished first.
- ``preemptive``: also, a running prefetch gives way to a demand at its next chunk boundary and resumes afterwards.

At one instant landings come first, then demands, then prefetches; a transfer that has moved nothing yet gives way at
once (except in ``fifo``). A transfer costs ``latency + bytes / bandwidth`` from the measured curve; resuming one costs
the latency again, and where copies are ``chained`` one that follows another at once has none. Only boundaries that
somebody waits for become events.

A prefetch is dropped once its call has passed: from the queue without a trace on the link, at a boundary where it gave
way with the bytes that it had moved. The victim is chosen when a transfer starts, not when it is queued.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Protocol

from simpy import Event

from sim.log import Counters
from sim.plan import Discipline
from sim.run.clock import LANDING, Clock
from sim.run.slots import ExpertCache


class Observer(Protocol):
    """Something that watches a run (a timeline, a test); times in nanoseconds."""

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


class Transfer:
    """One expert on its way to the GPU."""

    __slots__ = (
        "begin", "body", "demand", "event", "expert", "lead", "moved", "needed", "phase",
        "prefetch", "priority", "serial", "started", "startup",
    )  # fmt: skip

    def __init__(
        self, expert: int, startup: int, body: int, serial: int, prefetch: bool, priority: int, phase: int
    ) -> None:
        self.expert = expert
        self.startup = startup  # ns before the first byte on an idle link, paid again on resuming
        self.lead = startup  # that of the present stretch
        self.body = body  # ns of copying, at least 1
        self.serial = serial
        self.prefetch = prefetch  # issued as a prefetch; stays so when a demand joins
        self.demand = not prefetch  # somebody waits for it
        self.needed = not prefetch  # and will run it
        self.priority = priority
        self.phase = phase
        self.moved = 0  # ns of body done at the last boundary
        self.begin = 0  # when the present stretch began
        self.started = False
        self.event: Event | None = None


class Link:
    """The copy engine and its queue.

    Args:
        env: the simulation.
        cache: slots; ``allot`` is asked when a transfer starts.
        copy_ns: time of one whole copy alone, a flat expert.
        latency_ns: its part that does not grow with bytes.
        chunks: pieces a transfer is cut into; boundaries lie at equal shares of its bytes.
        discipline: see the module.
        counters: where bytes and prefetch outcomes are counted.
        observer: told of every stretch on the link, or None.
        chained: whether a transfer that follows another at once has no start-up.
    """

    def __init__(
        self,
        env: Clock,
        cache: ExpertCache,
        copy_ns: Callable[[int], int],
        latency_ns: int,
        chunks: int,
        discipline: Discipline,
        counters: Counters,
        observer: Observer | None = None,
        chained: bool = False,
    ) -> None:
        self.env = env
        self.cache = cache
        self.copy_ns = copy_ns
        self.latency_ns = latency_ns
        self.chunks = chunks
        self.discipline = discipline
        self.counters = counters
        self.observer = observer
        self.chained = chained
        self.transfers: dict[int, Transfer] = {}
        """Everything queued, running or paused, by expert."""
        self.passed = -1
        """The last call whose route is known and whose experts have been looked up."""
        self.phase = 0
        self.awaited: set[int] = set()
        """Experts that the running call will demand once its present wave is done: it serves requests for them too."""
        self._demands: list[Transfer] = []
        self._queue: list[tuple[int, int, Transfer]] = []
        self._running: Transfer | None = None
        self._paused: Transfer | None = None
        self._ending: Event | None = None
        self._serial = 0
        self._busy_until = -1  # when the last stretch that took any time ended

    # -- what the engine says ------------------------------------------------------------------------------------

    def demand(self, expert: int) -> Transfer:
        """Ask for ``expert`` now; joins its prefetch if that is queued or under way."""
        transfer = self.transfers.get(expert)
        if transfer is None:
            transfer = self._new(expert, False, 0)
        elif transfer.demand:
            return transfer
        transfer.demand = transfer.needed = True
        if transfer is not self._running:
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

    def request_all(self, requests: Iterable[tuple[int, int, int]]) -> None:
        """``request`` one (expert, call, priority) after the other; what is for a call that has passed is left out."""
        cache, transfers, passed, queued = self.cache, self.transfers, self.passed, self.discipline != "fifo"
        state, observer = cache.state, self.observer
        for expert, call, priority in requests:
            if call <= passed:
                continue
            transfer = transfers.get(expert)
            if transfer is not None and self._out_of_date(transfer, passed + 1):
                self._cancel(transfer)
                transfer = None
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
                observer.requested(self.env.now, expert, call, outcome)

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
    def moving(self) -> bool:
        """Something crosses the link now."""
        return self._running is not None

    @property
    def idle(self) -> bool:
        """Nothing moves and nothing waits to."""
        return not self.transfers

    def kick(self) -> None:
        """Start what can be started, and let demands overtake; called after every change that the engine makes."""
        running = self._running
        if running is None:
            self._next()
        elif self._demands and not running.demand and running.prefetch and self.discipline != "fifo":
            self._give_way(running)

    def close(self) -> None:
        """End of the run: queued prefetches are cancelled, those under way counted as such."""
        for transfer in list(self.transfers.values()):
            if transfer.prefetch and not transfer.needed:  # whoever needed it counted it as late
                if transfer.started:
                    self.counters.in_flight[transfer.phase] += 1
                    if transfer is self._running:
                        self._account(transfer, self._progress(transfer))
                    self.counters.wasted[transfer.phase] += self._bytes(transfer)
                else:
                    self.counters.cancelled[transfer.phase] += 1
        for expert in list(self.counters.landed_unused):
            self.counters.unused_prefetch(expert, self.cache.size[expert])

    # -- the copy engine -----------------------------------------------------------------------------------------

    def _new(self, expert: int, prefetch: bool, priority: int) -> Transfer:
        self._serial += 1
        whole = self.copy_ns(expert)
        body = max(1, whole - self.latency_ns)
        transfer = Transfer(expert, whole - body, body, self._serial, prefetch, priority, self.phase)
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
            self._run(transfer)
            return
        if self._paused is not None:
            paused = self._paused
            if self.cache.wanted_until[paused.expert] > self.passed:
                self._paused = None
                self._run(paused)
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
                self._run(transfer)
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
        if victims and self.observer:
            self.observer.evicted(self.env.now, victims, transfer.expert)
        return True

    def _run(self, transfer: Transfer) -> None:
        self._running = transfer
        transfer.started = True
        transfer.begin = self.env.now
        transfer.lead = 0 if self.chained and self._busy_until == self.env.now else transfer.startup
        self._end_after(transfer.lead + transfer.body - transfer.moved, self._landed)

    def _end_after(self, delay: int, then: Callable[[Event], None]) -> None:
        """Schedule the end of the present stretch; an earlier schedule of it no longer counts."""
        self._ending = self.env.call(delay, LANDING, then)

    def _landed(self, ending: Event) -> None:
        if ending is not self._ending:
            return  # this transfer gave way meanwhile
        transfer = self._running
        assert transfer is not None
        self._running = None
        self._account(transfer, transfer.body)
        del self.transfers[transfer.expert]
        self.cache.landed(transfer.expert)
        if transfer.prefetch and not transfer.needed:
            self.counters.landed_unused[transfer.expert] = transfer.phase
        if transfer.event is not None:
            transfer.event.succeed()
        self._next()

    def _progress(self, transfer: Transfer) -> int:
        """How much of the body (ns) has been copied by now."""
        return min(transfer.body, transfer.moved + max(0, self.env.now - transfer.begin - transfer.lead))

    def _give_way(self, transfer: Transfer) -> None:
        """A demand waits: end the running prefetch at its next chunk boundary, or at once if it has not begun."""
        if self.env.now == transfer.begin:
            self._pause(self._ending, transfer, transfer.moved)
            return
        if self.discipline != "preemptive":
            return
        chunk = -(-self._progress(transfer) * self.chunks // transfer.body)
        boundary = transfer.body * chunk // self.chunks
        if boundary < transfer.body:
            at = transfer.begin + transfer.lead + boundary - transfer.moved
            self._end_after(at - self.env.now, lambda ending: self._pause(ending, transfer, boundary))

    def _pause(self, ending: Event | None, transfer: Transfer, boundary: int) -> None:
        if ending is not self._ending:
            return
        self._ending = None
        self._running = None
        self._account(transfer, boundary)
        self._paused = transfer
        self._next()

    def _account(self, transfer: Transfer, moved: int) -> None:
        """Count the stretch that ends now at ``moved`` ns of the body."""
        before = self._bytes(transfer)
        transfer.moved = moved
        if self.env.now > transfer.begin:
            self._busy_until = self.env.now
        self.counters.moved(transfer.prefetch, transfer.phase, self._bytes(transfer) - before)
        if self.observer and self.env.now > transfer.begin:
            kind = "demand" if not transfer.prefetch else "joined" if transfer.needed else "prefetch"
            self.observer.transfer(transfer.begin, self.env.now, transfer.expert, kind, moved == transfer.body)

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
