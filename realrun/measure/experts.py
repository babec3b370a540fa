"""An expert's FFN against tokens, launched kernel by kernel and as a CUDA graph, for the dimensions of a model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from realrun.measure.machine import Machine, Timing
from sim.model import ModelSpec

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, order=True)
class Ffn:
    """Dimensions of one FFN in bf16: ``matrices`` of ``hidden x width``, 3 with a gate, 2 without."""

    hidden: int
    width: int
    matrices: int

    @property
    def parameters(self) -> int:
        """Weights."""
        return self.hidden * self.width * self.matrices

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return 2 * self.parameters


def ffns(models: Iterable[ModelSpec]) -> list[Ffn]:
    """The distinct FFNs of ``models``: routed experts, shared experts, dense layers."""
    found = set()
    for model in models:
        for width in (model.expert_ffn, model.shared_ffn, model.dense_ffn):
            if width:
                found.add(Ffn(model.hidden, width, model.expert_matrices))
    return sorted(found)


def ffn_times(machine: Machine, ffn: Ffn, graph: bool, rows: Iterable[int] = ROWS) -> dict[int, Timing]:
    """Time of one FFN over each number of rows, weights not in any cache."""
    experts = [_expert(machine, ffn) for _ in range(machine.copies(ffn.bytes))]
    times = {}
    for count in rows:
        tokens = machine.random(count, ffn.hidden, scale=1.0)
        work = [_ffn(machine, tokens, weights) for weights in experts]
        if graph:
            work = [machine.graph(one) for one in work[: max(1, min(len(work), 16))]]
        times[count] = machine.time(*work)
    return times


def _expert(machine: Machine, ffn: Ffn) -> list[Any]:
    return [machine.random(ffn.width, ffn.hidden) for _ in range(ffn.matrices - 1)] + [
        machine.random(ffn.hidden, ffn.width)
    ]


def _ffn(machine: Machine, tokens: Any, weights: list[Any]) -> Callable[[], Any]:
    functional = machine.torch.nn.functional
    if len(weights) == 3:
        gate, up, down = weights
        return lambda: functional.linear(
            functional.silu(functional.linear(tokens, gate)) * functional.linear(tokens, up), down
        )
    up, down = weights
    return lambda: functional.linear(functional.relu(functional.linear(tokens, up)), down)
