"""What a run is held to, whichever engine executes it: slots, order of the link, pieces of a transfer."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import get_args

import numpy as np

from ground.errors import InputError
from ground.text import amount
from sim.plan import MOST_CHUNKS, Discipline, Plan, PlanError
from sim.run.host_costs import HostCosts, host_costs
from sim.schedules.pipeline import Preparation
from sim.workload import Workload
from traces.schema import PREFILL


class TooSmallError(InputError):
    """The cache cannot hold what a plan needs of it; a larger one could, so the policy is not at fault."""


@dataclass(frozen=True)
class Slots:
    """The GPU memory that experts may use: ``capacity`` bytes a pool, ``pool`` of each routed layer.

    Experts in ``reserved`` have a slot each beside these pools, which no other expert gets.
    """

    capacity: tuple[int, ...]
    pool: tuple[int, ...]
    reserved: tuple[int, ...] = ()
    shared: bool = False
    """Whether layers share one pool by shares that a plan gives them (``sim.shares``)."""


def split_slots(budget: int, expert_bytes: tuple[int, ...], per_layer: bool) -> Slots:
    """Share ``budget`` bytes: one pool, or a pool a layer, as even as whole experts allow (within one of each other).

    Raises TooSmallError if a pool could not hold one expert.
    """
    n_layers, largest = len(expert_bytes), max(expert_bytes)
    if budget < largest:
        raise TooSmallError(f"cache: {budget} bytes cannot hold one expert of {largest} bytes; give at least that")
    if not per_layer:
        return Slots((budget,), (0,) * n_layers)
    if len(set(expert_bytes)) == 1:
        slots, more = divmod(budget // largest, n_layers)
        capacity = tuple((slots + (layer < more)) * largest for layer in range(n_layers))
    else:
        capacity = (budget // n_layers,) * n_layers
    if min(capacity) < largest:
        raise TooSmallError(
            f"cache: {amount(budget)} split over {n_layers} routed layers leave a layer without room for one expert of "
            f"{amount(largest)}; give --cache {n_layers} (slots), which is {amount(n_layers * largest)}, or more"
        )
    return Slots(capacity, tuple(range(n_layers)))


@dataclass(frozen=True)
class RunTerms:
    """What a run is held to, whichever engine executes it."""

    slots: Slots
    discipline: Discipline
    chunks: int
    host: HostCosts | None = None
    """What experts cost on the host, where a plan runs some there."""
    preparation: Preparation | None = None
    """What steps wait for before they begin; predictions that a plan makes ahead are then part of it."""


def settle(
    work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None, chunks: int | None = None
) -> RunTerms:
    """Settle what plan and run leave open; ``discipline`` and ``chunks`` override the plan's.

    Raises TooSmallError if the budget cannot hold what the plan needs, PlanError if that asks for something impossible,
    and InputError for an override that is no discipline or number of pieces, or a run that could overflow 64 bits.
    """
    plan = _overridden(plan, discipline, chunks)
    plan.check(work.n_layers, work.n_experts, work.schedule.n_steps)
    if plan.everything_resident and plan.per_layer and len(set(work.expert_bytes)) > 1:
        raise PlanError(
            "plan: per_layer is True; expected False where everything is resident and layers differ in the size of "
            "their experts"
        )
    streamed = work.n_calls * work.n_experts if plan.stream_prefill or plan.ring else 0
    asked = len(plan.requests.call) if plan.requests is not None else 0
    thought = plan.prediction.total_ns(int((work.schedule.phase == PREFILL).sum()))
    host = None if plan.host is None else host_costs(work, plan.host)
    if host is not None and plan.host is not None:
        thought += int(host.shared.sum(dtype=np.float64)) + plan.host.call_ns * work.n_calls
    back = 2 * len(work.expert) + streamed + asked if plan.write_back else 0
    work.check_size(streamed + asked + back, thought)
    if plan.everything_resident:
        left = sum(work.expert_bytes) * work.n_experts
    else:
        _check_room(work, plan, budget)
        left = budget - plan.gpu_bytes
    return RunTerms(slots_of(work, plan, left), plan.discipline, plan.chunks or work.chunks, host)


def _overridden(plan: Plan, discipline: Discipline | None, chunks: int | None) -> Plan:
    """``plan`` with the link that a run asks for. What is wrong with that is no fault of the policy: InputError."""
    if discipline is not None and discipline not in get_args(Discipline):
        raise InputError(f"discipline: {discipline!r}; expected one of {', '.join(get_args(Discipline))}")
    if chunks is not None and not (isinstance(chunks, Integral) and 1 <= chunks <= MOST_CHUNKS):
        raise InputError(f"chunks: {chunks} pieces of a transfer; give at least 1, at most {MOST_CHUNKS}")
    return replace(plan, discipline=discipline or plan.discipline, chunks=chunks or plan.chunks)


def slots_of(work: Workload, plan: Plan, left: int) -> Slots:
    """The slots that ``plan`` makes of ``left`` bytes, reserved ones first; TooSmallError if no other would fit."""
    if plan.most_bytes and not plan.everything_resident:
        left = min(left, plan.most_bytes)
    left = max(left, plan.least_bytes)
    reserved = plan.host.reserved.tolist() if plan.host is not None else []
    shared = split_slots(left - _bytes_of(work, reserved), work.expert_bytes, plan.per_layer)
    return Slots(shared.capacity, shared.pool, tuple(reserved), plan.shares is not None)


def _bytes_of(work: Workload, experts: list[int]) -> int:
    return sum(work.expert_bytes[expert // work.n_experts] for expert in experts)


def least_slot_bytes(work: Workload, plan: Plan) -> int:
    """Bytes of the fewest slots that a run can do with beside reserved ones: one, or one a layer."""
    return max(work.expert_bytes) * (work.n_layers if plan.per_layer else 1)


def _check_room(work: Workload, plan: Plan, budget: int) -> None:
    """Raise TooSmallError if tables, experts with reserved slots and the fewest other slots do not fit together."""
    slots = least_slot_bytes(work, plan)
    reserved = _bytes_of(work, plan.host.reserved.tolist()) if plan.host is not None else 0
    needed = int(plan.gpu_bytes) + reserved + slots
    given = max(budget, plan.gpu_bytes + plan.least_bytes)
    if given >= needed or needed == slots:  # of slots alone it is said where they are split
        return
    one = "one expert in each layer" if plan.per_layer else "one expert"
    parts = ((plan.gpu_bytes, "the policy's tables"), (reserved, "experts that stay for good"), (slots, one))
    what = " + ".join(f"{size:,} for {name}" for size, name in parts if size)
    enough = f"{-(-needed // 2**20)}MiB" if needed >= 2**20 else f"{needed}B"
    raise TooSmallError(
        f"the cache of {budget:,} bytes is too small: a run takes {what}; give --cache {enough} or more"
    )
