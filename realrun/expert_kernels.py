"""Triton kernels for experts that serve one row each: matrix-vector products from scattered slots.

Which slot, pair and row an expert has is packed into one 64-bit argument each, so nothing is uploaded. Every program
reads rows of one expert's matrix once and keeps its sums in float32; the floor is the experts' bytes over memory
bandwidth.
"""

import triton
import triton.language as tl

_TOP = 1 << 62  # keeps every packed number 64 bits wide, whatever its parts
_ROWS = 4
_COLUMNS = 1024


@triton.jit
def _packed(which, p0, p1, p2, p3, p4, p5, p6, p7):  # type: ignore[no-untyped-def]
    low = tl.where(which == 0, p0, tl.where(which == 1, p1, tl.where(which == 2, p2, p3)))
    high = tl.where(which == 4, p4, tl.where(which == 5, p5, tl.where(which == 6, p6, p7)))
    return tl.where(which < 4, low, high)


@triton.jit(do_not_specialize=["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def into_kernel(  # type: ignore[no-untyped-def]
    weights, states, between, stride, p0, p1, p2, p3, p4, p5, p6, p7,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """between[i] = silu(G x) * (U x), or relu(U x), for expert i of the launch."""
    which = tl.program_id(1)
    packed = _packed(which, p0, p1, p2, p3, p4, p5, p6, p7)
    slot = (packed >> 32) & 0x3FFFFFFF
    row = packed & 0xFFFF
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = line < INNER
    matrix = weights + slot * stride + line.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, HIDDEN, COLUMNS):
        inside = (start + column) < HIDDEN
        mask = there[:, None] & inside[None, :]
        x = tl.load(states + row * HIDDEN + start + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        first += tl.load(matrix + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
        if GATED:
            up = matrix + INNER * HIDDEN + start
            second += tl.load(up, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
    gate = tl.sum(first, 1)
    if GATED:
        value = gate / (1.0 + tl.exp(-gate)) * tl.sum(second, 1)
    else:
        value = tl.maximum(gate, 0.0)
    tl.store(between + which * INNER + line, value.to(tl.bfloat16), mask=there)


@triton.jit(do_not_specialize=["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"])
def out_kernel(  # type: ignore[no-untyped-def]
    weights, between, outputs, stride, begin, p0, p1, p2, p3, p4, p5, p6, p7,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """outputs[pair of expert i] = D between[i]; the matrix begins ``begin`` numbers into the slot."""
    which = tl.program_id(1)
    packed = _packed(which, p0, p1, p2, p3, p4, p5, p6, p7)
    slot = (packed >> 32) & 0x3FFFFFFF
    pair = (packed >> 16) & 0xFFFF
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = line < HIDDEN
    matrix = weights + slot * stride + begin + line.to(tl.int64)[:, None] * INNER + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, INNER, COLUMNS):
        inside = (start + column) < INNER
        mask = there[:, None] & inside[None, :]
        x = tl.load(between + which * INNER + start + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total += tl.load(matrix + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) * x
    tl.store(outputs + pair * HIDDEN + line, tl.sum(total, 1).to(tl.bfloat16), mask=there)


def launch(weights, states, between, outputs, single, hidden, inner, gated):  # type: ignore[no-untyped-def]
    """Compute up to 8 experts given as (slot, pair, row), from slots ``weights`` (S, n) bf16.

    ``states`` (rows, H), ``between`` (8, F) for the kernels alone, ``outputs`` (P, H); all bf16.
    """
    packed = [_TOP | slot << 32 | pair << 16 | row for slot, pair, row in single]
    packed += [packed[0]] * (8 - len(packed))
    stride, count = weights.stride(0), len(single)
    into_kernel[(-(-inner // _ROWS), count)](
        weights, states, between, stride, *packed,
        HIDDEN=hidden, INNER=inner, GATED=gated, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    begin = hidden * inner * (2 if gated else 1)
    out_kernel[(-(-hidden // _ROWS), count)](
        weights, between, outputs, stride, begin, *packed,
        HIDDEN=hidden, INNER=inner, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
