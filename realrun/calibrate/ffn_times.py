"""An FFN against its rows, as a run computes it: routed experts from their slots, shared ones launched one kernel after
the other, those of dense layers within a CUDA graph.

Routed experts that serve one row each are computed together, so their time is that of a token's ``k`` at once over k.
Those of more rows, a prompt's, follow one another. A run launches either once it has seen the route, so launching is
part of their time, as far as kernels do not hide it. Experts that are waited for are launched meanwhile, and shared
ones while the layer before them computes: theirs is the device's time alone. The former are timed after a rest each,
since a device that was idle is slower to begin.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

from ground.errors import InputError
from realrun.calibrate.machine import Machine
from realrun.calibrate.timing import Timing, Work
from realrun.engine.experts import Experts, Rows
from realrun.engine.layers import feed_forward
from realrun.engine.loop import undisturbed
from realrun.engine.portions import AT_ONCE
from traces.models.spec import ModelSpec

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
COPY_SECONDS = 1.5e-4
"""For which the device rests before an expert that is waited for: a copy of 9 MB over PCIe 5 x16."""

Use = Literal["routed", "shared", "dense"]


@dataclass(frozen=True, order=True)
class Ffn:
    """Dimensions of one FFN in bf16: ``matrices`` of ``hidden x width``, 3 with a gate, 2 without."""

    hidden: int
    width: int
    matrices: int

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return 2 * self.hidden * self.width * self.matrices


@dataclass(frozen=True)
class UsedFfn:
    """What an FFN is used for first, routed before shared before dense, and by which model."""

    ffn: Ffn
    use: Use
    model: ModelSpec


def ffns(models: Iterable[ModelSpec]) -> list[UsedFfn]:
    """The distinct FFNs of ``models``. Routed experts that are not stored in bf16 are left out."""
    models, found = list(models), dict[Ffn, UsedFfn]()
    uses: tuple[tuple[Use, str], ...] = (("routed", "expert_ffn"), ("shared", "shared_ffn"), ("dense", "dense_ffn"))
    for use, width in uses:
        for model in models:
            ffn = Ffn(model.hidden, getattr(model, width), model.expert_matrices)
            bf16 = set(model.expert_bytes) == {ffn.bytes} if use == "routed" else model.in_bf16
            if ffn.width and bf16:
                found.setdefault(ffn, UsedFfn(ffn, use, model))
    return sorted(found.values(), key=lambda used: used.ffn)


@dataclass(frozen=True)
class FfnTimes:
    """Of one FFN by rows: what is charged, the same where a routed expert of several rows is waited for, and what else
    was timed, by name, for a person.
    """

    charged: dict[int, Timing]
    waited: dict[int, Timing]
    others: dict[str, dict[int, Timing]]


def ffn_times(machine: Machine, uses: Iterable[UsedFfn], rows: Sequence[int] = ROWS) -> dict[Ffn, FfnTimes]:
    """Time of each FFN over each number of rows, weights not in any cache of the device.

    For comparison, at the first of ``rows``, the same as plain products, and a routed expert alone.
    """
    runs: dict[How, dict[tuple[Ffn, str, int], Runs]] = {BUSY: {}, HIDDEN: {}, RESTING: {}}
    for used in uses:
        for how, name, by_rows in _ways(machine, used, rows):
            runs[how] |= {(used.ffn, name, count): each for count, each in by_rows.items()}
    found: dict[Ffn, dict[str, dict[int, Timing]]] = {}
    with undisturbed():
        for (asleep, rest), each in runs.items():
            times = machine.times({key: one.work for key, one in each.items()}, asleep=asleep, rest=rest)
            for (ffn, name, count), taken in times.items():
                found.setdefault(ffn, {}).setdefault(name, {})[count] = taken.over(each[ffn, name, count].parts)
    return {ffn: FfnTimes(ways.pop("charged"), ways.pop("waited", {}), ways) for ffn, ways in found.items()}


How = tuple[bool, float]
"""Whether runs are launched while the device sleeps, and for how many seconds it rests before each."""
BUSY, HIDDEN, RESTING = (False, 0.0), (True, 0.0), (True, COPY_SECONDS)


@dataclass(frozen=True)
class Runs:
    """What is to be timed of one FFN at one size: ``work``, each of which computes ``parts`` of them."""

    work: Work
    parts: int = 1


def _ways(machine: Machine, used: UsedFfn, rows: Sequence[int]) -> Iterator[tuple[How, str, dict[int, Runs]]]:
    """Each way of timing one FFN: how, under which name, and what by rows."""
    if used.use == "routed":
        yield BUSY, "charged", routed_runs(machine, used.model, rows)
        yield RESTING, "waited", routed_runs(machine, used.model, [count for count in rows if count > 1], at_once=1)
    else:
        plain, shared = plain_runs(machine, used.ffn, used.use == "dense", rows), used.use == "shared"
        yield HIDDEN if shared else BUSY, "charged", plain
        if shared:
            yield BUSY, "launched", plain
    yield BUSY, "eager", plain_runs(machine, used.ffn, False, rows[:1])
    yield BUSY, "graph", plain_runs(machine, used.ffn, True, rows[:1])
    if used.use == "routed":
        yield BUSY, "one_alone", routed_runs(machine, used.model, rows[:1], at_once=1)


def routed_runs(machine: Machine, model: ModelSpec, rows: Iterable[int], at_once: int | None = None) -> dict[int, Runs]:
    """Routed experts of ``model``: ``at_once`` of them, by default k at one row, and as many as a run launches without
    a look at the link at more.
    """
    size, most = 2 * model.expert_parameters, at_once or max(model.top_k, AT_ONCE)
    count = max(most, machine.copies(size))
    slots = _slots(machine, count, size)
    experts = Experts(model, cast(Any, SimpleNamespace(bytes=slots, n_slots=count)))
    runs = {}
    for each in rows:
        group = at_once or (model.top_k if each == 1 else AT_ONCE)
        states = machine.random(each, model.hidden, scale=1.0)
        outputs = machine.random(group * each + 1, model.hidden)
        work = [_routed(machine, experts, states, outputs, list(range(first, first + group)), each)
                for first in range(0, count - group + 1, group)]  # fmt: skip
        runs[each] = Runs(work, group)
    return runs


def _slots(machine: Machine, count: int, size: int) -> Any:
    try:
        return machine.random(count, size // 2).view(machine.torch.uint8)
    except RuntimeError as failed:
        raise InputError(f"{count} experts of {size:,} bytes do not fit on the device: {failed}") from None


def _routed(
    machine: Machine, experts: Experts, states: Any, outputs: Any, slots: list[int], rows: int
) -> Callable[[], None]:
    """The experts in ``slots``, each of which serves all rows."""
    pairs = [(rows * i, rows * (i + 1)) for i in range(len(slots))]
    rows_of = [*range(rows)] * len(slots)
    take = Rows(rows_of, None if rows == 1 else machine.torch.tensor(rows_of, device=machine.device))
    return lambda: experts.launch(states, outputs, slots, pairs, take)


def plain_runs(machine: Machine, ffn: Ffn, graph: bool, rows: Iterable[int]) -> dict[int, Runs]:
    """One FFN as two or three products, launched from Python or as a CUDA graph."""
    experts = [
        (machine.random((ffn.matrices - 1) * ffn.width, ffn.hidden), machine.random(ffn.hidden, ffn.width))
        for _ in range(min(16, machine.copies(ffn.bytes)))
    ]
    runs = {}
    for count in rows:
        tokens = machine.random(count, ffn.hidden, scale=1.0)
        work = [partial(feed_forward, tokens, *weights) for weights in experts]
        runs[count] = Runs([machine.graph(one) for one in work] if graph else work)
    return runs
