"""The host's one thread, compiled: ``sim.run.host_thread``. None of it is called where its acts take no time."""

from typing import Any

from sim.compiled.jit import inlined, inner
from sim.compiled.machine import LACKING, READY, UNDER_WAY, byte_at, counts_at, piece_at


@inlined
def await_device(m: Any) -> None:
    """It waits for a route or a token, which is there now."""
    m.host_free = max(m.host_free, m.now)


@inlined
def spend(m: Any, ns: int) -> None:
    """Have it do something more, behind all that has come up so far."""
    m.host_free += ns
    counts_at(m.counts, m.phase).host_busy += ns


@inner
def launched(m: Any) -> int:
    """How long the GPU waits until it has launched what comes next, which it does once all before that is done."""
    spend(m, m.host_launch_ns)
    return _wait_ns(m)


@inner
def looked_up(m: Any, size: int) -> int:
    """How long the GPU waits until it has looked so many experts up."""
    await_device(m)
    spend(m, size * m.host_look_up_ns)
    return _wait_ns(m)


@inner
def launch(m: Any, call: int, begin: int, end: int) -> None:
    """Have it launch a wave: its residents at once where they have one row each, the others one by one."""
    ready = 0
    for i in range(begin, end):
        ready += 1 if piece_at(m.pieces, i).stood == READY else 0
    await_device(m)
    spend(m, (min(ready, 1) if byte_at(m.single, call).n else ready) * m.host_launch_ns)
    for stood in (UNDER_WAY, LACKING):
        for i in range(begin, end):
            piece = piece_at(m.pieces, i)
            if piece.stood == stood:
                spend(m, m.host_launch_ns)
                piece.launched = m.host_free


@inlined
def until_launched(m: Any, i: int, now: int) -> int:
    """How long the GPU waits from ``now`` on until that piece, which was waited for, is launched; counted."""
    wait = max(0, piece_at(m.pieces, i).launched - now)
    counts_at(m.counts, m.phase).host_waits += wait
    return wait


@inlined
def _wait_ns(m: Any) -> int:
    """How long the GPU waits for it from now on; counted."""
    wait = max(0, m.host_free - m.now)
    counts_at(m.counts, m.phase).host_waits += wait
    return wait


@inlined
def issued(m: Any) -> int:
    """Copies that requests of this phase have issued."""
    return counts_at(m.counts, m.phase).issued


@inlined
def requests(m: Any, count: int, before: int) -> None:
    """So many requests were made, before which ``before`` copies had been issued."""
    if m.host_acts:
        more = issued(m) - before
        await_device(m)
        spend(m, more * m.host_request_ns + (count - more) * m.host_drop_ns)


@inlined
def hand_over(m: Any) -> int:
    """A copy comes up to be handed over; returns when it will have been."""
    await_device(m)
    spend(m, m.host_hand_over_ns)
    return int(m.host_free)
