"""What drives a real run in compiled code: look-up, waves, requests and waiting, called by Python a few times a layer.

The rules are those of compiled simulations (``sim.compiled.call``); time is the device's, whose events are asked for.
All of it runs without the interpreter lock, and so does waiting: whoever waits looks after the link again and again.

Python gives the addresses of the records of ``sim.compiled.copies``: numba takes 9 us to look at two records, and less
than one for two numbers.
"""

from typing import Any

from sim.compiled.call import begin, claim, stream, wave_end
from sim.compiled.clock import answer, make_requests
from sim.compiled.copies import (
    AGAIN,
    DONE,
    HOLDS,
    aside_at,
    check,
    copies_at,
    hold_at,
    kick,
    look,
    machine_at,
    now,
    over,
    passed,
    poll,
    release_waves,
)
from sim.compiled.foreign import call
from sim.compiled.hosting import insert
from sim.compiled.jit import unlocked
from sim.compiled.link import close, demand
from sim.compiled.machine import (
    LACKING,
    NOBODY,
    READY,
    UNDER_WAY,
    byte_at,
    layer_at,
    moment_at,
    number_at,
    piece_at,
    slot_at,
    transfer_at,
)
from sim.compiled.order import share_out, valued
from sim.compiled.scoring import announce
from sim.log import HOSTED
from sim.run.slots import RESIDENT


@unlocked
def look_after_link(machine: int, copies: int) -> int:
    """Look after the link once."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    look(m, c, False)
    return DONE


@unlocked
def await_event(machine: int, copies: int, event: int, some: bool, demands_follow: bool) -> int:
    """Look after the link until ``event`` is passed; before demands no prefetch is handed over any more."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = now(c) + c.slice_ns
    while not passed(c, event):
        look(m, c, some)
        if over(c, until):
            return AGAIN
    if demands_follow:
        poll(m, c, False, False)
        release_waves(m, c, False)
    else:
        look(m, c, False)
    return DONE


@unlocked
def await_free(machine: int, copies: int) -> int:
    """Until no wave holds its slots any more."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = now(c) + c.slice_ns
    while c.n_holds:
        look(m, c, False)
        if over(c, until):
            return AGAIN
    return DONE


@unlocked
def await_link(machine: int, copies: int) -> int:
    """Until nothing is under way."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    until = now(c) + c.slice_ns
    while m.flying:
        look(m, c, False)
        if over(c, until):
            return AGAIN
    return DONE


@unlocked
def await_copy(machine: int, copies: int, expert: int, used: bool) -> int:
    """Have the computing stream wait for ``expert``, once its copy is handed over; the host waits for that alone."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    slot, transfer = slot_at(m.slots, expert), transfer_at(m.transfers, expert)
    until = now(c) + c.slice_ns
    while slot.state != RESIDENT and transfer.moved < transfer.body:
        look(m, c, False)
        if over(c, until):
            return AGAIN
    check(c, call(c.wait, (c.computing, number_at(c.events, expert).n, 0)))
    if used:
        slot.used = 1
    return DONE


# -- one call --------------------------------------------------------------------------------------------------------


@unlocked
def begin_call(machine: int, copies: int, number: int) -> int:
    """Look the experts of a call up; returns how many run on the GPU. Told: the look-ups that run on the host."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    if m.scores:
        announce(m, number)
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
def kick_link(machine: int, copies: int, some: bool) -> None:
    """As ``sim.compiled.copies.kick``."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    kick(m, c, some)


@unlocked
def poll_link(machine: int, copies: int) -> None:
    """See what has arrived, and let more follow."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    poll(m, c, True, False)


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
def revalue(machine: int, copies: int, index: int, values: bool) -> None:
    """New shares of a moment come into force, and its values if they are not predicted beside the step."""
    m = machine_at(machine, 0)
    due = moment_at(m.moments, index)
    if due.shares != NOBODY:
        share_out(m, due.shares)
    if values and due.last_value > due.first_value:
        valued(m, due.first_value, due.last_value)


@unlocked
def ask(machine: int, copies: int, index: int, event: int) -> None:
    """Make the requests of a moment; once ``event`` has been passed, and behind its values, if that is not 0."""
    m, c = machine_at(machine, 0), copies_at(copies, 0)
    if event:
        aside = aside_at(c.asides, c.n_asides)
        aside.event, aside.moment = event, index
        c.n_asides += 1
    else:
        make_requests(m, index)


@unlocked
def answer_aside(machine: int, copies: int, index: int) -> None:
    """What was predicted for a moment beside the step is known."""
    m = machine_at(machine, 0)
    answer(m, index)


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
        kick(m, c, False)
        slot_at(m.slots, expert).used = 1


@unlocked
def end_run(machine: int, copies: int) -> None:
    """The run is over: count what is left on its way."""
    m = machine_at(machine, 0)
    close(m)


CALLED: dict[Any, tuple[int, ...]] = {
    look_after_link: (), await_event: (0, False, False), await_free: (), await_link: (), await_copy: (0, False),
    begin_call: (0,), claim_wave: (0, 0, 0), kick_link: (False,), poll_link: (), hold: (0, 0, 0),
    still_under_way: (0,), revalue: (0, False), ask: (0, 0), answer_aside: (0,), stream_layer: (0,),
    insert_hosted: (0,), demand_all: (), end_run: (),
}  # fmt: skip
"""All that Python calls, with arguments of the kinds that follow the two addresses: compiled before a run."""
