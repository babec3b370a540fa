# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the look-up; imported only where there is a GPU.

A score and its entry are one 64-bit key: the float's bits, made to sort as an integer, above the entry's number counted
from the end. Keys are distinct, the largest is the nearest entry, ties go to the smaller number.

Only the ``k`` blocks with the largest maxima can hold one of the ``k`` largest entries: an entry of another block has
``k`` larger ones before it. So the last stage looks at the blocks' maxima, then at the entries of ``k`` blocks.
"""

import triton
import triton.language as tl


@triton.jit
def _key(score, entry):
    bits = score.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - entry).to(tl.int64)


@triton.jit
def _score(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _entry(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def score_blocks(
    tables, query, keys, maxima, entries, blocks, DIMS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Score the entries of one block of one table; store their keys and the largest of them. Grid (blocks, tables)."""
    none: tl.constexpr = -(2**63)
    block, table = tl.program_id(0), tl.program_id(1)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, STEP)
    there = entry < entries
    rows = tables + (table.to(tl.int64) * entries + entry)[:, None] * DIMS + column[None, :]
    total = tl.zeros((BLOCK, STEP), tl.float32)
    for start in tl.range(0, DIMS, STEP):
        if DIMS % STEP == 0:
            tile = tl.load(rows + start, mask=there[:, None], other=0.0, eviction_policy="evict_first")
            part = tl.load(query + start + column)
        else:
            inside = (start + column) < DIMS
            tile = tl.load(rows + start, mask=there[:, None] & inside[None, :], other=0.0)
            part = tl.load(query + start + column, mask=inside, other=0.0)
        total += tile.to(tl.float32) * part.to(tl.float32)[None, :]
    key = tl.where(there, _key(tl.sum(total, 1), entry), none)
    tl.store(keys + table * entries + entry, key, mask=there)
    tl.store(maxima + table * blocks + block, tl.max(key, 0))


@triton.jit
def reduce_blocks(
    keys, maxima, best, found, entries, blocks, K: tl.constexpr, ROOM: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The ``K`` largest keys of one table, from all blocks' maxima and the keys of the best blocks. Grid (1, tables).

    ``ROOM`` and ``BLOCKS`` are powers of two, at least ``K`` and the number of blocks.
    """
    none: tl.constexpr = -(2**63)
    table = tl.program_id(1)
    index = tl.arange(0, BLOCKS)
    left = tl.load(maxima + table * blocks + index, mask=index < blocks, other=none, cache_modifier=".cg")
    place = tl.arange(0, ROOM)
    chosen = tl.full((ROOM,), -1, tl.int64)
    for i in tl.static_range(K):
        top = tl.max(left, 0)
        chosen = tl.where((place == i) & (top > none), _entry(top) // BLOCK, chosen)
        left = tl.where(left == top, none, left)
    entry = chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (chosen[:, None] >= 0) & (entry < entries)
    those = tl.load(keys + table * entries + entry, mask=there, other=none, cache_modifier=".cg")
    last = tl.reshape(those, (ROOM * BLOCK,))
    for i in tl.static_range(K):
        top = tl.max(last, 0)
        tl.store(best + table * K + i, _score(top))
        tl.store(found + table * K + i, _entry(top))
        last = tl.where(last == top, none, last)


@triton.jit
def look_up(
    tables, query, keys, maxima, arrived, best, found, entries, blocks, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, K: tl.constexpr, ROOM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Both stages in one kernel, grid (blocks, tables): the program that arrives last at its table reduces it.

    ``arrived`` (T,) int32 counts arrivals; it is 0 before and after.
    """
    score_blocks(tables, query, keys, maxima, entries, blocks, DIMS, BLOCK, STEP)
    tl.debug_barrier()  # all threads have stored before one of them says so
    table = tl.program_id(1)
    before = tl.atomic_add(arrived + table, 1, sem="acq_rel", scope="gpu")
    if before == blocks - 1:
        tl.store(arrived + table, 0)
        tl.debug_barrier()
        reduce_blocks(keys, maxima, best, found, entries, blocks, K, ROOM, BLOCKS, BLOCK)
