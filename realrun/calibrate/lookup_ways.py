"""DoMoE's look-up, two tables at once, in every way there is: is it right, and how near to the memory's own time?"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from realrun.calibrate.machine import Machine
from realrun.calibrate.memory import bandwidth
from realrun.calibrate.timing import Timing
from realrun.engine.lookup import Fused, eager

if TYPE_CHECKING:
    import torch

TABLES, ENTRIES, DIMS, NEAREST = 2, 2000, 4096, 8
"""Two tables of 2,000 entries of Mixtral's hidden size, the 8 nearest of each."""

SHAPES = ((4, 1024, 4), (8, 512, 4), (8, 1024, 4), (8, 1024, 8), (16, 256, 8), (16, 512, 4))
"""Entries of a block, columns at a time and warps of the kernels that are tried."""


@dataclass(frozen=True)
class LookupWay:
    """One way of looking up. The tables are used in turn, so that none is found in the device's cache."""

    name: str
    alone: Timing
    """One look-up on an idle device."""
    row: Timing | None
    """One of many within a CUDA graph."""
    wrong: float
    """The largest error of a score relative to the largest score, or infinity where an entry is another one than
    float64 finds and not a tie within that error."""


def ways(
    machine: Machine, tables: int = TABLES, entries: int = ENTRIES, dims: int = DIMS, k: int = NEAREST
) -> tuple[list[LookupWay], float]:
    """Every way, and the nanoseconds that the tables' bytes take at the bandwidth that reading a matrix reaches."""
    sets = [machine.random(tables, entries, dims) for _ in range(machine.copies(2 * tables * entries * dims))]
    query = machine.random(dims)
    plain: list[Callable[[], Any]] = [partial(eager, s, query, k) for s in sets]
    found = [_way(machine, "torch, eager", plain, sets, query, k)]
    if machine.cuda:
        graphs = [machine.graph(one) for one in plain]
        found.append(_way(machine, "torch, CUDA graph", graphs, sets, query, k, row=False))
        for one in (True, False):
            for block, step, warps in SHAPES:
                if step <= dims:
                    name = f"Triton, {'one kernel' if one else 'two kernels'}, {block} x {step}, {warps} warps"
                    fused = [Fused(s, query, k, one=one, block=block, step=step, warps=warps).launch for s in sets]
                    found.append(_way(machine, name, fused, sets, query, k))
    rate = bandwidth(machine, 2**31 if machine.cuda else 2**22).read
    return found, 2 * tables * entries * dims / rate


def _way(
    machine: Machine, name: str, work: list[Callable[[], Any]], sets: list[Any], query: Any, k: int, row: bool = True
) -> LookupWay:
    wrong = max(error(one(), tables, query, k) for one, tables in zip(work, sets, strict=True))
    alone = work if name.startswith("torch") else [machine.graph(one) for one in work]

    def in_a_row() -> None:
        for one in work * 4:
            one()

    each = machine.time(machine.graph(in_a_row)).over(4 * len(work)) if row and machine.cuda else None
    return LookupWay(name, machine.time(*alone, alone=True), each, wrong)


def error(result: "tuple[torch.Tensor, torch.Tensor]", tables: "torch.Tensor", query: "torch.Tensor", k: int) -> float:
    """How far ``result`` is from the look-up in float64, see `LookupWay.wrong`."""
    import torch

    scores = tables.double() @ query.double()
    best = scores.topk(k, dim=1).values
    given, entry = result
    if entry.sort(dim=1).values.diff(dim=1).eq(0).any():
        return float("inf")
    # Of each entry that was given the true score must be what stands in its place: then it is right, or ties.
    true = scores.gather(1, entry)
    largest = scores.abs().max().clamp(min=1e-30)
    missed = torch.maximum((given.double() - true).abs().max(), (true - best).abs().max()) / largest
    return float(missed) if torch.isfinite(missed) else float("inf")
