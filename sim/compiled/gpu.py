"""The run loop, compiled: one layer call after another, as ``sim.run.simpy_engine`` has it, without events.

Wherever the reference engine yields for a time, ``advance`` lets the link live through that time first.
"""

from typing import Any

from sim.compiled.call import begin as begin_call
from sim.compiled.call import claim, let_go, stream, wave_end
from sim.compiled.clock import advance, answer_later, make_requests, wait, wait_for_rest
from sim.compiled.host_thread import await_device, launch, launched, looked_up, until_launched
from sim.compiled.hosting import host_ns, insert, wait_for_host
from sim.compiled.jit import entry, inlined, inner
from sim.compiled.link import close, kick
from sim.compiled.machine import (
    LACKING,
    NOBODY,
    UNDER_WAY,
    counts_at,
    layer_at,
    moment_at,
    number_at,
    piece_at,
    slot_at,
    task_at,
    transfer_at,
)
from sim.compiled.order import share_out, valued
from sim.compiled.scoring import announce
from sim.compiled.slots import allot, landed
from sim.run.slots import RESIDENT
from traces.schema import PREFILL


@entry
def run(m: Any) -> bool:
    """Run all steps; False if the GPU waits for ever."""
    if m.everything_resident:
        _fill(m)
    for step in range(m.n_steps):
        m.phase = number_at(m.phase_of, step).n
        if m.ring and step == 0:
            stream(m, 0)
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
    if m.scores:
        _score(m, step, call)
    wave = layer_at(m.layers, layer).fit
    if m.host_acts:
        advance(m, m.now + looked_up(m, number_at(m.offsets, call + 1).n - number_at(m.offsets, call).n))
    size, hosted = begin_call(m, call, layer)
    busy = number_at(m.shared_ns, call).n
    begin, host_ends = 0, 0
    while begin == 0 or begin < size:  # a call of no experts is a wave of none
        end = wave_end(m, begin, size, wave)
        busy += claim(m, call, begin, end)
        if begin == 0:
            _ask(m, step, layer)
        kick(m)
        if m.host_acts:
            launch(m, call, begin, end)
        if begin == 0 and hosted and m.beside:
            host_ends = m.now + host_ns(m, call)
        if not _compute(m, call, begin, end, busy):
            return False
        busy = 0
        _let_go(m, begin, end)
        kick(m)
        begin = max(end, 1)
    if (m.ring or m.insist) and not _wait_for_rest(m, call, layer):
        return False
    if hosted:
        wait_for_host(m, call, host_ends if m.beside else m.now + host_ns(m, call))
    return True


@inlined
def _score(m: Any, step: int, call: int) -> None:
    """Show a plan's scorer a route, which the step may wait for."""
    if not m.score_beside:
        advance(m, m.now + number_at(m.score_ns, call).n)
        number_at(m.predict, step).n += number_at(m.score_ns, call).n
    announce(m, call)


@inlined
def _wait_for_rest(m: Any, call: int, layer: int) -> bool:
    """Stand still until what was asked for the call is there, needed or not; False if that is for ever."""
    since = m.now
    if not wait_for_rest(m, layer):
        return False
    number_at(m.stall_late, call).n += m.now - since
    return True


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
        stream(m, call + 1)
    if m.insert:
        insert(m, call)


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
        let_go(m, piece_at(m.pieces, i).expert)


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
    if due.cost and not m.critical:
        answer_later(m, index, due.cost)
        return 0
    if due.last_value > due.first_value:
        valued(m, due.first_value, due.last_value)
    if due.cost:
        advance(m, m.now + due.cost)
    make_requests(m, index)
    return due.cost
