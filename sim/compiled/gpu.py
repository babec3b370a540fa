"""The run loop, compiled: one layer call after another, as ``sim.engine`` has it, without events.

Wherever the reference engine yields for a time, ``advance`` lets the link live through that time first.
"""

from typing import Any, NamedTuple

import numpy as np

from sim.cache import ABSENT, LOADING, RESIDENT
from sim.compiled.clock import advance, make_requests, make_requests_later, wait
from sim.compiled.jit import entry, inner
from sim.compiled.link import close, demand, kick, pass_call, request
from sim.compiled.machine import (
    FOREVER,
    LACKING,
    NEXT_USE,
    NOBODY,
    READY,
    UNDER_WAY,
    counts_at,
    layer_at,
    moment_at,
    piece_at,
    slot_at,
    transfer_at,
)
from sim.compiled.order import needed, valued
from sim.compiled.slots import allot, landed, pin, release, unpin
from sim.log import LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, PREFILL


class Calls(NamedTuple):
    """The workload; see ``sim.workload.Workload``. ``next_call`` is empty unless the rule asks for it."""

    offsets: np.ndarray
    expert: np.ndarray
    expert_ns: np.ndarray
    next_call: np.ndarray
    layer_ns: np.ndarray
    shared_ns: np.ndarray
    head_ns: np.ndarray
    phase: np.ndarray


class Record(NamedTuple):
    """What a run leaves behind; see ``sim.log.Log``."""

    finish: np.ndarray
    found: np.ndarray
    stall_demand: np.ndarray
    stall_late: np.ndarray
    predict: np.ndarray


@entry
def run(m: Any, calls: Calls, record: Record, everything_resident: bool) -> bool:
    """Run all steps; False if the GPU waits for ever."""
    if everything_resident:
        _fill(m)
    for step in range(len(calls.phase)):
        m.phase = calls.phase[step]
        if m.phase == PREFILL and m.prompt_ns:
            advance(m, m.now + m.prompt_ns)
            record.predict[step] += m.prompt_ns
        if _is_due(m, step * (m.n_layers + 1)):
            record.predict[step] += _decide(m)
            kick(m)
        for layer in range(m.n_layers):
            advance(m, m.now + calls.layer_ns[step * m.n_layers + layer])
            if not _call(m, calls, record, step, layer):
                return False
        advance(m, m.now + calls.head_ns[step])
        record.finish[step] = m.now
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


@inner
def _call(m: Any, calls: Calls, record: Record, step: int, layer: int) -> bool:
    """One routed layer once its route is known; False if the GPU waits for ever."""
    call = step * m.n_layers + layer
    first, size = calls.offsets[call], calls.offsets[call + 1] - calls.offsets[call]
    wave = layer_at(m.layers, layer).fit
    _look_up(m, calls, record, call)
    pass_call(m, call, layer)
    if size <= wave:
        _in_order(m, calls, first, size)
    else:
        _present_first(m, calls, first, size)
        for i in range(wave, size):
            slot_at(m.slots, piece_at(m.pieces, i).expert).awaited = 1
    busy = _claim(m, 0, min(wave, size)) + calls.shared_ns[call]
    if _is_due(m, call + step + 1):
        kick(m)  # demands are on their way before the policy thinks
        record.predict[step] += _decide(m)
    if m.stream_prefill and m.phase == PREFILL and layer + 1 < m.n_layers:
        for expert in range((layer + 1) * m.n_experts, (layer + 2) * m.n_experts):
            request(m, expert, call + 1, call + 1)
    kick(m)
    if not _compute(m, record, call, first, 0, min(wave, size), busy):
        return False
    for begin in range(wave, size, wave):
        end = min(begin + wave, size)
        for i in range(begin, end):
            slot_at(m.slots, piece_at(m.pieces, i).expert).awaited = 0
        busy = _claim(m, begin, end)
        kick(m)
        if not _compute(m, record, call, first, begin, end, busy):
            return False
    return True


@inner
def _look_up(m: Any, calls: Calls, record: Record, call: int) -> None:
    """Find each needed expert resident, under way or absent."""
    for i in range(calls.offsets[call], calls.offsets[call + 1]):
        expert = calls.expert[i]
        slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
        needed(m, expert, calls.next_call[i] if m.rule == NEXT_USE else FOREVER)
        if slot.state == RESIDENT:
            if not slot.used:
                record.found[i] = PREFETCH_HIT
                slot.used = 1
                if slot.brought:
                    counts_at(m.counts, slot.brought - 1).useful += 1
                    slot.brought = 0
        elif transfer.live:
            record.found[i] = LATE_IN_FLIGHT if slot.state == LOADING else LATE_QUEUED
            counts_at(m.counts, transfer.phase).late += 1
            transfer.late_at = i
            demand(m, expert)
        else:
            record.found[i] = MISS


@inner
def _claim(m: Any, begin: int, end: int) -> int:
    """Pin a wave and demand what it lacks; returns the time of what is resident."""
    ready = 0
    for i in range(begin, end):
        piece = piece_at(m.pieces, i)
        slot = slot_at(m.slots, piece.expert)
        pin(m, piece.expert)
        if slot.state == RESIDENT:
            piece.stood = READY
            slot.used = 1  # late at the look-up, it may have landed while an earlier wave ran
            ready += piece.cost
        else:
            piece.stood = UNDER_WAY if transfer_at(m.transfers, piece.expert).live else LACKING
            demand(m, piece.expert)
    return ready


@inner
def _compute(m: Any, record: Record, call: int, first: int, begin: int, end: int, busy: int) -> bool:
    """Run a wave, ``busy`` ns at once and the rest as it lands, and let go of its slots; False if something never lands.

    Look-ups from ``first`` on are this call's.
    """
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
                stall = record.stall_late if late else record.stall_demand
                stall[call] += m.now - since
            slot.used = 1
            busy += piece.cost
    if busy:
        advance(m, m.now + busy)
    for i in range(begin, end):
        expert = piece_at(m.pieces, i).expert
        if not m.keep:
            release(m, expert)
        unpin(m, expert)
    kick(m)
    return True


# -- the order of a call's experts -----------------------------------------------------------------------------------


@inner
def _in_order(m: Any, calls: Calls, first: int, size: int) -> None:
    """All fit at once: by number."""
    for i in range(size):
        _put(m, calls, i, first + i)


@inner
def _present_first(m: Any, calls: Calls, first: int, size: int) -> None:
    """For waves: residents, what is loading, what waits in the line of demands, the rest."""
    n = 0
    for state in (RESIDENT, LOADING, ABSENT):
        waiting = m.first_demand
        while waiting != NOBODY:  # all of them are this call's: earlier calls have what they asked for
            transfer = transfer_at(m.transfers, waiting)
            if slot_at(m.slots, waiting).state == state:
                _put(m, calls, n, transfer.late_at)
                n += 1
            waiting = transfer.next_demand
        for i in range(first, first + size):
            expert = calls.expert[i]
            transfer = transfer_at(m.transfers, expert)
            in_line = transfer.live and transfer.demand and expert != m.running
            if slot_at(m.slots, expert).state == state and not in_line:
                _put(m, calls, n, i)
                n += 1


@inner
def _put(m: Any, calls: Calls, place: int, lookup: int) -> None:
    piece = piece_at(m.pieces, place)
    piece.expert, piece.cost = calls.expert[lookup], calls.expert_ns[lookup]


# -- the policy ------------------------------------------------------------------------------------------------------


@inner
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
    if due.values >= 0:
        valued(m, due.values)
    if due.cost and not m.critical:
        make_requests_later(m, index, due.cost)
        return 0
    if due.cost:
        advance(m, m.now + due.cost)
    make_requests(m, index)
    return due.cost
