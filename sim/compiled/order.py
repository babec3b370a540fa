"""Who leaves when a slot is needed: the rules of ``sim.eviction``, compiled.

lru and fifo keep each group's experts in a list, oldest first, and whoever leaves is looked for from its old end. The
others give an expert a rank and a tie; those that may leave stand in a heap (``sim.compiled.slots`` puts them in and
takes them out), so that what may not leave is never looked at.
"""

from typing import Any

from sim.compiled.heap import contains, largest, push, remove, top
from sim.compiled.jit import inlined, inner
from sim.compiled.machine import (
    FOREVER,
    NOBODY,
    RULES,
    byte_at,
    group_at,
    heap_at,
    number_at,
    slot_at,
    valued_at,
)
from sim.compiled.scoring import refresh
from sim.eviction import ADDED, COUNTS, HALF, OCTAVE
from sim.run.slots import RESIDENT

COMPILED = (
    "lru", "fifo", "lfu", "perfect-lfu", "lfu-mfu", "lfru", "decayed-lfu", "least-stale", "score", "score-recent",
    "score-lfu", "score-count", "scored", "next-use",
)  # fmt: skip
(
    LRU, FIFO, LFU, PERFECT_LFU, LFU_MFU, LFRU, DECAYED_LFU, LEAST_STALE, SCORE, RECENT_SCORE, SCORE_LFU,
    SCORE_COUNT, SCORED, NEXT_USE,
) = map(RULES.index, COMPILED)  # fmt: skip


@inlined
def needed(m: Any, expert: int, next_call: int) -> None:
    """A call needs ``expert``, resident or not; ``next_call`` is the call that needs it next, for next-use alone."""
    slot = slot_at(m.slots, expert)
    if m.rule == LRU:
        _to_newest(m, expert)
    elif m.rule == NEXT_USE:
        slot.uses = next_call
    elif m.rule == DECAYED_LFU or m.rule == LEAST_STALE:
        _in_pass(m, expert)
    elif m.rule != FIFO and m.rule != SCORE:
        slot.uses += 1
    if _by_rank(m):
        _rank(m, expert)
    elif m.rule == SCORED:
        _note(m, expert)


@inlined
def requested(m: Any, expert: int) -> None:
    """A prefetch asks for ``expert``, which is resident."""
    if m.rule == LRU:
        _to_newest(m, expert)


@inlined
def loaded(m: Any, expert: int) -> None:
    """``expert`` was given a slot; one that a call already needed keeps its place."""
    if not slot_at(m.slots, expert).ranked:
        if _by_rank(m):
            _rank(m, expert)
        elif m.rule == SCORED:
            _note(m, expert)
        else:
            _to_newest(m, expert)


@inlined
def evicted(m: Any, expert: int) -> None:
    """``expert`` left its slot."""
    slot = slot_at(m.slots, expert)
    if slot.ranked and not _by_rank(m) and m.rule != SCORED:
        _unlink(m, expert)
    if m.rule == LFU or m.rule == LFU_MFU or m.rule == SCORE_LFU or m.rule == LFRU or m.rule == LEAST_STALE:
        slot.uses = 0
    slot.ranked = 0


@inner
def valued(m: Any, first: int, last: int) -> None:
    """The plan's values ``first`` to ``last`` come into force."""
    if not _by_value(m):
        return
    for i in range(first, last):
        new = valued_at(m.valued, i)
        for k in range(new.count):
            slot, value = slot_at(m.slots, new.expert + k), number_at(m.table, new.row + k).n
            if m.rule == RECENT_SCORE:
                value = (slot.value + value) // 2
            if slot.value != value:
                slot.value = value
                if slot.ranked:
                    slot.rank = _worth(m, slot)
                    _settle(m, new.expert + k)


@inlined
def may_leave(m: Any, expert: int) -> None:
    """``expert`` is resident and no longer pinned, or wanted by other requests than before."""
    if _by_rank(m):
        slot = slot_at(m.slots, expert)
        push(_heap(m, slot.group, slot.wanted), expert, slot.rank, slot.tie)
    elif m.rule == SCORED:
        byte_at(m.leaves, expert).n = 1 + slot_at(m.slots, expert).wanted


@inlined
def must_stay(m: Any, expert: int) -> None:
    """Undo ``may_leave``."""
    if _by_rank(m):
        slot = slot_at(m.slots, expert)
        remove(_heap(m, slot.group, slot.wanted), expert)
    elif m.rule == SCORED:
        byte_at(m.leaves, expert).n = 0


@inlined
def first_to_leave(m: Any, own: int, wanted: int, demand: bool) -> int:
    """Who goes first of those that may leave for an expert of group ``own``, wanted or not. There must be one."""
    return _first_of_layers(m, own, wanted, demand) if m.shared else _first_of(m, own, wanted, demand)


@inner
def _first_of_layers(m: Any, own: int, wanted: int, demand: bool) -> int:
    """The first of the layer that holds most beyond its share, of those with anybody who may leave."""
    first, most = NOBODY, 0
    for layer in range(m.n_layers - 1, -1, -1):
        group = group_at(m.groups, layer)
        beyond = group.held - group.share + (1 if layer == own else 0)
        if first == NOBODY or beyond > most:
            expert = _first_of(m, layer, wanted, demand)
            if expert != NOBODY:
                first, most = expert, beyond
    return first


@inner
def _first_of(m: Any, group: int, wanted: int, demand: bool) -> int:
    """Who goes first of a group; NOBODY where nobody may leave."""
    if _by_rank(m):
        heap = _heap(m, group, wanted)
        if heap.size == 0:
            return NOBODY
        return largest(heap).item if m.rule == LFU_MFU and not demand else top(heap).item
    if m.rule == SCORED:
        return _of_least_worth(m, group, wanted)
    expert = group_at(m.groups, group).oldest
    while expert != NOBODY:
        slot = slot_at(m.slots, expert)
        if slot.state == RESIDENT and not slot.pinned and slot.wanted == wanted:
            return expert
        expert = slot.newer
    return NOBODY


@inner
def share_out(m: Any, row: int) -> None:
    """Let each layer have as many slots from now on as ``row`` of the plan's shares says."""
    for layer in range(m.n_layers):
        group_at(m.groups, layer).share = number_at(m.share_table, row * m.n_layers + layer).n


# -- by rank ---------------------------------------------------------------------------------------------------------


@inlined
def _by_rank(m: Any) -> bool:
    return m.rule != LRU and m.rule != FIFO and m.rule != SCORED


@inlined
def _heap(m: Any, group: int, wanted: int) -> Any:
    return heap_at(m.leaving, 2 * group + wanted)


@inner
def _rank(m: Any, expert: int) -> None:
    """Give ``expert`` its place by what is known now."""
    slot = slot_at(m.slots, expert)
    if m.rule == NEXT_USE:
        slot.rank, slot.tie = -slot.uses, expert
    else:
        group = group_at(m.groups, slot.group)
        group.ticks += 1
        slot.tie = group.ticks
        slot.rank = _worth(m, slot) if _by_value(m) else slot.uses
        if m.rule == LFRU:
            slot.rank *= slot.tie
        elif m.rule == LEAST_STALE:
            slot.rank = 1 - slot.uses
            slot.tie *= 1 - 2 * slot.uses
    slot.ranked = 1
    _settle(m, expert)


@inner
def _in_pass(m: Any, expert: int) -> None:
    """A use of ``expert``, for the rules that know passes: one begins where numbers rise no more."""
    slot = slot_at(m.slots, expert)
    group = group_at(m.groups, slot.group)
    begins = expert <= group.last
    group.last = expert
    group.passes += begins
    if m.rule == DECAYED_LFU:
        fresh = len(ADDED) + group.passes * OCTAVE // HALF
        apart = abs(fresh - slot.uses)
        slot.uses = max(fresh, slot.uses) + (ADDED[apart] if apart < len(ADDED) else 0)
        return
    if begins:
        _grow_stale(m, slot.group)
    slot.uses = 1


@inner
def _grow_stale(m: Any, group: int) -> None:
    """What the pass before has used is no longer the first to leave."""
    for expert in range(m.n_slots):
        slot = slot_at(m.slots, expert)
        if slot.group == group and slot.uses:
            slot.uses = 0
            if slot.ranked:
                slot.rank, slot.tie = 1, -slot.tie
                _settle(m, expert)


@inlined
def _by_value(m: Any) -> bool:
    return m.rule == SCORE or m.rule == RECENT_SCORE or m.rule == SCORE_LFU or m.rule == SCORE_COUNT


@inlined
def _worth(m: Any, slot: Any) -> int:
    if m.rule == SCORE_COUNT:
        return slot.value * COUNTS + slot.uses
    return slot.value * max(1, slot.uses) if m.rule == SCORE_LFU else slot.value


@inner
def _settle(m: Any, expert: int) -> None:
    """Move an expert that may leave to where its new rank puts it."""
    slot = slot_at(m.slots, expert)
    heap = _heap(m, slot.group, slot.wanted)
    if contains(heap, expert):
        remove(heap, expert)
        push(heap, expert, slot.rank, slot.tie)


# -- by worth --------------------------------------------------------------------------------------------------------


@inlined
def _note(m: Any, expert: int) -> None:
    """A use of ``expert``, or its loading, which breaks ties."""
    slot = slot_at(m.slots, expert)
    group = group_at(m.groups, slot.group)
    group.ticks += 1
    slot.tie, slot.ranked = group.ticks, 1


@inner
def _of_least_worth(m: Any, group: int, wanted: int) -> int:
    """Whom a scorer would let go first of a group; NOBODY where nobody may leave."""
    refresh(m)
    first, least, tie = NOBODY, FOREVER, FOREVER
    for expert in range(m.n_slots):
        if byte_at(m.leaves, expert).n == 1 + wanted and number_at(m.worths, expert).n <= least:
            slot, worth = slot_at(m.slots, expert), number_at(m.worths, expert).n
            if slot.group == group and (worth < least or slot.tie < tie):
                first, least, tie = expert, worth, slot.tie
    return first


# -- by list ---------------------------------------------------------------------------------------------------------


@inlined
def _to_newest(m: Any, expert: int) -> None:
    """Put ``expert`` at the young end of its group's list."""
    slot = slot_at(m.slots, expert)
    group = group_at(m.groups, slot.group)
    if group.newest == expert:
        return
    if slot.ranked:
        _unlink(m, expert)
    slot.ranked = 1
    slot.older, slot.newer = group.newest, NOBODY
    if group.newest == NOBODY:
        group.oldest = expert
    else:
        slot_at(m.slots, group.newest).newer = expert
    group.newest = expert


@inlined
def _unlink(m: Any, expert: int) -> None:
    slot = slot_at(m.slots, expert)
    group = group_at(m.groups, slot.group)
    if slot.older == NOBODY:
        group.oldest = slot.newer
    else:
        slot_at(m.slots, slot.older).newer = slot.newer
    if slot.newer == NOBODY:
        group.newest = slot.older
    else:
        slot_at(m.slots, slot.newer).older = slot.older
