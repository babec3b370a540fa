"""The PCIe link in simulated time: one copy engine that moves experts from host to GPU, one transfer at a time.

Whose turn it is, `sim.run.link_queue` says. At one instant landings come first, then demands, then prefetches; a
transfer that has moved nothing yet gives way at once (except in ``fifo``). A transfer costs
``latency + bytes / bandwidth`` from the measured curve; resuming one costs the latency again, and where copies are
``chained`` one that follows another at once has none. Only boundaries that somebody waits for become events.
"""

from collections.abc import Callable

from simpy import Event

from sim.log import Counters
from sim.plan import Discipline
from sim.run.clock import LANDING, Clock
from sim.run.host_thread import HostThread
from sim.run.link_queue import LinkQueue, Transfer
from sim.run.observer import Copy, Observer
from sim.run.slots import ExpertCache


class Link(LinkQueue):
    """The copy engine in simulated time. Its unit of work is a nanosecond of copying.

    Args:
        env: the simulation.
        cache, chunks, discipline, counters: as in `sim.run.link_queue.LinkQueue`.
        copy_ns: time of one whole copy alone, a flat expert.
        latency_ns: its part that does not grow with bytes.
        observer: told of every stretch on the link too, or None.
        chained: whether a transfer that follows another at once has no start-up.
        host: who hands copies over, where that takes time.
    """

    def __init__(
        self, env: Clock, cache: ExpertCache, *, copy_ns: Callable[[int], int], latency_ns: int, chunks: int,
        discipline: Discipline, counters: Counters, observer: Observer | None = None, chained: bool = False,
        host: HostThread | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache, chunks, discipline, counters, observer)
        self.env = env
        self.copy_ns = copy_ns
        self.latency_ns = latency_ns
        self.chained = chained
        self.host = host
        self._ahead = host is not None and host.times.copies_ahead > 0
        self._yields = discipline != "fifo" and not self._ahead
        self._ending: Event | None = None
        self._busy_until = -1  # when the last stretch that took any time ended

    @property
    def now(self) -> int:
        """The present, ns."""
        return self.env.now

    @property
    def moving(self) -> bool:
        """Something crosses the link now."""
        return self._running is not None

    def kick(self) -> None:
        """Start what can be started, and let demands overtake; called after every change that the engine makes."""
        running = self._running
        if running is None:
            self._next()
        elif self._demands and self._yields and not running.demand and running.prefetch:
            self._give_way(running)
        self._commit()
        for transfer in self._demands if self.host is not None else ():
            self._handed(transfer)

    def _handed(self, transfer: Transfer) -> int:
        """When the host has handed ``transfer`` over, which it is told to do now unless it was before."""
        if self.host is not None and transfer.handed < 0:
            transfer.handed = self.host.hand_over(self.env.now, self.phase)
        return transfer.handed

    def _commit(self) -> None:
        """Hand over what will follow the running copy, where a copy is handed over ahead: nothing overtakes it then."""
        if self._ahead and self._running is not None and self._committed is None:
            self._next()

    def _do_measure(self, expert: int) -> tuple[int, int]:
        whole = self.copy_ns(expert)
        body = max(1, whole - self.latency_ns)
        return whole - body, body

    def _do_start(self, transfer: Transfer) -> None:
        transfer.started = True
        handed = self._handed(transfer)
        if self._running is not None:
            self._committed = transfer
        else:
            # What follows another at once was handed over while that one moved.
            self._begin(transfer, 0 if self._busy_until == self.env.now and not transfer.demand else handed)

    def _begin(self, transfer: Transfer, handed: int) -> None:
        """The link turns to ``transfer``, which waits until it has been ``handed`` over."""
        self._running = transfer
        transfer.begin = now = self.env.now
        follows = self._busy_until == now or transfer.leaving
        # The other way over the link takes as long.
        back = sum(map(self.copy_ns, transfer.leaving))
        transfer.lead = back + (0 if self.chained and follows else transfer.startup)
        transfer.lead += max(0, handed - now)
        self._end_after(transfer.lead + transfer.body - transfer.moved, self._landed)

    def _do_stop(self, transfer: Transfer) -> None:
        self._account(transfer, self._progress(transfer))

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
        self._land(transfer)
        if transfer.event is not None:
            transfer.event.succeed()
        following, self._committed = self._committed, None
        if following is None:
            self._next()
        else:
            self._begin(following, following.handed)
        self._commit()

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
        now, size, body = self.env.now, self.cache.size[transfer.expert], transfer.body
        crossed = size * moved // body - size * transfer.moved // body
        transfer.moved = moved
        self.counters.moved(transfer.prefetch, transfer.phase, crossed)
        if now > transfer.begin:
            self._busy_until = now
            begin = self._back(transfer) if transfer.leaving else transfer.begin
            if self.observer and now > begin:
                kind: Copy = "demand" if not transfer.prefetch else "joined" if transfer.needed else "prefetch"
                self.observer.transfer(begin, now, transfer.expert, kind, moved == body)

    def _back(self, transfer: Transfer) -> int:
        """Count what was copied to the host before ``transfer``, whose stretch ends now; returns when that was over."""
        begin, now = transfer.begin, self.env.now
        for expert in transfer.leaving:
            end = min(now, begin + self.copy_ns(expert))  # earlier only where the run ends
            if self.observer and end > begin:
                self.observer.written_back(begin, end, expert)
            begin = end
        self._written_back(transfer)
        return begin
