"""MIN that fetches on demand: no order of evictions has more hits, and a policy that is told nothing cannot be it."""

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sim.bounds import fewest_loads
from sim.log import MISS
from sim.plan import Plan
from tests.support.runs import simpy_run
from tests.support.worlds import handmade


def most_hits(ids: tuple[int, ...], slots: int) -> int:
    """Over all choices of whom to evict."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(ids):
            return 0
        expert = ids[place]
        if expert in held:
            return 1 + best(place + 1, held)
        kept = [held] if len(held) < slots else [held - {other} for other in held]
        return max(best(place + 1, one | {expert}) for one in kept)

    return best(0, frozenset())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 4))
def test_no_order_of_evictions_has_more_hits(ids: list[int], slots: int) -> None:
    work = handmade([[[expert]] for expert in ids], 5, expert_bytes=10)
    found = simpy_run(work, Plan(eviction="next-use"), 10 * slots).log().found
    misses = int((found == MISS).sum())
    assert len(ids) - misses == most_hits(tuple(ids), slots)
    assert misses == np.count_nonzero(fewest_loads(work.offsets, work.expert, work.lookup_bytes, 10 * slots))
