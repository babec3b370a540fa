"""The link with real copies, compiled: the queue of compiled simulations, whose stretches are handed to a driver.

``sim.compiled.link`` decides what moves next, what gives way and who is evicted. Here a stretch on the link is copies
that are handed to the device's driver, whose functions are called by their addresses. A copy that is queued has no
start-up time, so prefetches go in pieces, of which about two are ever handed over: a demand can overtake at the next
chunk boundary. Demands are handed over whole and all at once. Nothing here blocks.

``m`` is a ``sim.compiled.machine.MACHINE`` whose run is real, its unit of work a byte; ``c`` is a ``COPIES``.
"""

from typing import Any

import numpy as np

from sim.compiled.call import let_go
from sim.compiled.clock import answer
from sim.compiled.foreign import call
from sim.compiled.jit import inlined, inner
from sim.compiled.link import arrived, start_next
from sim.compiled.machine import (
    MACHINE,
    NOBODY,
    PREEMPTIVE,
    counts_at,
    number_at,
    slot_at,
    transfer_at,
)
from sim.compiled.records import records_of

NUMBERS = (
    *("copy", "copy_back", "record", "query", "wait", "clock", "pause"),  # addresses of the driver's functions
    *("computing", "copying", "pause_us", "clock_number", "time"),  # streams; where the clock writes seconds and ns
    *("sources", "target", "stamps", "own_stamps", "stamp_bytes"),  # addresses of experts, slots and stamps
    *("events", "piece_events", "holders"),  # of each expert; used in turn; whom each slot has held last
    *("piece_size", "ahead", "long"),  # bytes
    *("flying", "first_flying", "flights"),  # copies under way: a ring, its first, and how many ever
    *("holds", "first_hold", "n_holds", "held", "first_held", "n_held"),  # waves whose kernels have not ended
    *("asides", "first_aside", "n_asides"),  # predictions beside the step
    "pieces",  # that ever had an event of their own
    "handed",  # bytes handed over and not known to have arrived
    *("busy_since", "busy_ns"),
    "failed",  # what a function of the driver answered that is no success
    *("looks", "slice_ns"),  # so long compiled code waits before Python is asked whether the run should end
    "happened",  # what has arrived, ended or been answered so far
    "told",  # numbers for Python
)
COPIES = np.dtype([(name, np.int64) for name in NUMBERS])
FLIGHT = np.dtype([(name, np.int64) for name in ("event", "size", "expert")])
HOLD = np.dtype([(name, np.int64) for name in ("event", "count")])
ASIDE = np.dtype([(name, np.int64) for name in ("event", "moment")])
flight_at = records_of(FLIGHT)
hold_at = records_of(HOLD)
aside_at = records_of(ASIDE)
machine_at = records_of(MACHINE)
copies_at = records_of(COPIES)

PIECE_EVENTS, HOLDS = 256, 64
"""Events of pieces, and waves, of which that many never stand at once."""
DONE, AGAIN = range(2)
"""What a function that waits answers: what it waited for is there, or it is to be called again."""
NOT_READY = 600
BETWEEN_CLOCKS = 16


# -- copies ----------------------------------------------------------------------------------------------------------


@inner
def now(c: Any) -> int:
    """The host's clock, ns."""
    call(c.clock, (c.clock_number, c.time))
    return int(number_at(c.time, 0).n * 1_000_000_000 + number_at(c.time, 1).n)


@inlined
def check(c: Any, answer: int) -> None:
    """Note what a function of the driver answered, if that is no success."""
    if answer and not c.failed:
        c.failed = answer


@inlined
def passed(c: Any, event: int) -> bool:
    """Whether the device has passed ``event``."""
    answer = call(c.query, (event,))
    if answer == NOT_READY:
        return False
    check(c, answer)
    return True


@inner
def poll(m: Any, c: Any, follow: bool, some: bool) -> bool:
    """See what has arrived, and let more follow if told to; whether any has. ``some``: what keeps the link busy."""
    any_arrived = False
    while m.flying and not c.failed:
        flight = flight_at(c.flying, c.first_flying % (m.n_slots + PIECE_EVENTS))
        if not passed(c, flight.event):
            break
        c.first_flying += 1
        m.flying -= 1
        c.handed -= flight.size
        any_arrived = True
        if flight.expert != NOBODY:
            arrived(m, flight.expert)
    if any_arrived:
        c.happened += 1
        if not m.flying:
            c.busy_ns += now(c) - c.busy_since
        if follow and not (some and _suffices(m)):
            _advance(m, c, some)
    return any_arrived


@inlined
def _suffices(m: Any) -> bool:
    """Whether what is under way will do for the moment: nobody waits for anything else."""
    return m.flying > 0 and m.first_demand == NOBODY


@inner
def kick(m: Any, c: Any, some: bool) -> None:
    """Let demands overtake and hand over what may move; called after every change that the engine makes."""
    poll(m, c, False, False)
    if some and _suffices(m):
        return
    running = m.running
    if running != NOBODY:
        transfer = transfer_at(m.transfers, running)
        if transfer.demand or m.first_demand != NOBODY:
            overtaken = not transfer.demand and m.discipline == PREEMPTIVE
            end = _boundary(m, running, transfer.moved) if overtaken else transfer.body
            if end > transfer.moved:
                _hand_over(m, c, running, end)
            if m.running == running:
                m.running, m.paused = NOBODY, running
    _advance(m, c, some)


@inner
def _advance(m: Any, c: Any, some: bool) -> None:
    """Start whatever may start: all demands, or ``some``, and prefetches while little is handed over."""
    if m.running != NOBODY:
        _fill(m, c)
    while m.running == NOBODY and ((m.first_demand != NOBODY and not some) or c.handed < c.ahead):
        start_next(m)
        if m.running == NOBODY:
            return
        _start(m, c, m.running)


@inner
def _start(m: Any, c: Any, expert: int) -> None:
    """It is the turn of ``expert``, which holds a slot: hand over some of it, or all if anybody waits."""
    transfer, place = transfer_at(m.transfers, expert), slot_at(m.slots, expert).place
    holder = number_at(c.holders, place)
    if transfer.back_bytes:  # whoever lies where the new one will is copied to the host
        check(c, call(c.copy_back, (number_at(c.sources, holder.n).n, c.target + place * slot_at(m.slots, expert).size,
                                     slot_at(m.slots, expert).size, c.copying)))  # fmt: skip
        counts_at(m.counts, transfer.phase).written_back += transfer.back_bytes
        transfer.back_bytes = 0
    holder.n = expert
    # Under fifo a demand may wait behind this prefetch, which then goes whole.
    if transfer.demand or m.first_demand != NOBODY:
        _hand_over(m, c, expert, transfer.body)
    else:
        _fill(m, c)


@inner
def _fill(m: Any, c: Any) -> None:
    while m.running != NOBODY and c.handed < c.ahead and not c.failed:
        transfer = transfer_at(m.transfers, m.running)
        whole = c.piece_size >= transfer.body
        end = transfer.body if whole else _boundary(m, m.running, transfer.moved + 1)
        _hand_over(m, c, m.running, min(transfer.moved + c.piece_size, end))


@inlined
def _boundary(m: Any, expert: int, moved: int) -> int:
    """The first chunk boundary at or after ``moved`` bytes."""
    body = transfer_at(m.transfers, expert).body
    return int(body * (-(-moved * m.chunks // body)) // m.chunks)


@inner
def _hand_over(m: Any, c: Any, expert: int, end: int) -> None:
    """Copy bytes from where the transfer is to ``end``."""
    transfer, place = transfer_at(m.transfers, expert), slot_at(m.slots, expert).place
    begun, counts = transfer.moved, counts_at(m.counts, transfer.phase)
    if transfer.prefetch:
        counts.prefetch_bytes += end - begun
    else:
        counts.demand_bytes += end - begun
    c.handed += end - begun
    transfer.moved = end
    if not m.flying:
        c.busy_since = now(c)
    source, target = number_at(c.sources, expert).n, c.target + place * slot_at(m.slots, expert).size
    if end - begun > c.long and m.n_queued and m.first_demand == NOBODY:
        before = end - c.piece_size
        check(c, call(c.copy, (target + begun, source + begun, before - begun, c.copying)))
        _take_off(m, c, before - begun, NOBODY)
        begun = before
    check(c, call(c.copy, (target + begun, source + begun, end - begun, c.copying)))
    if end < transfer.body:
        _take_off(m, c, end - begun, NOBODY)
        return
    if c.stamp_bytes:
        check(c, call(c.copy, (c.stamps + place * c.stamp_bytes, c.own_stamps + expert * c.stamp_bytes,
                                c.stamp_bytes, c.copying)))  # fmt: skip
    _take_off(m, c, end - begun, expert)
    m.running = NOBODY


@inner
def _take_off(m: Any, c: Any, size: int, expert: int) -> None:
    """Note an event behind what was handed over last: that of ``expert``, which is then there, or of a piece."""
    flight = flight_at(c.flying, (c.first_flying + m.flying) % (m.n_slots + PIECE_EVENTS))
    if expert == NOBODY:
        flight.event = number_at(c.piece_events, c.pieces % PIECE_EVENTS).n
        c.pieces += 1
    else:
        flight.event = number_at(c.events, expert).n
    flight.size, flight.expert = size, expert
    m.flying += 1
    check(c, call(c.record, (flight.event, c.copying)))


# -- waiting ---------------------------------------------------------------------------------------------------------


@inner
def release_waves(m: Any, c: Any, follow: bool) -> bool:
    """Free the slots of waves whose kernels have ended."""
    gone = False
    while c.n_holds and passed(c, hold_at(c.holds, c.first_hold % HOLDS).event):
        poll(m, c, False, False)  # their copies ended before their kernels
        for _ in range(hold_at(c.holds, c.first_hold % HOLDS).count):
            let_go(m, number_at(c.held, c.first_held % c.n_held).n)
            c.first_held += 1
        c.first_hold += 1
        c.n_holds -= 1
        gone = True
    if gone:
        c.happened += 1
        if follow:
            kick(m, c, False)
    return gone


@inner
def look(m: Any, c: Any, some: bool) -> None:
    """What the host does, again and again, while it waits."""
    poll(m, c, True, some)
    release_waves(m, c, not some)
    if c.first_aside < c.n_asides and passed(c, aside_at(c.asides, c.first_aside).event):
        c.first_aside += 1
        c.happened += 1
        answer(m, aside_at(c.asides, c.first_aside - 1).moment)
        kick(m, c, False)
    if c.pause_us:
        call(c.pause, (c.pause_us,))


@inner
def over(c: Any, until: int) -> bool:
    """Whether Python should look: a slice of time is over, or something has gone wrong."""
    c.looks += 1
    return c.failed != 0 or (c.looks % BETWEEN_CLOCKS == 0 and now(c) > until)
