"""Simulated time, compiled: what happens until the GPU's next act, and in which order (as ``sim.run.clock`` has it)."""

from typing import Any

from sim.compiled.heap import push, remove, top
from sim.compiled.host_thread import issued, requests
from sim.compiled.jit import inlined, inner
from sim.compiled.link import is_absent, kick, request, stretch_ends
from sim.compiled.machine import FOREVER, NOBODY, heap_at, moment_at, request_at, slot_at, transfer_at
from sim.compiled.order import valued
from sim.run.slots import RESIDENT


@inner
def advance(m: Any, until: int) -> None:
    """Let everything happen that happens up to ``until``, which becomes the present."""
    while _next_event(m) <= until:
        _happen(m)
    m.now = until


@inner
def wait(m: Any, expert: int) -> bool:
    """Let things happen until ``expert`` has landed, and whatever else does at that instant; False if nothing moves."""
    slot = slot_at(m.slots, expert)
    while slot.state != RESIDENT:
        if _next_event(m) == FOREVER:
            return False
        _happen(m)
    advance(m, m.now)
    return True


@inner
def wait_for_rest(m: Any, layer: int) -> bool:
    """Let things happen until all that ``insist`` named in ``layer`` has landed; False if nothing moves."""
    for expert in range(layer * m.n_experts, (layer + 1) * m.n_experts):
        transfer = transfer_at(m.transfers, expert)
        while transfer.live and transfer.demand and not transfer.needed:
            if _next_event(m) == FOREVER:
                return False
            _happen(m)
    advance(m, m.now)
    return True


@inner
def make_requests(m: Any, moment: int) -> None:
    """Make the requests of a moment of the plan, except those whose call has passed meanwhile.

    Those that would issue more copies than the plan lets issue now are left out too.
    """
    made, before = moment_at(m.moments, moment), issued(m)
    most = 0 if m.only_idle and (m.running != NOBODY or m.flying) else m.most_issued or FOREVER
    for i in range(made.first, made.last):
        wish = request_at(m.requests, i)
        if wish.call > m.passed:
            if most < FOREVER and is_absent(m, wish.expert):
                if most == 0:
                    continue
                most -= 1
            request(m, wish.expert, wish.call, wish.priority)
    requests(m, made.last - made.first, before)


@inner
def answer(m: Any, moment: int) -> None:
    """What is predicted beside the step is known: new values, then requests."""
    made = moment_at(m.moments, moment)
    valued(m, made.first_value, made.last_value)
    make_requests(m, moment)


@inner
def answer_later(m: Any, moment: int, delay: int) -> None:
    """The same in ``delay`` ns."""
    push(heap_at(m.aside, 0), moment, m.now + delay, moment)


@inlined
def _next_event(m: Any) -> int:
    aside = heap_at(m.aside, 0)
    return min(m.ending, top(aside).first) if aside.size else m.ending


@inner
def _happen(m: Any) -> None:
    """The next thing happens; at one instant the end of a transfer comes before delayed requests."""
    m.now = _next_event(m)
    if m.ending == m.now:
        stretch_ends(m)
    else:
        aside = heap_at(m.aside, 0)
        moment = top(aside).item
        remove(aside, moment)
        answer(m, moment)
        kick(m)
