"""The copying stream as the link of compiled simulations: their queue, cache and look-up, with real copies.

``sim.compiled`` decides what moves next, what gives way and who is evicted. Here a stretch on the link is copies that
are handed to the driver, as ``realrun.device.copy_link`` explains it. All of it runs without the interpreter lock, and
so does waiting: whoever waits looks after the link again and again.

``m`` is a ``sim.compiled.machine.MACHINE`` whose run is real, its unit of work a byte; ``c`` is a ``COPIES``. Python
gives their addresses: numba takes 9 us to look at two records, and less than one for two numbers.
"""

from typing import Any

import numpy as np

from sim.compiled.call import begin, claim, let_go, stream, wave_end
from sim.compiled.clock import make_requests
from sim.compiled.foreign import call
from sim.compiled.hosting import insert
from sim.compiled.jit import inlined, inner, unlocked
from sim.compiled.link import arrived, close, demand, start_next
from sim.compiled.machine import (
    LACKING,
    MACHINE,
    NOBODY,
    PREEMPTIVE,
    READY,
    UNDER_WAY,
    byte_at,
    counts_at,
    layer_at,
    moment_at,
    number_at,
    piece_at,
    slot_at,
    transfer_at,
)
from sim.compiled.order import share_out, valued
from sim.compiled.records import records_of
from sim.log import HOSTED
from sim.run.slots import RESIDENT

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
def _now(c: Any) -> int:
    call(c.clock, (c.clock_number, c.time))
    return int(number_at(c.time, 0).n * 1_000_000_000 + number_at(c.time, 1).n)


@inlined
def _check(c: Any, answer: int) -> None:
    if answer and not c.failed:
        c.failed = answer


@inlined
def _passed(c: Any, event: int) -> bool:
    answer = call(c.query, (event,))
    if answer == NOT_READY:
        return False
    _check(c, answer)
    return True


@inner
def _poll(m: Any, c: Any, follow: bool, some: bool) -> bool:
    """See what has arrived, and let more follow if told to; whether any has. ``some``: what keeps the link busy."""
    any_arrived = False
    while m.flying and not c.failed:
        flight = flight_at(c.flying, c.first_flying % (m.n_slots + PIECE_EVENTS))
        if not _passed(c, flight.event):
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
            c.busy_ns += _now(c) - c.busy_since
        if follow and not (some and _suffices(m)):
            _advance(m, c, some)
    return any_arrived


@inlined
def _suffices(m: Any) -> bool:
    """Whether what is under way will do for the moment: nobody waits for anything else."""
    return m.flying > 0 and m.first_demand == NOBODY


@inner
def _kick(m: Any, c: Any, some: bool) -> None:
    """Let demands overtake and hand over what may move; called after every change that the engine makes."""
    _poll(m, c, False, False)
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
        _check(c, call(c.copy_back, (number_at(c.sources, holder.n).n, c.target + place * slot_at(m.slots, expert).size,
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
        c.busy_since = _now(c)
    source, target = number_at(c.sources, expert).n, c.target + place * slot_at(m.slots, expert).size
    if end - begun > c.long and m.n_queued and m.first_demand == NOBODY:
        before = end - c.piece_size
        _check(c, call(c.copy, (target + begun, source + begun, before - begun, c.copying)))
        _take_off(m, c, before - begun, NOBODY)
        begun = before
    _check(c, call(c.copy, (target + begun, source + begun, end - begun, c.copying)))
    if end < transfer.body:
        _take_off(m, c, end - begun, NOBODY)
        return
    if c.stamp_bytes:
        _check(c, call(c.copy, (c.stamps + place * c.stamp_bytes, c.own_stamps + expert * c.stamp_bytes,
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
    _check(c, call(c.record, (flight.event, c.copying)))


# -- waiting ---------------------------------------------------------------------------------------------------------


@inner
def _release_waves(m: Any, c: Any, kick: bool) -> bool:
    """Free the slots of waves whose kernels have ended."""
    gone = False
    while c.n_holds and _passed(c, hold_at(c.holds, c.first_hold % HOLDS).event):
        _poll(m, c, False, False)  # their copies ended before their kernels
        for _ in range(hold_at(c.holds, c.first_hold % HOLDS).count):
            let_go(m, number_at(c.held, c.first_held % c.n_held).n)
            c.first_held += 1
        c.first_hold += 1
        c.n_holds -= 1
        gone = True
    if gone:
        c.happened += 1
        if kick:
            _kick(m, c, False)
    return gone


@inner
def _look(m: Any, c: Any, some: bool) -> None:
    """What the host does, again and again, while it waits."""
    _poll(m, c, True, some)
    _release_waves(m, c, not some)
    if c.first_aside < c.n_asides and _passed(c, aside_at(c.asides, c.first_aside).event):
        c.first_aside += 1
        c.happened += 1
        make_requests(m, aside_at(c.asides, c.first_aside - 1).moment)
        _kick(m, c, False)
    if c.pause_us:
        call(c.pause, (c.pause_us,))


@inner
def _over(c: Any, until: int) -> bool:
    """Whether Python should look: a slice of time is over, or something has gone wrong."""
    c.looks += 1
    return c.failed != 0 or (c.looks % BETWEEN_CLOCKS == 0 and _now(c) > until)


@unlocked
def look(machine: int, copies: int) -> int:
    """Look after the link once."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    _look(m, c, False)
    return DONE


@unlocked
def await_event(machine: int, copies: int, event: int, some: bool, demands_follow: bool) -> int:
    """Look after the link until ``event`` is passed; before demands no prefetch is handed over any more."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = _now(c) + c.slice_ns
    while not _passed(c, event):
        _look(m, c, some)
        if _over(c, until):
            return AGAIN
    if demands_follow:
        _poll(m, c, False, False)
        _release_waves(m, c, False)
    else:
        _look(m, c, False)
    return DONE


@unlocked
def await_free(machine: int, copies: int) -> int:
    """Until no wave holds its slots any more."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = _now(c) + c.slice_ns
    while c.n_holds:
        _look(m, c, False)
        if _over(c, until):
            return AGAIN
    return DONE


@unlocked
def await_link(machine: int, copies: int) -> int:
    """Until nothing is under way."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = _now(c) + c.slice_ns
    while m.flying:
        _look(m, c, False)
        if _over(c, until):
            return AGAIN
    return DONE


@unlocked
def await_copy(machine: int, copies: int, expert: int, used: bool) -> int:
    """Have the computing stream wait for ``expert``, once its copy is handed over; the host waits for that alone."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
    until = _now(c) + c.slice_ns
    while slot.state != RESIDENT and transfer.moved < transfer.body:
        _look(m, c, False)
        if _over(c, until):
            return AGAIN
    _check(c, call(c.wait, (c.computing, number_at(c.events, expert).n, 0)))
    if used:
        slot.used = 1
    return DONE


# -- one call --------------------------------------------------------------------------------------------------------


@unlocked
def begin_call(machine: int, copies: int, number: int) -> int:
    """Look the experts of a call up; returns how many run on the GPU. Told: the look-ups that run on the host."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    size, hosted = begin(m, number, number % m.n_layers)
    told = 0
    if hosted:
        for i in range(number_at(m.offsets, number).n, number_at(m.offsets, number + 1).n):
            if byte_at(m.found, i).n == HOSTED:
                told += 1
                number_at(c.told, told).n = i
    number_at(c.told, 0).n = told
    return size


@unlocked
def claim_wave(machine: int, copies: int, number: int, first: int, size: int) -> int:
    """Pin the wave from piece ``first`` on and demand what it lacks; returns where it ends.

    Told: how many are ready, how many are waited for; for each, in that order, the expert, and whether the look-up
    found it under way.
    """
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    end = wave_end(m, first, size, layer_at(m.layers, number % m.n_layers).fit)
    claim(m, number, first, end)
    lookups, told, ready = number_at(m.offsets, number).n, 2, 0
    for stood in (READY, UNDER_WAY, LACKING):
        for i in range(first, end):
            piece = piece_at(m.pieces, i)
            if piece.stood == stood:
                late = stood != READY and transfer_at(m.transfers, piece.expert).late_at >= lookups
                number_at(c.told, told).n, number_at(c.told, told + 1).n = piece.expert, 1 if late else 0
                ready += 1 if stood == READY else 0
                told += 2
    number_at(c.told, 0).n, number_at(c.told, 1).n = ready, end - first - ready
    return end


@unlocked
def kick(machine: int, copies: int, some: bool) -> None:
    """See ``realrun.device.copy_link.CopyLink.kick``."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    _kick(m, c, some)


@unlocked
def poll(machine: int, copies: int) -> None:
    """See what has arrived, and let more follow."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    _poll(m, c, True, False)


@unlocked
def hold(machine: int, copies: int, event: int, first: int, end: int) -> None:
    """Keep the slots of pieces ``first`` to ``end`` until ``event``, the end of their last kernel, has been passed."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    wave = hold_at(c.holds, (c.first_hold + c.n_holds) % HOLDS)
    behind = c.first_held
    for i in range(c.n_holds):
        behind += hold_at(c.holds, (c.first_hold + i) % HOLDS).count
    wave.event, wave.count = event, end - first
    c.n_holds += 1
    for i in range(first, end):
        number_at(c.held, (behind + i - first) % c.n_held).n = piece_at(m.pieces, i).expert


@unlocked
def still_under_way(machine: int, copies: int, number: int) -> int:
    """How many experts of a call's layer are waited for though nobody needs them. Told: which."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    layer, told = number % m.n_layers, 0
    for expert in range(layer * m.n_experts, (layer + 1) * m.n_experts):
        transfer = transfer_at(m.transfers, expert)
        if transfer.live and transfer.demand and not transfer.needed:
            number_at(c.told, told).n = expert
            told += 1
    return told


# -- the policy ------------------------------------------------------------------------------------------------------


@unlocked
def revalue(machine: int, copies: int, index: int) -> None:
    """New shares and values of a moment come into force."""
    m = machine_at(machine, 0)
    due = moment_at(m.moments, index)
    if due.shares != NOBODY:
        share_out(m, due.shares)
    if due.last_value > due.first_value:
        valued(m, due.first_value, due.last_value)


@unlocked
def ask(machine: int, copies: int, index: int, event: int) -> None:
    """Make the requests of a moment, once ``event`` has been passed if it is not 0."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    if event:
        aside = aside_at(c.asides, c.n_asides)
        aside.event, aside.moment = event, index
        c.n_asides += 1
    else:
        make_requests(m, index)


@unlocked
def stream_layer(machine: int, copies: int, number: int) -> None:
    """Ask for every expert of a call's layer."""
    m = machine_at(machine, 0)
    stream(m, number)


@unlocked
def insert_hosted(machine: int, copies: int, number: int) -> None:
    """Ask for experts that run on the host now for the next visit of their layer."""
    m = machine_at(machine, 0)
    insert(m, number)


@unlocked
def demand_all(machine: int, copies: int) -> None:
    """Ask for every expert, before a run begins; each then counts as used."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    for expert in range(m.n_slots):
        demand(m, expert)
        _kick(m, c, False)
        slot_at(m.slots, expert).used = 1


@unlocked
def end_run(machine: int, copies: int) -> None:
    """The run is over: count what is left on its way."""
    m = machine_at(machine, 0)
    close(m)


CALLED: dict[Any, tuple[int, ...]] = {
    look: (), await_event: (0, False, False), await_free: (), await_link: (), await_copy: (0, False), begin_call: (0,),
    claim_wave: (0, 0, 0), kick: (False,), poll: (), hold: (0, 0, 0), still_under_way: (0,), revalue: (0,), ask: (0, 0),
    stream_layer: (0,), insert_hosted: (0,), demand_all: (), end_run: (),
}  # fmt: skip
"""All that Python calls, with arguments of the kinds that follow ``m`` and ``c``: compiled before a run."""
