"""Triton kernels for experts that serve a few rows each: matrix-vector products from scattered slots, one a row.

Which slot, pair and row an expert has is packed into one 64-bit argument each, so nothing is uploaded. Every program
reads rows of one expert's matrix once and keeps its sums in float32; the floor is the experts' bytes over memory
bandwidth.
"""

import torch
import triton
import triton.language as tl

from realrun.device.triton_launch import Direct
from realrun.engine.portions import AT_ONCE

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


class Batched:
    """Both kernels over the slots ``weights`` (S, n) bf16 of one run."""

    def __init__(self, weights, hidden, inner, gated):  # type: ignore[no-untyped-def]
        self._weights, self._between = weights, weights.new_empty(AT_ONCE, inner)
        self._hidden, self._inner, self._gated = hidden, inner, gated
        self._begin = hidden * inner * (2 if gated else 1)
        self._into, self._out = Direct(into_kernel), Direct(out_kernel)
        self.direct = None
        """Whether kernels are launched past Triton's dispatch; None until that has been tried."""

    def launch(self, states, outputs, single):  # type: ignore[no-untyped-def]
        """Compute up to 8 experts given as (slot, pair, row): ``states`` (rows, H), ``outputs`` (P, H), both bf16."""
        if self.direct is None and not torch.cuda.is_current_stream_capturing():
            self.direct = self._same_both_ways()
        aligned = self.direct and not (states.data_ptr() | outputs.data_ptr()) & 15
        (self._launch_direct if aligned else self._dispatch)(self._weights, states, outputs, single)

    def _dispatch(self, weights, states, outputs, single):  # type: ignore[no-untyped-def]
        packed, stride, between = _pack(single), weights.stride(0), self._between
        shape = {"HIDDEN": self._hidden, "INNER": self._inner}
        sizes = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": 4}
        self._into.dispatched(
            (-(-self._inner // _ROWS), len(single)), (weights, states, between, stride, *packed),
            **shape, GATED=self._gated, **sizes,
        )  # fmt: skip
        self._out.dispatched(
            (-(-self._hidden // _ROWS), len(single)), (weights, between, outputs, stride, self._begin, *packed),
            **shape, **sizes,
        )  # fmt: skip

    def _launch_direct(self, weights, states, outputs, single):  # type: ignore[no-untyped-def]
        packed, stride, slots, between = _pack(single), weights.stride(0), weights.data_ptr(), self._between.data_ptr()
        stream = torch.cuda.current_stream(weights.device).cuda_stream
        grid = (-(-self._inner // _ROWS), len(single))
        self._into.launch(grid, stream, (slots, states.data_ptr(), between, stride, *packed))
        grid = (-(-self._hidden // _ROWS), len(single))
        self._out.launch(grid, stream, (slots, between, outputs.data_ptr(), stride, self._begin, *packed))

    def _same_both_ways(self):  # type: ignore[no-untyped-def]
        """Whether launching directly writes what Triton's dispatch writes, tried on an expert of random weights."""
        try:
            weights = self._weights.new_empty(1, self._weights.shape[1]).normal_(0.0, self._hidden**-0.5)
        except torch.OutOfMemoryError:
            return False
        states = weights.new_empty(2, self._hidden).normal_()
        if any(tensor.data_ptr() & 15 for tensor in (self._weights, self._between, weights, states)):
            return False
        found: list[torch.Tensor] = []
        for way in (self._dispatch, self._launch_direct):
            outputs = states.new_full((2, self._hidden), torch.nan)
            try:
                way(weights, states, outputs, [(0, 1, 0), (0, 0, 1)])
            except Exception:  # whatever another version of Triton makes of it
                if found:
                    return False
                raise
            found.append(outputs)
        return torch.equal(*found)  # not where a number is left out: NaN equals nothing


def _pack(single):  # type: ignore[no-untyped-def]
    packed = [_TOP | slot << 32 | pair << 16 | row for slot, pair, row in single]
    return packed + [packed[0]] * (AT_ONCE - len(packed))
