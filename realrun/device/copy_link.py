"""The copying stream as the simulator's link: the same queue and the same order of service, with real copies.

``sim.run.link_queue`` decides what moves next, what gives way and what is given up; here a stretch on the link is
copies on the device's copying stream. A copy that is queued has no start-up time, so the stream always holds the next
one too: prefetches go in pieces (`sim.machine.pieces`), and only about two pieces are ever handed over, so that a
demand can overtake at the next chunk boundary. Demands overtake, and are then handed over whole and all at once:
nothing may overtake them, and no copy waits for the host.

Nothing here blocks. An engine that waits calls ``poll`` again and again, which finds what has landed and hands over
more.
"""

import time
from collections import deque
from typing import Any

from realrun.device.devices import Device, Event
from realrun.device.host_store import HostStore
from realrun.device.slots import DeviceCache
from sim.log import Counters
from sim.machine.pieces import PIECE_BYTES, goes_whole
from sim.plan import Discipline
from sim.run.link_queue import LinkQueue, Transfer

PIECES_AHEAD = 2
"""Pieces of prefetches that are handed over before the first of them has arrived."""
LONG_BYTES = 64 * 2**20
"""What is longer and goes before prefetches ends in a copy of its own: so the host knows a little before it is over."""


class CopyLink(LinkQueue):
    """The link of one run. Its unit of work is a byte.

    Args:
        cache: slots; ``allot`` is asked when a transfer starts.
        store: where experts are copied from.
        device: who copies.
        chunks, discipline, counters: as in ``sim.run.link_queue.LinkQueue``.
        stamped: copy each expert's stamp after its bytes.
    """

    cache: DeviceCache

    def __init__(
        self, cache: DeviceCache, store: HostStore, device: Device, chunks: int, discipline: Discipline,
        counters: Counters, stamped: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(cache, chunks, discipline, counters)
        self._store, self._device, self._stamped = store, device, stamped
        self._flying: deque[tuple[Event, int, Transfer | None]] = deque()
        self._handed = 0  # bytes handed over and not known to have arrived
        self._stretches = 0
        self._busy_since = 0
        self._busy_ns = 0
        self._idle_events: list[Event] = []
        self._piece = store.size if goes_whole(store.size) else min(PIECE_BYTES, -(-store.size // chunks))
        self._ahead = PIECES_AHEAD * self._piece

    def kick(self, some: bool = False) -> None:
        """Let demands overtake and hand over what may move; called after every change that the engine makes.

        With ``some``, only what keeps the link busy for the moment, and no prefetch while anything is under way: the
        engine has something to launch first.
        """
        self.poll(follow=False)  # what has arrived meanwhile makes room for more
        if some and self._suffices():
            return
        running = self._running
        if running is not None and (running.demand or self._demands):
            overtaken = not running.demand and self.discipline == "preemptive"
            end = self._boundary(running) if overtaken else running.body
            if end > running.moved:
                self._hand_over(running, end)
            if self._running is running:
                self._running, self._paused = None, running
        self._advance(some)

    def poll(self, follow: bool = True, some: bool = False) -> bool:
        """See what has arrived, and let more follow unless told not to, ``some`` as for ``kick``; whether any has."""
        arrived = False
        while self._flying and self._flying[0][0].query():
            event, size, transfer = self._flying.popleft()
            self._handed -= size
            arrived = True
            if transfer is None:
                self._idle_events.append(event)
            else:
                self._land(transfer)
        if arrived:
            if not self._flying:
                self._busy_ns += time.perf_counter_ns() - self._busy_since
            if follow and not (some and self._suffices()):
                self._advance(some)
        return arrived

    def _suffices(self) -> bool:
        """Whether what is under way will do for the moment: nobody waits for anything else."""
        return bool(self._flying) and not self._demands

    def busy_ns(self) -> int:
        """How long the copying stream has had something to do, by the host's clock: a little more than it took."""
        return self._busy_ns + (time.perf_counter_ns() - self._busy_since if self._flying else 0)

    @property
    def moving(self) -> bool:
        """Whether the copying stream has anything to do."""
        return bool(self._flying)

    @property
    def now(self) -> int:
        """The host's clock, ns."""
        return time.perf_counter_ns()

    # -- copies --------------------------------------------------------------------------------------------------

    def _do_measure(self, expert: int) -> tuple[int, int]:
        return 0, self.cache.size[expert]

    def _advance(self, some: bool = False) -> None:
        """Start whatever may start: all demands, or ``some``, and prefetches while little is handed over."""
        if self._running is not None:
            self._fill()
        while self._running is None and ((self._demands and not some) or self._handed < self._ahead):
            if not (self._demands or self._queue or self._paused):
                return
            before = self._stretches
            self._next()
            if self._stretches == before:
                return

    def _do_start(self, transfer: Transfer) -> None:
        self._running = transfer
        transfer.started = True
        for expert in transfer.leaving:  # it lies where the new one will
            self._device.copy_back(self._store.expert(expert), self.cache.rows[self.cache.slot[transfer.expert]])
        self._written_back(transfer)
        # Under fifo a demand may wait behind this prefetch, which then goes whole.
        if transfer.demand or self._demands:
            self._hand_over(transfer, transfer.body)
        else:
            self._fill()

    def _do_stop(self, transfer: Transfer) -> None:
        """Nothing is left to do: bytes are counted when they are handed over."""

    def _fill(self) -> None:
        while self._running is not None and self._handed < self._ahead:
            running = self._running
            whole = self._piece >= running.body
            end = running.body if whole else self._boundary(running, running.moved + 1)
            self._hand_over(running, min(running.moved + self._piece, end))

    def _boundary(self, transfer: Transfer, least: int | None = None) -> int:
        """The first chunk boundary at or after ``least`` bytes, by default those handed over."""
        moved = transfer.moved if least is None else least
        chunk = -(-moved * self.chunks // transfer.body)
        return transfer.body * chunk // self.chunks

    def _hand_over(self, transfer: Transfer, end: int) -> None:
        """Copy bytes from where the transfer is to ``end``."""
        expert, begin = transfer.expert, transfer.moved
        self._stretches += 1
        self.counters.moved(transfer.prefetch, transfer.phase, end - begin)
        self._handed += end - begin
        transfer.moved = end
        if not self._flying:
            self._busy_since = time.perf_counter_ns()
        slot, whole = self.cache.slot[expert], end == transfer.body
        source, target = self._store.expert(expert), self.cache.rows[slot]
        if end - begin > LONG_BYTES and self._queue and not self._demands:
            self._device.copy(target, source, begin, end - self._piece)
            self._flying.append((self._passed(), end - self._piece - begin, None))
            begin = end - self._piece
        self._device.copy(target, source, begin, end)
        if not whole:
            self._flying.append((self._passed(), end - begin, None))
            return
        if self._stamped:
            self._device.copy(self.cache.stamps[slot], self._store.stamps[expert])
        # The event of a whole expert is waited for by others: it is not used again.
        landed: Any = self._device.copies.record()
        self._flying.append((landed, end - begin, transfer))
        transfer.event = landed
        self._running = None

    def _passed(self) -> Event:
        """The point after what was copied last, which nobody but ``poll`` looks at."""
        again = self._idle_events.pop() if self._idle_events else None
        return self._device.copies.record(again)
