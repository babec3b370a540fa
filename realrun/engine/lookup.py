"""The look-up of a prediction table on the GPU: the nearest entries of one query in one or several tables at once.

Entries and query are bf16 and normalised by the caller, so the score of an entry is its inner product with the query,
summed in float32. Three ways of the same thing:

* `eager`: one matrix-vector product and a top-k, each launched from Python;
* `graphed`: the same as a CUDA graph;
* `Fused`: Triton kernels that read each entry once and choose among the blocks' maxima, one or two under a CUDA graph.
  The floor is the bytes of the tables over memory bandwidth.

All give scores (T, k) float32, best first, and entries (T, k) int64 within their own table.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ground.errors import InputError
from realrun.device.cuda_graph import captured

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


def graphed(tables: "torch.Tensor", query: "torch.Tensor", k: int) -> Nearest:
    """`eager` as a CUDA graph: reads ``query`` in place, gives the same two tensors each time."""
    return captured(lambda: eager(tables, query, k))


class Fused:
    """Triton kernels for one set of tables.

    Args:
        tables: (T, N, D) bf16 on a GPU.
        k: how many entries.
        one: one kernel whose last program reduces the rest, instead of two kernels.
        block: entries that one program scores, a power of two.
        step: columns that it reads at a time, a power of two.

    The query is read from ``query`` (D,), which the caller fills; results lie in ``best`` and ``entry``.
    """

    def __init__(
        self, tables: "torch.Tensor", k: int, *, one: bool = True, block: int = 16, step: int = 512, warps: int = 4
    ) -> None:
        import torch

        count, entries, dims = tables.shape
        self.tables, self.k, self.one, self.warps = tables, k, one, warps
        self.query = torch.zeros(dims, dtype=tables.dtype, device=tables.device)
        check(tables, self.query, k)
        self.blocks = -(-entries // block)

        def empty(*shape: int, dtype: "torch.dtype") -> "torch.Tensor":
            return torch.empty(shape, dtype=dtype, device=tables.device)

        self._keys = empty(count, entries, dtype=torch.int64)
        self._maxima = empty(count, self.blocks, dtype=torch.int64)
        self._arrived = torch.zeros(count, dtype=torch.int32, device=tables.device)
        self.best = empty(count, k, dtype=torch.float32)
        self.entry = empty(count, k, dtype=torch.int64)
        self._scoring = {"DIMS": dims, "BLOCK": block, "STEP": step}
        self._choosing = {"K": k, "ROOM": _power_of_two(k), "BLOCKS": _power_of_two(self.blocks)}

    def launch(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Run on the current stream."""
        from realrun.engine.lookup_kernels import look_up, reduce_blocks, score_blocks

        count, entries, _ = self.tables.shape
        scored = (self._keys, self._maxima)
        sizes = (entries, self.blocks)
        grid = (self.blocks, count)
        if self.one:
            look_up[grid](
                self.tables, self.query, *scored, self._arrived, self.best, self.entry, *sizes,
                **self._scoring, **self._choosing, num_warps=self.warps,
            )  # fmt: skip
        else:
            score_blocks[grid](self.tables, self.query, *scored, *sizes, **self._scoring, num_warps=self.warps)
            block = self._scoring["BLOCK"]
            reduce_blocks[(count,)](*scored, self.best, self.entry, *sizes, **self._choosing, BLOCK=block, num_warps=1)
        return self.best, self.entry

    def graph(self) -> Nearest:
        """As a CUDA graph."""
        return captured(self.launch)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
