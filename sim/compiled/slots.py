"""The GPU's expert slots, compiled: ``sim.run.slots.ExpertCache`` with the bytes of those who may leave kept as totals.

The totals answer at once whether room can be made, so a prefetch that must wait costs the same in a cache of any size.
"""

from typing import Any

from sim.compiled.jit import inlined, inner
from sim.compiled.machine import counts_at, group_at, layer_at, number_at, pool_at, slot_at, transfer_at
from sim.compiled.order import evicted, first_to_leave, loaded, may_leave, must_stay, requested
from sim.run.slots import ABSENT, LOADING, RESIDENT


@inlined
def pin(m: Any, expert: int) -> None:
    """The running wave needs ``expert``: it must not leave."""
    slot = slot_at(m.slots, expert)
    if slot.state == RESIDENT:
        _must_stay(m, expert)
    slot.pinned = 1


@inlined
def unpin(m: Any, expert: int) -> None:
    """The wave is over."""
    slot = slot_at(m.slots, expert)
    slot.pinned = 0
    if slot.state == RESIDENT:
        _may_leave(m, expert)


@inlined
def landed(m: Any, expert: int) -> None:
    """The transfer of ``expert`` is complete."""
    slot = slot_at(m.slots, expert)
    slot.state = RESIDENT
    if not slot.pinned:
        _may_leave(m, expert)


@inner
def want(m: Any, expert: int, call: int) -> None:
    """A prefetch asks for ``expert`` to be there for ``call``, which has not passed."""
    slot = slot_at(m.slots, expert)
    slot.wanted_until = max(slot.wanted_until, call)
    if slot.state == RESIDENT:
        requested(m, expert)
    if not slot.wanted:
        set_wanted(m, expert, 1)
        layer = layer_at(m.layers, slot.layer)
        slot.next_wanted = layer.first_wanted
        layer.first_wanted = expert


@inner
def set_wanted(m: Any, expert: int, wanted: int) -> None:
    """Some call to come wants ``expert``, or no longer any does; the caller keeps its layer's list."""
    slot = slot_at(m.slots, expert)
    free_to_leave = slot.state == RESIDENT and not slot.pinned
    if free_to_leave:
        _must_stay(m, expert)
    slot.wanted = wanted
    if free_to_leave:
        _may_leave(m, expert)


@inlined
def can_allot(m: Any, expert: int, demand: bool) -> bool:
    """Whether ``expert`` can be given room now."""
    slot = slot_at(m.slots, expert)
    pool = pool_at(m.pools, slot.pool)
    return slot.size <= pool.free + pool.spare + (pool.wanted if demand else 0)


@inner
def allot(m: Any, expert: int, demand: bool) -> None:
    """Give ``expert`` room, which ``can_allot`` said there is; wanted experts leave only when no other can."""
    slot = slot_at(m.slots, expert)
    pool = pool_at(m.pools, slot.pool)
    while pool.free < slot.size:
        victim = first_to_leave(m, slot.group, 0 if pool.spare else 1, demand)
        counts_at(m.counts, m.phase).evictions += 1
        if not slot_at(m.slots, victim).used:
            unused(m, victim)
        if m.write_back:
            transfer, back = transfer_at(m.transfers, expert), transfer_at(m.transfers, victim)
            transfer.back_ns += back.startup + back.body
            transfer.back_bytes += slot_at(m.slots, victim).size
        release(m, victim)
    pool.free -= slot.size
    group_at(m.groups, slot.group).held += 1
    if m.real:
        pool.n_places -= 1
        slot.place = number_at(pool.places, pool.n_places).n
    slot.state = LOADING
    slot.used = 0
    loaded(m, expert)


@inner
def release(m: Any, expert: int) -> None:
    """Empty the slot of ``expert``: evicted, dropped after use, or its transfer abandoned."""
    slot = slot_at(m.slots, expert)
    if slot.state == RESIDENT and not slot.pinned:
        _must_stay(m, expert)
    pool = pool_at(m.pools, slot.pool)
    pool.free += slot.size
    if m.real:
        number_at(pool.places, pool.n_places).n = slot.place
        pool.n_places += 1
    group_at(m.groups, slot.group).held -= 1
    slot.state = ABSENT
    evicted(m, expert)


@inlined
def unused(m: Any, expert: int) -> None:
    """``expert`` leaves, or the run ends: count it if a prefetch brought it and nobody needed it."""
    slot = slot_at(m.slots, expert)
    if slot.brought:
        counts = counts_at(m.counts, slot.brought - 1)
        counts.unused += 1
        counts.wasted += slot.size
        slot.brought = 0


@inlined
def _may_leave(m: Any, expert: int) -> None:
    slot = slot_at(m.slots, expert)
    pool = pool_at(m.pools, slot.pool)
    if slot.wanted:
        pool.wanted += slot.size
    else:
        pool.spare += slot.size
    may_leave(m, expert)


@inlined
def _must_stay(m: Any, expert: int) -> None:
    slot = slot_at(m.slots, expert)
    pool = pool_at(m.pools, slot.pool)
    if slot.wanted:
        pool.wanted -= slot.size
    else:
        pool.spare -= slot.size
    must_stay(m, expert)
