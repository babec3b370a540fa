"""What a run is held to: a cache that is too small is told how large it must be, and that is neither more nor less."""

import dataclasses
import re
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.plan import MOST_CHUNKS, Host, Plan, PlanError
from sim.policies import Policy
from sim.run.cache_size import parse_capacity
from sim.run.prepared import settle_for
from sim.run.terms import TooSmallError, settle
from sim.view import View
from tests.support.runs import simpy_run
from tests.support.worlds import handmade

SIZE, LAYERS, EXPERTS = 3_000_000, 3, 4
WORK = handmade([[[0, 1]] * LAYERS], EXPERTS, expert_bytes=SIZE)


class Tables(Policy):
    name = "tables"
    table_sizes: ClassVar[tuple[str, ...]] = ("entries", "keys")

    def plan(self, view: View) -> Plan:
        return Plan()


def hosted(own: int) -> Host:
    ones = np.ones(LAYERS, np.int64)
    return Host(ones, ones, ones, ones, reserved=np.arange(own))


@given(st.integers(0, 10**8), st.booleans(), st.integers(0, EXPERTS))
def test_the_smallest_cache_that_is_named_is_the_smallest(tables: int, per_layer: bool, own: int) -> None:
    plan = Plan(gpu_bytes=tables, per_layer=per_layer, host=hosted(own) if own else None)
    needed = tables + own * SIZE + SIZE * (LAYERS if per_layer else 1)
    settle(WORK, plan, needed)
    with pytest.raises(TooSmallError) as refused:
        settle(WORK, plan, needed - 1)
    if not tables and not own and not per_layer:
        assert str(refused.value).endswith("give at least that")
        return
    said = re.search(r"give --cache (\S+)( \(slots\), which is .*,)? or more$", str(refused.value))
    assert said is not None
    enough = parse_capacity(said[1], WORK.expert_bytes, EXPERTS)
    assert needed <= enough < needed + 2**20
    settle(WORK, plan, enough)


def test_what_takes_the_memory_is_said_in_words() -> None:
    with pytest.raises(
        TooSmallError, match=r"^policy tables: the cache of 10,000,000 bytes is too small: a run takes"
    ) as it:
        settle_for(Tables, WORK, Plan(gpu_bytes=9_000_000, host=hosted(1)), 10_000_000)
    assert "9,000,000 for the policy's tables + 3,000,000 for experts that stay for good + 3,000,000 for one" in str(
        it.value
    )
    assert str(it.value).endswith("or smaller tables (--set; parameters: entries, keys)")


@pytest.mark.parametrize(
    ("plan", "budget"),
    [
        (Plan(gpu_bytes=1), SIZE),  # no table is so small
        (Plan(gpu_bytes=1, per_layer=True), LAYERS * SIZE),
        (Plan(host=hosted(2)), 2 * SIZE),  # there are none
    ],
)
def test_smaller_tables_are_advised_only_where_they_help(plan: Plan, budget: int) -> None:
    with pytest.raises(TooSmallError) as refused:
        settle_for(Tables, WORK, plan, budget)
    assert str(refused.value).endswith("or more")


@given(
    st.sampled_from([None, "fifo", "preemptive", "lifo", "", 3]),
    st.one_of(st.none(), st.integers(-2, MOST_CHUNKS + 2), st.floats(), st.just("3")),
)
def test_overrides_are_checked_as_what_a_plan_says_is(discipline: Any, chunks: Any) -> None:
    """A discipline that does not exist, and two and a half pieces of a transfer, were run as something else."""
    right = discipline in (None, "fifo", "preemptive")
    right &= chunks is None or (isinstance(chunks, int) and 1 <= chunks <= MOST_CHUNKS)
    plan = Plan(discipline="demand-first", chunks=5)
    if right:
        terms = settle(WORK, plan, 10 * SIZE, discipline, chunks)
        assert (terms.discipline, terms.chunks) == (discipline or "demand-first", chunks or 5)
        return
    with pytest.raises(InputError, match=r"^(discipline: .*; expected one of fifo|chunks: .* pieces of a)") as refused:
        settle(WORK, plan, 10 * SIZE, discipline, chunks)
    assert not isinstance(refused.value, PlanError), "the policy is not at fault"


@pytest.mark.parametrize("sizes", [(SIZE,) * LAYERS, (SIZE, SIZE, 2 * SIZE)])
def test_everything_resident_in_even_pools_needs_experts_of_one_size(sizes: tuple[int, ...]) -> None:
    work, plan = dataclasses.replace(WORK, expert_bytes=sizes), Plan(everything_resident=True, per_layer=True)
    if len(set(sizes)) == 1:
        assert simpy_run(work, plan, SIZE).log().counters.demand_bytes == [0, 0]
        return
    with pytest.raises(PlanError, match=r"^plan: per_layer is True; expected False where everything is resident"):
        settle(work, plan, SIZE)


def test_a_cache_that_is_too_small_is_no_fault_of_the_plan() -> None:
    assert not issubclass(TooSmallError, PlanError)
