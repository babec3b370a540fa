"""Eviction rules that others published, against a brute force by layer calls, and by hand."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.eviction import EVICTIONS, HALF, NEVER, OCTAVE
from sim.run.slots import ExpertCache
from tests.sim.run.test_cache import brute, call_lists, hits


def passes_of(accesses: list[int]) -> list[int]:
    """The pass of each access: one begins where numbers rise no more."""
    return np.cumsum([0, *(later <= earlier for earlier, later in pairwise(accesses))]).tolist()


@given(call_lists, st.integers(4, 8))
@settings(max_examples=80)
def test_lfru_and_least_stale_equal_brute_force_by_calls(calls: list[list[int]], slots: int) -> None:
    number = [0, *passes_of([e for call in calls for e in sorted(call)])]

    def stale(expert: int, _: int, seen: dict[str, dict[int, int]]) -> tuple[int, ...]:
        last = seen["turn"][expert]
        return (1, last) if number[last] < number[max(seen["turn"].values())] else (0, -last)

    assert hits("least-stale", calls, slots, 8).tolist() == brute(calls, slots, stale)
    product = brute(calls, slots, lambda e, _, seen: (seen["resident"][e] * seen["turn"][e],))
    assert hits("lfru", calls, slots, 8).tolist() == product


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
@settings(max_examples=40)
def test_decayed_counts_halve_in_so_many_passes(accesses: list[int]) -> None:
    rule = EVICTIONS["decayed-lfu"](np.zeros(4, np.int64))
    worth = np.zeros(4)
    for expert, number in zip(accesses, passes_of(accesses), strict=True):
        rule.needed(expert, NEVER)
        worth[expert] += 2 ** (number / HALF)
    exact = {e: OCTAVE * float(np.log2(worth[e])) for e in set(accesses)}
    order = list(rule.candidates())
    for first, second in pairwise(order):  # each use rounds by one step of the scale at most
        assert exact[first] <= exact[second] + accesses.count(first) + accesses.count(second)


def test_recent_scores_count_half_of_what_they_were() -> None:
    cache = ExpertCache([1], 2, [2], [0], "score-recent")
    for expert in (0, 1):
        cache.allot(expert, 0, demand=False)
    cache.valued(0, np.array([8, 0]))  # 4 and 0
    cache.valued(0, np.array([0, 5]))  # 2 and 2, and 0 came first
    assert list(cache.rules[0].candidates()) == [0, 1]
    cache.valued(0, np.array([2, 0]))
    assert list(cache.rules[0].candidates()) == [1, 0]
