"""What a run is held to: a cache that is too small is told how large it must be, and that is neither more nor less."""

import re
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.plan import Host, Plan
from sim.policies import Policy
from sim.run.cache_size import parse_capacity
from sim.run.prepared import settle_for
from sim.run.terms import TooSmallError, settle
from sim.view import View
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
