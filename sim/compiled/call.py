"""The rules of one layer call, compiled: ``sim.run.call``. Whoever follows them supplies the time."""

from typing import Any

from sim.compiled.host_thread import issued, requests
from sim.compiled.hosting import to_copy
from sim.compiled.jit import inlined, inner
from sim.compiled.link import demand, insist, is_in_line, pass_call, request
from sim.compiled.machine import (
    FOREVER,
    LACKING,
    NOBODY,
    READY,
    UNDER_WAY,
    byte_at,
    counts_at,
    layer_at,
    number_at,
    piece_at,
    slot_at,
    transfer_at,
)
from sim.compiled.order import needed
from sim.compiled.slots import pin, release, unpin
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT
from sim.run.slots import ABSENT, LOADING, RESIDENT


@inlined
def begin(m: Any, call: int, layer: int) -> tuple[int, int]:
    """The route of ``call`` is known: look its experts up and put those that run on the GPU in order, as pieces.

    Returns how many these are, and how many run on the host.
    """
    first, size = number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n - number_at(m.offsets, call).n
    wave = layer_at(m.layers, layer).fit
    if size <= wave:
        _pin_all(m, first, size)
    hosted = _look_up(m, call)
    if m.ring or m.insist:
        insist(m, call, layer)
    pass_call(m, call, layer)
    every, size = size, _in_order(m, first, size)
    if size > wave and wave_end(m, 0, size, wave) < size:
        _present_first(m, first, every)
        _await(m, wave_end(m, 0, size, wave), size, 1)
    return size, hosted


@inlined
def _pin_all(m: Any, first: int, size: int) -> None:
    """Pin a call of one wave before its look-up, which makes no difference and spares moving residents about."""
    for i in range(first, first + size):
        pin(m, number_at(m.expert, i).n)


@inlined
def _look_up(m: Any, call: int) -> int:
    """Find each needed expert resident, under way or absent; returns how many run on the host."""
    hosted, copies = 0, to_copy(m, call) if m.splits else 0
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        expert = number_at(m.expert, i).n
        slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
        may_run_there = m.host and slot.state == ABSENT and not transfer.live and number_at(m.to_host, i).n
        if may_run_there and copies:
            copies -= 1
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


@inlined
def _in_order(m: Any, first: int, size: int) -> int:
    """By number, as it stays if all fit at once; returns how many there are without those on the host."""
    n = 0
    for i in range(first, first + size):
        if byte_at(m.found, i).n != HOSTED:
            _put(m, n, i)
            n += 1
    return n


@inlined
def wave_end(m: Any, begin: int, size: int, wave: int) -> int:
    """Where the wave of pieces that begins at ``begin`` ends: those with reserved slots take no other's."""
    if not m.host:
        return min(begin + wave, size)
    end, room = begin, wave
    while end < size and (room or slot_at(m.slots, piece_at(m.pieces, end).expert).reserved):
        room -= 1 - slot_at(m.slots, piece_at(m.pieces, end).expert).reserved
        end += 1
    return end


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
            in_line = transfer.live and transfer.demand and is_in_line(m, expert)
            if slot_at(m.slots, expert).state == state and not in_line and byte_at(m.found, i).n != HOSTED:
                _put(m, n, i)
                n += 1


@inlined
def _put(m: Any, place: int, lookup: int) -> None:
    piece = piece_at(m.pieces, place)
    piece.expert, piece.cost = number_at(m.expert, lookup).n, number_at(m.expert_ns, lookup).n
    piece.wait = number_at(m.if_awaited_ns, lookup).n


@inner
def _await(m: Any, begin: int, end: int, awaited: int) -> None:
    """Pieces ``begin`` to ``end`` wait for their wave, or do so no longer."""
    for i in range(begin, end):
        slot_at(m.slots, piece_at(m.pieces, i).expert).awaited = awaited


@inlined
def claim(m: Any, call: int, begin: int, end: int) -> int:
    """Pin a wave and demand what it lacks; returns the time of what is resident, its launch included."""
    if begin:
        _await(m, begin, end, 0)
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


@inner
def stream(m: Any, call: int) -> None:
    """Ask for every expert of a call's layer."""
    first, before = call % m.n_layers * m.n_experts, issued(m)
    for expert in range(first, first + m.n_experts):
        request(m, expert, call, call)
    requests(m, m.n_experts, before)


@inlined
def let_go(m: Any, expert: int) -> None:
    """The wave of ``expert`` is over: its slot may be taken."""
    if not m.keep and not slot_at(m.slots, expert).reserved:
        release(m, expert)
    unpin(m, expert)
