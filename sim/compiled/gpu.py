"""The run loop, compiled: one layer call after another, as ``sim.engine`` has it, without events.

Wherever the reference engine yields for a time, ``advance`` lets the link live through that time first.
"""

from typing import Any

from sim.cache import ABSENT, LOADING, RESIDENT
from sim.compiled.clock import advance, make_requests, make_requests_later, wait
from sim.compiled.jit import entry, inlined, inner
from sim.compiled.link import close, demand, kick, pass_call, request
from sim.compiled.machine import (
    FOREVER,
    LACKING,
    NEXT_USE,
    NOBODY,
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
from sim.compiled.order import needed, valued
from sim.compiled.slots import allot, landed, pin, release, unpin
from sim.log import LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, PREFILL


@entry
def run(m: Any) -> bool:
    """Run all steps; False if the GPU waits for ever."""
    if m.everything_resident:
        _fill(m)
    for step in range(m.n_steps):
        m.phase = number_at(m.phase_of, step).n
        if m.phase == PREFILL and m.prompt_ns:
            advance(m, m.now + m.prompt_ns)
            number_at(m.predict, step).n += m.prompt_ns
        if _is_due(m, step * (m.n_layers + 1)):
            number_at(m.predict, step).n += _decide(m)
            kick(m)
        for layer in range(m.n_layers):
            advance(m, m.now + number_at(m.layer_ns, step * m.n_layers + layer).n)
            if not _call(m, step, layer):
                return False
        advance(m, m.now + number_at(m.head_ns, step).n)
        number_at(m.finish, step).n = m.now
    close(m)
    return True


@inner
def _fill(m: Any) -> None:
    """Everything is on the GPU from the start."""
    for expert in range(m.n_slots):
        allot(m, expert)
        landed(m, expert)
        slot_at(m.slots, expert).used = 1
    for phase in range(2):
        counts_at(m.counts, phase).evictions = 0


# -- one layer call --------------------------------------------------------------------------------------------------


@inlined
def _call(m: Any, step: int, layer: int) -> bool:
    """One routed layer once its route is known; False if the GPU waits for ever."""
    call = step * m.n_layers + layer
    first, size = number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n - number_at(m.offsets, call).n
    wave = layer_at(m.layers, layer).fit
    if size <= wave:
        _pin_all(m, first, size)
    _look_up(m, call)
    pass_call(m, call, layer)
    if size <= wave:
        _in_order(m, first, size)
    else:
        _present_first(m, first, size)
        _await(m, wave, size, 1)
    busy = number_at(m.shared_ns, call).n
    for begin in range(0, max(size, 1), wave):  # a call of no experts is a wave of none
        end = min(begin + wave, size)
        if begin:
            _await(m, begin, end, 0)
        busy += _claim(m, begin, end)
        if begin == 0:
            _ask(m, step, layer)
        kick(m)
        if not _compute(m, call, begin, end, busy):
            return False
        busy = 0
        _let_go(m, begin, end)
        kick(m)
    return True


@inlined
def _pin_all(m: Any, first: int, size: int) -> None:
    """Pin a call of one wave before its look-up, which makes no difference and spares moving residents about."""
    for i in range(first, first + size):
        pin(m, number_at(m.expert, i).n)


@inner
def _await(m: Any, begin: int, end: int, awaited: int) -> None:
    """Pieces ``begin`` to ``end`` wait for their wave, or do so no longer."""
    for i in range(begin, end):
        slot_at(m.slots, piece_at(m.pieces, i).expert).awaited = awaited


@inlined
def _ask(m: Any, step: int, layer: int) -> None:
    """The policy's turn in a layer call, and the next layer's experts while a prefill streams."""
    call = step * m.n_layers + layer
    if _is_due(m, call + step + 1):
        kick(m)  # demands are on their way before the policy thinks
        number_at(m.predict, step).n += _decide(m)
    if m.stream_prefill and m.phase == PREFILL and layer + 1 < m.n_layers:
        for expert in range((layer + 1) * m.n_experts, (layer + 2) * m.n_experts):
            request(m, expert, call + 1, call + 1)


@inlined
def _look_up(m: Any, call: int) -> None:
    """Find each needed expert resident, under way or absent."""
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        expert = number_at(m.expert, i).n
        slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
        needed(m, expert, number_at(m.next_call, i).n if m.rule == NEXT_USE else FOREVER)
        if slot.state == RESIDENT:
            if not slot.used:
                byte_at(m.found, i).n = PREFETCH_HIT
                slot.used = 1
                if slot.brought:
                    counts_at(m.counts, slot.brought - 1).useful += 1
                    slot.brought = 0
        elif transfer.live:
            byte_at(m.found, i).n = LATE_IN_FLIGHT if slot.state == LOADING else LATE_QUEUED
            counts_at(m.counts, transfer.phase).late += 1
            transfer.late_at = i
            demand(m, expert)
        else:
            byte_at(m.found, i).n = MISS


@inlined
def _claim(m: Any, begin: int, end: int) -> int:
    """Pin a wave and demand what it lacks; returns the time of what is resident."""
    ready = 0
    for i in range(begin, end):
        piece = piece_at(m.pieces, i)
        slot = slot_at(m.slots, piece.expert)
        if not slot.pinned:
            pin(m, piece.expert)
        if slot.state == RESIDENT:
            piece.stood = READY
            slot.used = 1  # late at the look-up, it may have landed while an earlier wave ran
            ready += piece.cost
        else:
            piece.stood = UNDER_WAY if transfer_at(m.transfers, piece.expert).live else LACKING
            demand(m, piece.expert)
    return ready


@inlined
def _compute(m: Any, call: int, begin: int, end: int, busy: int) -> bool:
    """Run a wave, ``busy`` ns at once and the rest in order as it lands; False if something never does."""
    first = number_at(m.offsets, call).n
    for stood in (UNDER_WAY, LACKING):
        for i in range(begin, end):
            piece = piece_at(m.pieces, i)
            if piece.stood != stood:
                continue
            slot = slot_at(m.slots, piece.expert)
            if slot.state != RESIDENT and busy:
                advance(m, m.now + busy)
                busy = 0
            if slot.state != RESIDENT:
                since = m.now
                if not wait(m, piece.expert):
                    return False
                late = transfer_at(m.transfers, piece.expert).late_at >= first
                number_at(m.stall_late if late else m.stall_demand, call).n += m.now - since
            slot.used = 1
            busy += piece.cost
    if busy:
        advance(m, m.now + busy)
    return True


@inlined
def _let_go(m: Any, begin: int, end: int) -> None:
    """The wave is over: its slots may be taken."""
    for i in range(begin, end):
        expert = piece_at(m.pieces, i).expert
        if not m.keep:
            release(m, expert)
        unpin(m, expert)


# -- the order of a call's experts -----------------------------------------------------------------------------------


@inlined
def _in_order(m: Any, first: int, size: int) -> None:
    """All fit at once: by number."""
    for i in range(size):
        _put(m, i, first + i)


@inner
def _present_first(m: Any, first: int, size: int) -> None:
    """For waves: residents, what is loading, what waits in the line of demands, the rest."""
    n = 0
    for state in (RESIDENT, LOADING, ABSENT):
        waiting = m.first_demand
        while waiting != NOBODY:  # all of them are this call's: earlier calls have what they asked for
            transfer = transfer_at(m.transfers, waiting)
            if slot_at(m.slots, waiting).state == state:
                _put(m, n, transfer.late_at)
                n += 1
            waiting = transfer.next_demand
        for i in range(first, first + size):
            expert = number_at(m.expert, i).n
            transfer = transfer_at(m.transfers, expert)
            in_line = transfer.live and transfer.demand and expert != m.running
            if slot_at(m.slots, expert).state == state and not in_line:
                _put(m, n, i)
                n += 1


@inlined
def _put(m: Any, place: int, lookup: int) -> None:
    piece = piece_at(m.pieces, place)
    piece.expert, piece.cost = number_at(m.expert, lookup).n, number_at(m.expert_ns, lookup).n


# -- the policy ------------------------------------------------------------------------------------------------------


@inlined
def _is_due(m: Any, moment: int) -> bool:
    """Whether the plan decides something at ``moment``; moments are asked about in order, none is left out."""
    return m.moment < m.n_moments and moment_at(m.moments, m.moment).moment == moment


@inner
def _decide(m: Any) -> int:
    """Execute the plan at the moment that is due: new values, the cost of predicting, requests.

    Returns what the step waited for the prediction.
    """
    index = m.moment
    due = moment_at(m.moments, index)
    m.moment += 1
    if due.last_value > due.first_value:
        valued(m, due.first_value, due.last_value)
    if due.cost and not m.critical:
        make_requests_later(m, index, due.cost)
        return 0
    if due.cost:
        advance(m, m.now + due.cost)
    make_requests(m, index)
    return due.cost
