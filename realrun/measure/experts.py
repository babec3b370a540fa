"""An FFN against its rows, as a run computes it: routed experts from their slots, shared ones launched one kernel after
the other, those of dense layers within a CUDA graph.

Routed experts that serve one row each are computed together, so their time is that of a token's ``k`` at once over k.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

from realrun.experts import Experts
from realrun.measure.machine import Machine, Timing
from sim.model import ModelSpec
from traces.errors import InputError

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Use = Literal["routed", "shared", "dense"]


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


@dataclass(frozen=True)
class Used:
    """What an FFN is used for first, routed before shared before dense, and by which model."""

    ffn: Ffn
    use: Use
    model: ModelSpec


def ffns(models: Iterable[ModelSpec]) -> list[Used]:
    """The distinct FFNs of ``models``. Routed experts that are not stored in bf16 are left out."""
    models, found = list(models), dict[Ffn, Used]()
    uses: tuple[tuple[Use, str], ...] = (("routed", "expert_ffn"), ("shared", "shared_ffn"), ("dense", "dense_ffn"))
    for use, width in uses:
        for model in models:
            ffn = Ffn(model.hidden, getattr(model, width), model.expert_matrices)
            bf16 = set(model.expert_bytes) == {ffn.bytes} if use == "routed" else model.weight_bytes == 2
            if ffn.width and bf16:
                found.setdefault(ffn, Used(ffn, use, model))
    return sorted(found.values(), key=lambda used: used.ffn)


def ffn_times(machine: Machine, used: Used, rows: Iterable[int] = ROWS) -> dict[int, Timing]:
    """Time of one FFN over each number of rows, weights not in any cache of the device."""
    if used.use == "routed":
        return routed_times(machine, used.model, rows)
    return plain_times(machine, used.ffn, used.use == "dense", rows)


def routed_times(
    machine: Machine, model: ModelSpec, rows: Iterable[int], together: int | None = None
) -> dict[int, Timing]:
    """Of one routed expert of ``model``; at one row the share of one of ``together`` (default: k) computed at once."""
    size, at_once = 2 * model.expert_parameters, together or model.top_k
    count = max(at_once, machine.copies(size) // at_once * at_once)
    slots = _slots(machine, count, size)
    experts = Experts(model, cast(Any, SimpleNamespace(bytes=slots, n_slots=count)))
    times = {}
    for each in rows:
        group = at_once if each == 1 else 1
        states = machine.random(1 if each == 1 else each, model.hidden, scale=1.0)
        outputs = machine.random(group * each + 1, model.hidden)
        work = [_routed(machine, experts, states, outputs, list(range(first, first + group)), each)
                for first in range(0, count, group)]  # fmt: skip
        taken = machine.time(*work)
        times[each] = taken.over(group)
    return times


def _slots(machine: Machine, count: int, size: int) -> Any:
    try:
        return machine.random(count, size // 2).view(machine.torch.uint8)
    except RuntimeError as failed:
        raise InputError(f"{count} experts of {size:,} bytes do not fit on the device: {failed}") from None


def _routed(
    machine: Machine, experts: Experts, states: Any, outputs: Any, slots: list[int], rows: int
) -> Callable[[], None]:
    """The experts in ``slots``: each serves the one row, or one of them serves all."""
    pairs = [(rows * i, rows * (i + 1)) for i in range(len(slots))]
    take = [0] * len(slots) if rows == 1 else machine.torch.arange(rows, device=machine.device)
    return lambda: experts.launch(states, outputs, slots, pairs, take)


def plain_times(machine: Machine, ffn: Ffn, graph: bool, rows: Iterable[int] = ROWS) -> dict[int, Timing]:
    """Of one FFN as two or three products, launched from Python or as a CUDA graph."""
    experts = [_weights(machine, ffn) for _ in range(min(16, machine.copies(ffn.bytes)))]
    times = {}
    for count in rows:
        tokens = machine.random(count, ffn.hidden, scale=1.0)
        work = [plain_ffn(machine, tokens, *weights) for weights in experts]
        times[count] = machine.time(*([machine.graph(one) for one in work] if graph else work))
    return times


def _weights(machine: Machine, ffn: Ffn) -> tuple[Any, Any]:
    return machine.random((ffn.matrices - 1) * ffn.width, ffn.hidden), machine.random(ffn.hidden, ffn.width)


def weights_of(numbers: Any, ffn: Ffn) -> tuple[Any, Any]:
    """The matrices of an FFN in a row of bf16 numbers: gate and up (or up alone) in one, then down."""
    first = ffn.hidden * ffn.width * (ffn.matrices - 1)
    return numbers[:first].view(-1, ffn.hidden), numbers[first:].view(ffn.hidden, ffn.width)


def plain_ffn(machine: Machine, tokens: Any, into: Any, out: Any) -> Callable[[], Any]:
    """An FFN on ``tokens`` as products, gated where ``into`` is twice as wide as ``out`` takes."""
    functional = machine.torch.nn.functional
    gated = into.shape[0] > out.shape[1]

    def run() -> Any:
        inner = functional.linear(tokens, into)
        if gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.relu(inner)
        return functional.linear(inner, out)

    return run
