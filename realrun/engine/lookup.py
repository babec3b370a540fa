"""The look-up of a prediction table on the GPU: the nearest entries of one query in one or several tables at once.

Entries and query are bf16 and normalised by the caller, so the score of an entry is its inner product with the query,
summed in float32. Two ways of the same thing:

* `eager`: one matrix-vector product and a top-k, each launched from Python;
* `Fused`: Triton kernels that read each entry once and choose among the blocks' maxima, one or two under a CUDA graph.
  The floor is the bytes of the tables over memory bandwidth.

Both give scores (T, k) float32, best first, and entries (T, k) int64 within their own table.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ground.errors import InputError
from realrun.device.cuda_graph import captured
from realrun.device.torch_device import the_torch

if TYPE_CHECKING:
    import torch

Nearest = Callable[[], "tuple[torch.Tensor, torch.Tensor]"]


def eager(tables: "torch.Tensor", query: "torch.Tensor", k: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The ``k`` entries of each of ``tables`` (T, N, D) nearest to ``query`` (D,).

    On the CPU products are taken in float32. Raises InputError for shapes that do not fit.
    """
    check(tables, query, k)
    flat = tables.view(-1, tables.shape[-1])
    scores = flat @ query if tables.is_cuda else flat.float() @ query.float()
    best, entry = scores.view(tables.shape[:2]).topk(k, dim=1)
    return best.float(), entry


def check(tables: "torch.Tensor", query: "torch.Tensor", k: int) -> None:
    """Raise InputError unless tables are (T, N, D), contiguous, the query (D,), and there are ``k`` entries."""
    if tables.ndim != 3 or query.shape != tables.shape[2:] or not tables.is_contiguous():
        raise InputError(
            f"look-up: tables {tuple(tables.shape)}, query {tuple(query.shape)}; expected contiguous (T, N, D) and (D,)"
        )
    if not 1 <= k <= tables.shape[1]:
        raise InputError(f"look-up: {k} nearest of {tables.shape[1]} entries; expected 1 to {tables.shape[1]}")


class Fused:
    """Triton kernels for one set of tables.

    Args:
        tables: (T, N, D) bf16 on a GPU.
        query: (D,), which is copied.
        k: how many entries.
        one: one kernel whose last program reduces the rest, instead of two kernels.
        block: entries that one program scores, a power of two.
        step: columns that it reads at a time, a power of two.
    """

    def __init__(
        self, tables: "torch.Tensor", query: "torch.Tensor", k: int, *,
        one: bool = True, block: int = 16, step: int = 512, warps: int = 4,
    ) -> None:  # fmt: skip
        check(tables, query, k)
        count, entries, dims = tables.shape
        self._blocks = -(-entries // block)
        self._tables, self._query, self._one, self._warps = tables, query.clone(), one, warps
        torch = the_torch()
        self._keys = tables.new_empty(count, entries, dtype=torch.int64)
        self._maxima = tables.new_empty(count, self._blocks, dtype=torch.int64)
        self._arrived = tables.new_zeros(count, dtype=torch.int32)
        self._best = tables.new_empty(count, k, dtype=torch.float32)
        self._entry = tables.new_empty(count, k, dtype=torch.int64)
        self._scoring = {"DIMS": dims, "BLOCK": block, "STEP": step}
        self._choosing = {"K": k, "ROOM": _power_of_two(k), "BLOCKS": _power_of_two(self._blocks)}

    def launch(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Run on the current stream."""
        from realrun.engine.lookup_kernels import look_up, reduce_blocks, score_blocks

        count, entries, _ = self._tables.shape
        given, scored, sizes = (self._tables, self._query), (self._keys, self._maxima), (entries, self._blocks)
        found, grid = (self._best, self._entry), (self._blocks, count)
        if self._one:
            look_up[grid](
                *given, *scored, self._arrived, *found, *sizes, **self._scoring, **self._choosing, num_warps=self._warps
            )
        else:
            score_blocks[grid](*given, *scored, *sizes, **self._scoring, num_warps=self._warps)
            block = self._scoring["BLOCK"]
            reduce_blocks[1, count](*scored, *found, *sizes, **self._choosing, BLOCK=block, num_warps=1)
        return found

    def graph(self) -> Nearest:
        """As a CUDA graph."""
        return captured(self.launch)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
