"""The run loop, compiled: one layer call after another, as ``sim.run.simpy_engine`` has it, without events.

Wherever the reference engine yields for a time, ``advance`` lets the link live through that time first.
"""

from typing import Any

from sim.compiled.clock import advance, make_requests, make_requests_later, wait, wait_for_rest
from sim.compiled.host_thread import await_device, issued, launch, launched, looked_up, requests, until_launched
from sim.compiled.jit import entry, inlined, inner
from sim.compiled.link import close, demand, insist, kick, pass_call, request
from sim.compiled.machine import (
    FOREVER,
    LACKING,
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
    task_at,
    transfer_at,
)
from sim.compiled.order import needed, share_out, valued
from sim.compiled.slots import allot, landed, pin, release, unpin
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT
from sim.run.slots import ABSENT, LOADING, RESIDENT
from traces.schema import PREFILL


@entry
def run(m: Any) -> bool:
    """Run all steps; False if the GPU waits for ever."""
    if m.everything_resident:
        _fill(m)
    for step in range(m.n_steps):
        m.phase = number_at(m.phase_of, step).n
        if m.ring and step == 0:
            _stream(m, 0)
            kick(m)
        if m.prepares:
            _await_preparation(m, step)
        if m.moves:
            advance(m, m.now + number_at(m.move_ns, step).n)
        if m.phase == PREFILL and m.prompt_ns:
            advance(m, m.now + m.prompt_ns)
            number_at(m.predict, step).n += m.prompt_ns
        if _is_due(m, step * (m.n_layers + 1)):
            number_at(m.predict, step).n += _decide(m)
            kick(m)
        if m.host_acts:
            await_device(m)
        for layer in range(m.n_layers):
            if m.host_acts:
                advance(m, m.now + launched(m))
            copying = 0 if m.running == NOBODY else m.beside_copy_ns
            advance(m, m.now + number_at(m.layer_ns, step * m.n_layers + layer).n + copying)
            if not _call(m, step, layer):
                return False
        if m.host_acts:
            advance(m, m.now + launched(m))
        advance(m, m.now + number_at(m.head_ns, step).n)
        number_at(m.finish, step).n = m.now
    close(m)
    return True


@inner
def _await_preparation(m: Any, step: int) -> None:
    """Stand still until what is predicted and scheduled for the step is there (``sim.schedules.pipeline.Lanes``)."""
    ready = 0
    for i in range(number_at(m.tasks_of, step).n, number_at(m.tasks_of, step + 1).n):
        task = task_at(m.tasks, i)
        begin = number_at(m.finish, task.after).n if task.after >= 0 else 0
        for lane in range(task.lane + 1):
            begin = max(begin, number_at(m.lanes, lane).n)
        ready = begin + task.ns
        number_at(m.lanes, task.lane).n = ready
    if ready > m.now:
        number_at(m.predict, step).n += ready - m.now
        advance(m, ready)


@inner
def _fill(m: Any) -> None:
    """Everything is on the GPU from the start."""
    for expert in range(m.n_slots):
        allot(m, expert, True)
        landed(m, expert)
        slot_at(m.slots, expert).used = 1
    for phase in range(2):
        counts_at(m.counts, phase).evictions = 0


# -- one layer call --------------------------------------------------------------------------------------------------


@inlined
def _call(m: Any, step: int, layer: int) -> bool:
    """One routed layer once its route is known; False if the GPU waits for ever."""
    call = step * m.n_layers + layer
    if m.before_demands and _is_due(m, call + step + 1):
        number_at(m.predict, step).n += _decide(m)
        kick(m)
    first, size = number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n - number_at(m.offsets, call).n
    wave = layer_at(m.layers, layer).fit
    if m.host_acts:
        advance(m, m.now + looked_up(m, size))
    if size <= wave:
        _pin_all(m, first, size)
    hosted = _look_up(m, call)
    if m.ring or m.insist:
        insist(m, call, layer)
    pass_call(m, call, layer)
    size = _in_order(m, first, size)
    if size > wave and _wave_end(m, 0, size, wave) < size:
        _present_first(m, first, number_at(m.offsets, call + 1).n - first)
        _await(m, _wave_end(m, 0, size, wave), size, 1)
    busy = number_at(m.shared_ns, call).n
    begin, host_ends = 0, 0
    while begin == 0 or begin < size:  # a call of no experts is a wave of none
        end = _wave_end(m, begin, size, wave)
        if begin:
            _await(m, begin, end, 0)
        busy += _claim(m, call, begin, end)
        if begin == 0:
            _ask(m, step, layer)
        kick(m)
        if m.host_acts:
            launch(m, call, begin, end)
        if begin == 0 and hosted and m.beside:
            host_ends = m.now + _host_ns(m, call)
        if not _compute(m, call, begin, end, busy):
            return False
        busy = 0
        _let_go(m, begin, end)
        kick(m)
        begin = max(end, 1)
    if (m.ring or m.insist) and not _wait_for_rest(m, call, layer):
        return False
    if hosted:
        _wait_for_host(m, call, host_ends if m.beside else m.now + _host_ns(m, call))
    return True


@inlined
def _wait_for_rest(m: Any, call: int, layer: int) -> bool:
    """Stand still until what was asked for the call is there, needed or not; False if that is for ever."""
    since = m.now
    if not wait_for_rest(m, layer):
        return False
    number_at(m.stall_late, call).n += m.now - since
    return True


@inner
def _host_ns(m: Any, call: int) -> int:
    """Time of the call's experts that run on the host, if it begins now."""
    costs, total = m.host_alone if m.running == NOBODY else m.host_shared, m.host_call
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        if byte_at(m.found, i).n == HOSTED:
            total += number_at(costs, i).n
    return total


@inner
def _wait_for_host(m: Any, call: int, ends: int) -> None:
    """Stand still until the host is done."""
    if ends > m.now:
        number_at(m.stall_host, call).n += ends - m.now
        advance(m, ends)


@inlined
def _wave_end(m: Any, begin: int, size: int, wave: int) -> int:
    """Where the wave of pieces that begins at ``begin`` ends: those with reserved slots take no other's."""
    if not m.host:
        return min(begin + wave, size)
    end, room = begin, wave
    while end < size and (room or slot_at(m.slots, piece_at(m.pieces, end).expert).reserved):
        room -= 1 - slot_at(m.slots, piece_at(m.pieces, end).expert).reserved
        end += 1
    return end


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
    if m.ring:
        streams = call + 1 < m.n_steps * m.n_layers
    else:
        streams = m.stream_prefill and m.phase == PREFILL and layer + 1 < m.n_layers
    if streams:
        _stream(m, call + 1)
    if m.insert:
        _insert(m, call)


@inner
def _insert(m: Any, call: int) -> None:
    """Ask for experts that run on the host now for the next visit of their layer, as many a step as the plan says."""
    if call % m.n_layers == 0:
        m.inserted = 0
    count, before = 0, issued(m)
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        if byte_at(m.found, i).n == HOSTED and m.inserted < m.insert and count < m.insert_each:
            request(m, number_at(m.expert, i).n, call + m.n_layers, call)
            m.inserted += 1
            count += 1
    if count:
        counts_at(m.counts, m.phase).inserted += issued(m) - before
        requests(m, count, before)


@inner
def _stream(m: Any, call: int) -> None:
    """Ask for every expert of a call's layer."""
    first, before = call % m.n_layers * m.n_experts, issued(m)
    for expert in range(first, first + m.n_experts):
        request(m, expert, call, call)
    requests(m, m.n_experts, before)


@inlined
def _look_up(m: Any, call: int) -> int:
    """Find each needed expert resident, under way or absent; returns how many run on the host."""
    hosted, to_copy = 0, _to_copy(m, call) if m.splits else 0
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        expert = number_at(m.expert, i).n
        slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
        may_run_there = m.host and slot.state == ABSENT and not transfer.live and number_at(m.to_host, i).n
        if may_run_there and to_copy:
            to_copy -= 1
        elif may_run_there:
            byte_at(m.found, i).n = HOSTED
            slot.pinned = 0
            hosted += 1
            continue  # it gets no slot, so the rule hears nothing of it
        needed(m, expert, number_at(m.next_call, i).n if m.foresees else FOREVER)
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
    return hosted


@inner
def _to_copy(m: Any, call: int) -> int:
    """How many of the call's experts that would run on the host are copied instead."""
    absent = 0
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        expert = number_at(m.expert, i).n
        there = slot_at(m.slots, expert).state != ABSENT or transfer_at(m.transfers, expert).live
        absent += 0 if there else number_at(m.to_host, i).n
    return number_at(m.copied, call % m.n_layers * (m.n_experts + 1) + absent).n


@inlined
def _claim(m: Any, call: int, begin: int, end: int) -> int:
    """Pin a wave and demand what it lacks; returns the time of what is resident, its launch included."""
    ready, there = 0, 0
    for i in range(begin, end):
        piece = piece_at(m.pieces, i)
        slot = slot_at(m.slots, piece.expert)
        if not slot.pinned:
            pin(m, piece.expert)
        if slot.state == RESIDENT:
            piece.stood = READY
            slot.used = 1  # late at the look-up, it may have landed while an earlier wave ran
            ready += piece.cost
            there += 1
        else:
            piece.stood = UNDER_WAY if transfer_at(m.transfers, piece.expert).live else LACKING
            demand(m, piece.expert)
            if m.waits:
                number_at(m.waited, call).n += piece.wait - piece.cost
    if there:
        ready += m.launch_ns
        if m.parts and byte_at(m.single, call).n:
            ready += number_at(m.split_wave_ns, there).n
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
            if m.host_acts:
                busy += until_launched(m, i, m.now + busy)
            busy += piece.wait
    if busy:
        advance(m, m.now + busy)
    return True


@inlined
def _let_go(m: Any, begin: int, end: int) -> None:
    """The wave is over: its slots may be taken."""
    for i in range(begin, end):
        expert = piece_at(m.pieces, i).expert
        if not m.keep and not slot_at(m.slots, expert).reserved:
            release(m, expert)
        unpin(m, expert)


# -- the order of a call's experts -----------------------------------------------------------------------------------


@inlined
def _in_order(m: Any, first: int, size: int) -> int:
    """By number, as it stays if all fit at once; returns how many there are without those on the host."""
    n = 0
    for i in range(first, first + size):
        if byte_at(m.found, i).n != HOSTED:
            _put(m, n, i)
            n += 1
    return n


@inner
def _present_first(m: Any, first: int, size: int) -> None:
    """For waves: residents, what is loading, what waits in the line of demands, the rest."""
    n = 0
    for state in (RESIDENT, LOADING, ABSENT):
        waiting = m.first_demand
        while waiting != NOBODY:  # all of them are this call's: earlier calls have what they asked for
            transfer = transfer_at(m.transfers, waiting)
            if slot_at(m.slots, waiting).state == state and transfer.needed:
                _put(m, n, transfer.late_at)
                n += 1
            waiting = transfer.next_demand
        for i in range(first, first + size):
            expert = number_at(m.expert, i).n
            transfer = transfer_at(m.transfers, expert)
            in_line = transfer.live and transfer.demand and expert != m.running and expert != m.committed
            if slot_at(m.slots, expert).state == state and not in_line and byte_at(m.found, i).n != HOSTED:
                _put(m, n, i)
                n += 1


@inlined
def _put(m: Any, place: int, lookup: int) -> None:
    piece = piece_at(m.pieces, place)
    piece.expert, piece.cost = number_at(m.expert, lookup).n, number_at(m.expert_ns, lookup).n
    piece.wait = number_at(m.if_awaited_ns, lookup).n


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
    if due.shares != NOBODY:
        share_out(m, due.shares)
    if due.last_value > due.first_value:
        valued(m, due.first_value, due.last_value)
    if due.cost and not m.critical:
        make_requests_later(m, index, due.cost)
        return 0
    if due.cost:
        advance(m, m.now + due.cost)
    make_requests(m, index)
    return due.cost
