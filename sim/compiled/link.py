"""The PCIe link, compiled: ``sim.run.link.Link`` without events.

Nothing but the link itself acts while the GPU computes or waits, so the link is brought up to the GPU's present when
the GPU gets there (``sim.compiled.clock``). A prefetch whose call passes leaves the queue at that moment, so the queue
holds only what may still start.
"""

from typing import Any

from sim.compiled.heap import push, remove, top
from sim.compiled.host_thread import hand_over
from sim.compiled.jit import inlined, inner
from sim.compiled.machine import (
    FOREVER,
    IN_LINE,
    NOBODY,
    PREEMPTIVE,
    counts_at,
    heap_at,
    layer_at,
    slot_at,
    transfer_at,
)
from sim.compiled.slots import allot, can_allot, landed, release, set_wanted, unused, want
from sim.run.slots import ABSENT

# -- what the GPU says -----------------------------------------------------------------------------------------------


@inner
def demand(m: Any, expert: int) -> None:
    """Ask for ``expert`` now; joins its prefetch if that is queued or under way."""
    transfer = transfer_at(m.transfers, expert)
    if not transfer.live:
        _new(m, expert, 0, 0)
    elif transfer.demand:
        return
    elif not transfer.started:
        _leave_queue(m, expert)
    transfer.demand = transfer.needed = 1
    if is_in_line(m, expert):
        _join_line(m, expert)
    if expert == m.paused:
        m.paused = NOBODY


@inlined
def is_in_line(m: Any, expert: int) -> bool:
    """Whether a demand of ``expert``, which is not there yet, waits for its turn: not all of it is handed over."""
    transfer = transfer_at(m.transfers, expert)
    return expert != m.running and expert != m.committed and transfer.moved < transfer.body


@inner
def insist(m: Any, call: int, layer: int) -> None:
    """Wait for all that was requested for ``call`` and is queued or under way, though nobody needs it now."""
    for expert in range(layer * m.n_experts, (layer + 1) * m.n_experts):
        transfer = transfer_at(m.transfers, expert)
        if transfer.live and not transfer.demand and slot_at(m.slots, expert).wanted_until == call:
            demand(m, expert)
            transfer.needed = 0


@inlined
def is_absent(m: Any, expert: int) -> bool:
    """Whether ``expert`` is in no slot, not on its way, and not about to be demanded: a request issues a copy of it."""
    slot = slot_at(m.slots, expert)
    return slot.state == ABSENT and not slot.awaited and not transfer_at(m.transfers, expert).live


@inner
def request(m: Any, expert: int, call: int, priority: int) -> None:
    """Ask for ``expert`` to be there for ``call``, which has not passed."""
    want(m, expert, call)
    transfer = transfer_at(m.transfers, expert)
    if not transfer.live:
        if is_absent(m, expert):
            counts_at(m.counts, m.phase).issued += 1
            _new(m, expert, 1, priority)
            _enqueue(m, expert)
    elif not transfer.started and not transfer.demand and priority < transfer.priority:
        _leave_queue(m, expert)
        transfer.priority = priority
        _enqueue(m, expert)


@inner
def pass_call(m: Any, call: int, layer_number: int) -> None:
    """The experts of ``call`` have been looked up: whoever was wanted for it, or before, no longer is."""
    m.passed = call
    layer = layer_at(m.layers, layer_number)
    expert, before = layer.first_wanted, NOBODY
    while expert != NOBODY:
        slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
        if slot.wanted_until > call:
            before = expert
        else:
            if before == NOBODY:
                layer.first_wanted = slot.next_wanted
            else:
                slot_at(m.slots, before).next_wanted = slot.next_wanted
            set_wanted(m, expert, 0)
            if transfer.live and not transfer.started and not transfer.demand:
                _leave_queue(m, expert)
                _cancel(m, expert)
        expert = slot.next_wanted


@inner
def kick(m: Any) -> None:
    """Start what can be started, and let demands overtake; called after every change that the GPU makes."""
    if m.running == NOBODY:
        start_next(m)
    elif m.first_demand != NOBODY and m.yields and not transfer_at(m.transfers, m.running).demand:
        _give_way(m)
    _commit(m)
    if m.host_acts:
        expert = m.first_demand
        while expert != NOBODY:
            _handed(m, expert)
            expert = transfer_at(m.transfers, expert).next_demand


@inner
def _handed(m: Any, expert: int) -> int:
    """When the host has handed that copy over, which it is told to do now unless it was before."""
    transfer = transfer_at(m.transfers, expert)
    if m.host_acts and transfer.handed < 0:
        transfer.handed = hand_over(m)
    return int(transfer.handed)


@inner
def _commit(m: Any) -> None:
    """Hand over what will follow the running copy, where a copy is handed over ahead: nothing overtakes it then."""
    if m.host_copies_ahead and m.running != NOBODY and m.committed == NOBODY:
        start_next(m)


@inner
def stretch_ends(m: Any) -> None:
    """The running transfer reaches its end, or the boundary at which it gives way."""
    if m.boundary < 0:
        _land(m)
    else:
        _pause(m, m.boundary)


@inner
def close(m: Any) -> None:
    """End of the run: queued prefetches are cancelled, those under way counted as such."""
    for expert in range(m.n_slots):
        transfer = transfer_at(m.transfers, expert)
        if transfer.live and transfer.prefetch and not transfer.needed:
            counts = counts_at(m.counts, transfer.phase)
            if transfer.started:
                counts.in_flight += 1
                if expert == m.running and not m.real:
                    _account(m, expert, _progress(m, expert))
                counts.wasted += _bytes(m, expert)
            else:
                counts.cancelled += 1
        unused(m, expert)


# -- the copy engine -------------------------------------------------------------------------------------------------


@inlined
def _new(m: Any, expert: int, prefetch: int, priority: int) -> None:
    transfer = transfer_at(m.transfers, expert)
    m.serial += 1
    transfer.serial = m.serial
    transfer.priority = priority
    transfer.phase = m.phase
    transfer.moved = transfer.back_ns = transfer.back_bytes = 0
    transfer.handed = -1
    transfer.live, transfer.prefetch, transfer.demand, transfer.needed, transfer.started = 1, prefetch, 0, 0, 0


@inner
def _join_line(m: Any, expert: int) -> None:
    """Stand in the line of demands: behind all, or in a fifo line behind those issued before."""
    transfer = transfer_at(m.transfers, expert)
    before, behind = m.last_demand, NOBODY
    if m.discipline == IN_LINE:
        before, behind = NOBODY, m.first_demand
        while behind != NOBODY and transfer_at(m.transfers, behind).serial < transfer.serial:
            before, behind = behind, transfer_at(m.transfers, behind).next_demand
    transfer.next_demand = behind
    if before == NOBODY:
        m.first_demand = expert
    else:
        transfer_at(m.transfers, before).next_demand = expert
    if behind == NOBODY:
        m.last_demand = expert


@inner
def _enqueue(m: Any, expert: int) -> None:
    transfer = transfer_at(m.transfers, expert)
    first = 0 if m.discipline == IN_LINE else transfer.priority
    push(heap_at(m.queue, slot_at(m.slots, expert).pool), expert, first, transfer.serial)
    m.n_queued += 1


@inner
def _leave_queue(m: Any, expert: int) -> None:
    remove(heap_at(m.queue, slot_at(m.slots, expert).pool), expert)
    m.n_queued -= 1


@inner
def start_next(m: Any) -> None:
    """The link is idle: start the transfer whose turn it is."""
    while m.first_demand != NOBODY:
        expert = m.first_demand
        transfer = transfer_at(m.transfers, expert)
        if m.discipline == IN_LINE and _start_prefetch(m, transfer.serial):
            return
        if not transfer.started:
            if not can_allot(m, expert, True):
                # Nothing may be evicted. A prefetch that gave way holds a slot and waits for us: it must go.
                if m.paused == NOBODY:
                    return
                _abandon(m)
                continue
            allot(m, expert, True)
        m.first_demand = transfer.next_demand
        if m.first_demand == NOBODY:
            m.last_demand = NOBODY
        _run(m, expert)
        return
    if m.paused != NOBODY:
        if slot_at(m.slots, m.paused).wanted:
            expert, m.paused = m.paused, NOBODY
            _run(m, expert)
            return
        _abandon(m)
    _start_prefetch(m, FOREVER)


@inner
def _start_prefetch(m: Any, before: int) -> bool:
    """Start the first queued prefetch whose pool has room for it, if its serial is less than ``before``.

    In a pool without room for its first, the others wait behind it.
    """
    if not m.n_queued:
        return False
    best, first, second = NOBODY, FOREVER, FOREVER
    for pool in range(m.n_pools):
        heap = heap_at(m.queue, pool)
        if heap.size:
            node = top(heap)
            sooner = node.first < first or (node.first == first and node.second < second)
            if sooner and can_allot(m, node.item, False):
                best, first, second = node.item, node.first, node.second
    if best == NOBODY or second > before:
        return False
    _leave_queue(m, best)
    allot(m, best, False)
    _run(m, best)
    return True


@inlined
def _run(m: Any, expert: int) -> None:
    transfer = transfer_at(m.transfers, expert)
    transfer.started = 1
    if m.real:  # who drives the link begins and ends what runs, and counts its bytes
        m.running = expert
        return
    handed = _handed(m, expert)
    if m.running != NOBODY:
        m.committed = expert
    else:
        # What follows another at once was handed over while that one moved.
        _begin(m, expert, 0 if m.busy_until == m.now and not transfer.demand else handed)


@inner
def _begin(m: Any, expert: int, handed: int) -> None:
    """The link turns to ``expert``, whose copy waits until it has been ``handed`` over."""
    transfer = transfer_at(m.transfers, expert)
    transfer.begin = m.now
    m.running = expert
    m.boundary = -1
    follows = m.busy_until == m.now or transfer.back_ns > 0
    transfer.lead = transfer.back_ns + (0 if m.chained and follows else transfer.startup)
    transfer.lead += max(0, handed - m.now)
    m.ending = m.now + transfer.lead + transfer.body - transfer.moved


@inlined
def _stop(m: Any, moved: int) -> int:
    """The stretch on the link is over with ``moved`` ns of the body done; returns whose it was."""
    expert = m.running
    m.running, m.ending = NOBODY, FOREVER
    _account(m, expert, moved)
    return expert


@inner
def _land(m: Any) -> None:
    transfer = transfer_at(m.transfers, m.running)
    expert = _stop(m, transfer.body)
    arrived(m, expert)
    if m.committed == NOBODY:
        start_next(m)
    else:
        following, m.committed = m.committed, NOBODY
        _begin(m, following, transfer_at(m.transfers, following).handed)
    _commit(m)


@inner
def arrived(m: Any, expert: int) -> None:
    """The transfer of ``expert`` is complete: it is there."""
    transfer = transfer_at(m.transfers, expert)
    transfer.live = 0
    landed(m, expert)
    if transfer.prefetch and not transfer.needed:
        slot_at(m.slots, expert).brought = 1 + transfer.phase


@inner
def _pause(m: Any, boundary: int) -> None:
    m.paused = _stop(m, boundary)
    start_next(m)


@inner
def _progress(m: Any, expert: int) -> int:
    """How much of the body (ns) of the running transfer has been copied by now."""
    transfer = transfer_at(m.transfers, expert)
    return min(transfer.body, transfer.moved + max(0, m.now - transfer.begin - transfer.lead))


@inner
def _give_way(m: Any) -> None:
    """A demand waits: end the running prefetch at its next chunk boundary, or at once if it has not begun."""
    transfer = transfer_at(m.transfers, m.running)
    if m.now == transfer.begin:
        _pause(m, transfer.moved)
    elif m.discipline == PREEMPTIVE:
        chunk = -(-_progress(m, m.running) * m.chunks // transfer.body)
        boundary = transfer.body * chunk // m.chunks
        if boundary < transfer.body:
            m.boundary = boundary
            m.ending = transfer.begin + transfer.lead + boundary - transfer.moved


@inlined
def _account(m: Any, expert: int, moved: int) -> None:
    """Count the stretch that ends now at ``moved`` ns of the body."""
    transfer = transfer_at(m.transfers, expert)
    before = _bytes(m, expert)
    transfer.moved = moved
    crossed, counts = _bytes(m, expert) - before, counts_at(m.counts, transfer.phase)
    if m.now > transfer.begin:
        m.busy_until = m.now
        counts.written_back += transfer.back_bytes
        transfer.back_ns = transfer.back_bytes = 0
    if transfer.prefetch:
        counts.prefetch_bytes += crossed
    else:
        counts.demand_bytes += crossed


@inlined
def _bytes(m: Any, expert: int) -> int:
    """How much of ``expert`` had crossed the link when its last stretch ended."""
    transfer, size = transfer_at(m.transfers, expert), slot_at(m.slots, expert).size
    if transfer.moved == transfer.body:
        return size
    return size * transfer.moved // transfer.body if transfer.moved else 0


@inner
def _cancel(m: Any, expert: int) -> None:
    transfer = transfer_at(m.transfers, expert)
    counts_at(m.counts, transfer.phase).cancelled += 1
    transfer.live = 0


@inner
def _abandon(m: Any) -> None:
    """Give up the prefetch that gave way: its slot is free, its bytes were for nothing."""
    expert = m.paused
    m.paused = NOBODY
    counts_at(m.counts, transfer_at(m.transfers, expert).phase).wasted += _bytes(m, expert)
    _cancel(m, expert)
    release(m, expert)
