"""The cache without time: against libCacheSim access by access, against a brute force by layer calls, and by hand."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.eviction import EVICTIONS, NEVER, Eviction
from sim.run.serve import serve
from sim.run.slots import RESIDENT, ExpertCache, waves
from sim.workload import first_calls, next_calls
from traces.trace import Trace

CYC = [0, 1, 2] * 4
HOT = [0, 1, 0, 2, 0, 3, 0, 1]


def hits(rule: str, calls: list[list[int]], slots: int, total: int | None = None) -> np.ndarray:
    """Serve calls from one pool of ``slots`` experts of one byte."""
    ids = np.array([e for call in calls for e in sorted(call)], np.int64)
    offsets = np.cumsum([0, *map(len, calls)])
    total = total or int(ids.max(initial=0)) + 1
    cache = ExpertCache([1], total, [slots], [0], rule, first_calls(offsets, ids, total))
    return serve(cache, offsets, ids)


def accesses(rule: str, ids: list[int], slots: int) -> int:
    """Hits of calls of one expert each."""
    return int(hits(rule, [[e] for e in ids], slots).sum())


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "slots", "lru", "fifo", "oracle"),
    [
        (CYC, 2, 0, 0, 5),
        (CYC, 3, 9, 9, 9),
        (CYC, 30, 9, 9, 9),
        (HOT, 2, 3, 2, 3),
        (HOT, 3, 3, 2, 4),
        (HOT, 4, 4, 4, 4),
    ],
)
def test_hand_numbers(ids: list[int], slots: int, lru: int, fifo: int, oracle: int) -> None:
    assert [accesses(rule, ids, slots) for rule in ("lru", "fifo", "next-use")] == [lru, fifo, oracle]


def test_more_slots_may_hurt_fifo() -> None:
    ids = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]  # L. A. Belady, R. A. Nelson, G. S. Shedler, CACM 12(6), 1969
    assert len(ids) - accesses("fifo", ids, 3) == 9
    assert len(ids) - accesses("fifo", ids, 4) == 10


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(1, 8))
def test_more_slots_never_hurt_lru_or_the_oracle(ids: list[int], slots: int) -> None:
    for rule in ("lru", "next-use"):
        assert accesses(rule, ids, slots + 1) >= accesses(rule, ids, slots)


@pytest.mark.parametrize("rule", ["lru", "fifo", "lfu", "perfect-lfu"])
def test_nothing_beats_chance_on_uniform_routes(rule: str) -> None:
    ids = np.random.default_rng(11).integers(0, 64, 20_000).tolist()
    assert accesses(rule, ids, 32) / 20_000 == pytest.approx(0.5, abs=0.02)
    assert accesses("next-use", ids, 32) / 20_000 > 0.6


def test_lru_evicts_what_was_used_longest_ago_though_slots_were_never_used() -> None:
    cache = ExpertCache([1], 5, [4], [0])
    a, b, c, d, e = range(5)
    ids = np.array([a, b, a, c, d, e])
    serve(cache, np.arange(7), ids)
    assert [cache.state[x] > 0 for x in (a, b, c, d, e)] == [True, False, True, True, True]


def test_object_and_byte_miss_ratios_differ_with_unequal_sizes() -> None:
    # Misses of 1 and 9 MB, one hit of 9 MB: 2/3 of the look-ups, 10/19 of the bytes.
    sizes = np.array([1, 9])
    ids = np.array([0, 1, 1])
    cache = ExpertCache(sizes.tolist(), 1, [10], [0, 0])
    hit = serve(cache, np.arange(4), ids)
    assert hit.tolist() == [False, False, True]
    assert (~hit).mean() == pytest.approx(2 / 3)
    assert sizes[ids[~hit]].sum() / sizes[ids].sum() == pytest.approx(10 / 19)


def test_alternating_sizes_do_not_empty_the_cache() -> None:
    # Layers of 6.75 and 13.5 MiB share 54 MiB: two of each fit, and after the first round nothing is loaded again.
    sizes = [27 * 2**18, 54 * 2**18]
    ids = np.array([0, 2, 1, 3] * 10)
    cache = ExpertCache(sizes, 2, [54 * 2**20], [0, 0])
    hit = serve(cache, np.arange(41), ids)
    assert int((~hit).sum()) == 4
    assert all(cache.state), "nobody was evicted"
    assert cache.free == [54 * 2**20 - 2 * sum(sizes)]


def repeating(slots: int, calls: bool) -> int:
    """Hits of LRU: 4 layers, 2 experts a token, 2 a layer, 10 tokens with the same routes."""
    token = [[2 * layer, 2 * layer + 1] for layer in range(4)]
    served = token * 10 if calls else [[e] for call in token * 10 for e in call]
    return int(hits("lru", served, slots).sum())


def test_lru_cycles_with_fewer_slots_than_one_token_takes() -> None:
    assert repeating(7, calls=False) == 0
    assert repeating(8, calls=False) == repeating(8, calls=True) == 72
    # By calls an expert of the running call is never evicted by the other one: with 7 slots one of two is found.
    assert repeating(7, calls=True) == 36


@given(st.integers(2, 5), st.integers(1, 3), st.integers(2, 6), st.data())
def test_a_repeating_route_never_hits_under_lru_access_by_access(
    layers: int, k: int, tokens: int, data: st.DataObject
) -> None:
    slots = data.draw(st.integers(1, layers * k - 1))
    ids = [e for _ in range(tokens) for e in range(layers * k)]
    assert accesses("lru", ids, slots) == 0
    calls = [list(range(k * layer, k * layer + k)) for _ in range(tokens) for layer in range(layers)]
    # A call protects its own experts, so a token may find k - 1 of the k of a layer, never all.
    assert hits("lru", calls, slots).sum() <= (tokens - 1) * layers * (k - 1)


def test_a_pool_that_cannot_hold_one_expert_is_refused() -> None:
    with pytest.raises(InputError, match="9 bytes for routed layer 1 cannot hold one expert of 10 bytes"):
        ExpertCache([5, 10], 4, [9], [0, 0])


def test_waves_fit_the_slots_and_keep_what_is_there() -> None:
    cache = ExpertCache([1], 8, [3], [0])
    for expert in (5, 6):
        cache.allot(expert, 0, demand=True)
    cache.landed(6)
    assert waves(cache, [0, 1, 2]) == [[0, 1, 2]]
    assert waves(cache, [0, 1, 2, 5, 6], queued=[2]) == [[6, 5, 2], [0, 1]]


# -- against libCacheSim -----------------------------------------------------------------------------------------------


def libcachesim_hits(algorithm: str, ids: list[int], slots: int) -> int:
    lib = pytest.importorskip("libcachesim", reason="libCacheSim is in the dev extra")
    cache = getattr(lib, algorithm)(slots)
    following = next_calls(np.arange(len(ids) + 1), np.array(ids))
    count = 0
    for now, (expert, later) in enumerate(zip(ids, following.tolist(), strict=True)):
        request = lib.Request()
        request.obj_id, request.obj_size, request.clock_time = expert + 1, 1, now
        request.next_access_vtime = 2**62 if later == NEVER else later
        count += cache.get(request)
    return count


@pytest.mark.parametrize(("rule", "algorithm"), [("lru", "LRU"), ("fifo", "FIFO"), ("next-use", "Belady")])
@given(st.lists(st.integers(0, 15), min_size=1, max_size=120), st.integers(1, 16))
@settings(max_examples=40)
def test_equals_libcachesim_on_random_accesses(rule: str, algorithm: str, ids: list[int], slots: int) -> None:
    assert accesses(rule, ids, slots) == libcachesim_hits(algorithm, ids, slots)


BUNDLED = sorted(str(p) for p in resources.files("traces").iterdir() if p.name.startswith("mixtral"))
"""Bundled traces that have every optional array."""


@pytest.mark.parametrize(("rule", "algorithm"), [("lru", "LRU"), ("fifo", "FIFO"), ("next-use", "Belady")])
def test_equals_libcachesim_on_real_routes(rule: str, algorithm: str) -> None:
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    trace = Trace.load(Path(BUNDLED[0]))
    flat = trace.experts.astype(np.int64) + np.arange(trace.n_layers)[:, None] * trace.n_experts
    ids = flat[trace.experts >= 0][:20_000].tolist()
    for share in (0.1, 0.5):
        slots = int(share * trace.n_layers * trace.n_experts)
        assert accesses(rule, ids, slots) == libcachesim_hits(algorithm, ids, slots)


# -- against a brute force by layer calls ------------------------------------------------------------------------------


Worth = Callable[[int, int, dict[str, dict[int, int]]], tuple[int, ...]]


def brute(calls: list[list[int]], slots: int, worth: Worth) -> list[bool]:
    """Lists and linear scans: whoever has the least ``worth(expert, call, seen)`` leaves, never an expert of the call.

    ``seen`` holds for each expert when it was last needed, by the clock and as which look-up (turn), when it came in,
    and how often it was needed since it came in (resident) and at all (always).
    """
    held: list[int] = []
    seen: dict[str, dict[int, int]] = {name: {} for name in ("last", "turn", "in", "resident", "always")}
    found, clock = [], 0
    for number, call in enumerate(calls):
        call = sorted(call)
        for expert in call:
            found.append(expert in held)
            clock += 1
            seen["last"][expert], seen["turn"][expert] = clock, len(found)
            seen["always"][expert] = seen["always"].get(expert, 0) + 1
            seen["resident"][expert] = seen["resident"].get(expert, 0) + 1
        order = [e for e in call if e in held] + [e for e in call if e not in held]
        while order:
            wave, order = order[:slots], order[slots:]
            for expert in wave:
                if expert in held:
                    continue
                if len(held) == slots:
                    victim = min((e for e in held if e not in wave), key=lambda e: worth(e, number, seen))
                    held.remove(victim)
                    del seen["resident"][victim]
                clock += 1
                held.append(expert)
                seen["in"][expert] = clock
                seen["resident"].setdefault(expert, 0)
    return found


def next_use(calls: list[list[int]], expert: int, after: int) -> int:
    return next((c for c in range(after + 1, len(calls)) if expert in calls[c]), 10**9)


call_lists = st.lists(st.sets(st.integers(0, 7), max_size=4).map(sorted), min_size=1, max_size=25)


@given(call_lists, st.integers(1, 8))
@settings(max_examples=150)
def test_lru_and_fifo_equal_brute_force_by_calls(calls: list[list[int]], slots: int) -> None:
    assert hits("lru", calls, slots, 8).tolist() == brute(calls, slots, lambda e, _, seen: (seen["last"][e],))
    assert hits("fifo", calls, slots, 8).tolist() == brute(calls, slots, lambda e, _, seen: (seen["in"][e],))


@given(call_lists, st.integers(4, 8))
@settings(max_examples=150)
def test_lfu_equals_brute_force_by_calls(calls: list[list[int]], slots: int) -> None:
    for rule, count in (("lfu", "resident"), ("perfect-lfu", "always")):
        expected = brute(calls, slots, lambda e, _, seen, count=count: (seen[count][e], seen["last"][e]))  # type: ignore[misc]
        assert hits(rule, calls, slots, 8).tolist() == expected


@given(call_lists, st.integers(4, 8), st.lists(st.integers(-3, 9), min_size=8, max_size=8))
@settings(max_examples=150)
def test_values_and_their_product_with_uses_equal_brute_force_by_calls(
    calls: list[list[int]], slots: int, values: list[int]
) -> None:
    ids, offsets = np.array([e for call in calls for e in call], np.int64), np.cumsum([0, *map(len, calls)])
    for rule in ("score", "score-lfu", "score-count"):
        cache = ExpertCache([1], 8, [slots], [0], rule)
        cache.valued(0, np.array(values[:5]))
        cache.valued(5, np.array(values[5:]))

        def worth(expert: int, _: int, seen: dict[str, dict[int, int]], rule: str = rule) -> tuple[int, ...]:
            if rule == "score-count":
                return values[expert], seen["always"][expert], seen["last"][expert]
            uses = seen["resident"][expert] if rule == "score-lfu" else 1
            return values[expert] * uses, seen["last"][expert]

        assert serve(cache, offsets, ids).tolist() == brute(calls, slots, worth)


def test_a_prefetched_expert_counts_as_used_once() -> None:
    # Worth 3 and 2 as they come; two uses make the second worth 4, and then the first leaves.
    cache = ExpertCache([1], 3, [2], [0], "score-lfu")
    cache.valued(0, np.array([3, 2, 1]))
    for expert in (0, 1):
        cache.allot(expert, 0, demand=False)
        cache.landed(expert)
    assert list(cache.rules[0].candidates()) == [1, 0]
    cache.needed(1)
    cache.needed(1)
    assert list(cache.rules[0].candidates()) == [0, 1]
    cache.release(1)
    cache.allot(1, 0, demand=False)
    assert list(cache.rules[0].candidates()) == [1, 0], "whoever left begins anew"


@pytest.mark.parametrize("more", [0, 300])
def test_what_leaves_for_a_prefetch_is_what_a_demand_would_take_last(more: int) -> None:
    cache = ExpertCache([1], 4 + more, [3], [0], "lfu-mfu")
    for expert, uses in ((0, 2), (1, 5), (2, 1)):
        cache.allot(expert, 0, demand=True)
        cache.landed(expert)
        for _ in range(uses):
            cache.needed(expert)
    cache.requested(1, 9)  # what is asked for does not go for a prefetch
    assert cache.allot(3, 0, demand=False) == [0]
    cache.landed(3)
    assert cache.allot(0, 0, demand=True) == [3], "never needed"


@given(call_lists, st.integers(1, 8))
@settings(max_examples=150)
def test_min_equals_brute_force_by_calls(calls: list[list[int]], slots: int) -> None:
    expected = brute(calls, slots, lambda e, now, _: (-next_use(calls, e, now), e))
    assert hits("next-use", calls, slots, 8).tolist() == expected


@given(call_lists, st.integers(1, 8), st.sampled_from(sorted(EVICTIONS)))
def test_an_infinite_cache_misses_each_expert_once(calls: list[list[int]], slots: int, rule: str) -> None:
    lookups, distinct = sum(map(len, calls)), len({e for call in calls for e in call})
    assert hits(rule, calls, 8, 8).sum() == hits(rule, calls, 80, 8).sum() == lookups - distinct


@given(call_lists)
def test_next_and_first_calls(calls: list[list[int]]) -> None:
    ids = np.array([e for call in calls for e in call], np.int64)
    offsets = np.cumsum([0, *map(len, calls)])
    following = next_calls(offsets, ids)
    expected = [next_use(calls, e, c) for c, call in enumerate(calls) for e in call]
    assert [x if x != NEVER else 10**9 for x in following.tolist()] == expected
    first = first_calls(offsets, ids, 8)
    assert [x if x != NEVER else 10**9 for x in first.tolist()] == [next_use(calls, e, -1) for e in range(8)]


@pytest.mark.parametrize("rule", sorted(EVICTIONS))
def test_nobody_is_offered_twice(rule: str) -> None:
    # 0 leaves and comes back before its next use: whoever counts it twice believes to have more room than there is.
    cache = ExpertCache([1, 2], 2, [4], [0, 0], rule)
    for expert in (0, 1):
        cache.needed(expert, 9)
        cache.allot(expert, 0, demand=True)
        cache.landed(expert)
    cache.release(0)
    cache.allot(0, 0, demand=True)
    cache.landed(0)
    cache.needed(0, 9)
    offered = [expert for expert in cache.rules[0].candidates() if cache.state[expert]]
    assert sorted(offered) == [0, 1]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(9, 60), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_room_never_runs_over_with_unequal_sizes(sizes: list[int], capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    calls = [np.sort(rng.choice(5, rng.integers(0, 4), replace=False)) + 5 * (c % len(sizes)) for c in range(40)]
    cache = ExpertCache(sizes, 5, [capacity], [0] * len(sizes), str(rng.choice(sorted(EVICTIONS))))
    for a, b in pairwise(calls):
        serve(cache, np.array([0, len(a), len(a) + len(b)]), np.concatenate([a, b]))
        used = sum(cache.size[e] for e in range(len(cache.state)) if cache.state[e])
        assert 0 <= used == capacity - cache.free[0] <= capacity == cache.capacity[0]
        assert not any(cache.pinned)


def tell(rule: Eviction, what: str, expert: int, number: int) -> None:
    """One thing that happens to ``expert``."""
    if what == "needed":
        rule.needed(expert, 100 + number)
    elif what == "valued":
        rule.valued(expert, np.arange(number, number + min(3, 40 - expert)))
    else:
        getattr(rule, what)(expert)


@given(
    st.sampled_from([name for name in sorted(EVICTIONS) if name not in ("lru", "fifo")]),
    st.lists(
        st.tuples(
            st.sampled_from(["needed", "loaded", "evicted", "valued"]), st.integers(0, 39), st.integers(-9, 9)
        ),
        max_size=60,
    ),
)  # fmt: skip
@settings(max_examples=150)
def test_whether_the_order_is_asked_for_often_or_once_does_not_change_it(
    name: str, events: list[tuple[str, int, int]]
) -> None:
    often, once = (EVICTIONS[name](np.full(40, NEVER, np.int64)) for _ in range(2))
    for rule in (often, once):
        for expert in range(0, 40, 2):  # enough that few of them move at a time
            rule.loaded(expert)
    for event in events:
        tell(often, *event)
        tell(once, *event)
        asked = list(often.candidates())
        assert len(set(asked)) == len(asked)
    assert list(often.candidates()) == list(once.candidates())


class OneByOne(EVICTIONS["score"]):  # type: ignore[misc]
    """The same rule, whose candidates can only be looked at one after the other."""

    listed = False

    def candidates(self) -> Iterator[int]:
        return iter(super().candidates())


@pytest.mark.parametrize("kind", ["i", "h", "l", "Q", "list", "iterator"])
def test_a_rule_made_of_a_listed_one_may_give_its_candidates_as_anything(kind: str) -> None:
    class Own(EVICTIONS["score"]):  # type: ignore[misc]
        def candidates(self) -> Iterable[int]:
            numbers = list(super().candidates())
            return numbers if kind == "list" else iter(numbers) if kind == "iterator" else array(kind, numbers)

    cache = ExpertCache([1], 300, [300 - 1], [0], Own)
    for expert in range(299):
        assert cache.allot(expert, -1, True) == []
        cache.landed(expert)
        cache.requested(expert, 5)
    assert cache.allot(299, 0, False) is None
    assert cache.allot(299, 0, True) == [0]


@given(st.integers(0, 2**32 - 1), st.integers(3, 120), st.integers(1, 60), st.integers(0, 100))
@settings(max_examples=60)
def test_many_candidates_looked_at_together_give_the_victims_that_one_by_one_does(
    seed: int, slots: int, near: int, many: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.run.slots.NEAR", near)
        patch.setattr("sim.run.slots.MANY", many)
        patch.setattr("sim.ranking.MANY", many)
        rng = np.random.default_rng(seed)
        total = 2 * slots
        caches = [ExpertCache([1], total, [slots], [0], rule) for rule in ("score", OneByOne)]
        together, one_by_one = caches
        worth, until, tie = np.zeros(total, np.int64), np.full(total, -1), np.zeros(total, np.int64)
        for passed in range(12):
            values, expert = rng.integers(0, 5, total), int(rng.integers(total))
            asked = rng.choice(total, int(rng.integers(total)), replace=False).tolist()
            ahead = rng.integers(0, 4, total).tolist()
            for cache in caches:
                cache.valued(0, values)
                for other in asked:
                    cache.requested(other, passed + ahead[other])
            worth[:] = values
            until[asked] = np.maximum(until[asked], passed + np.array(ahead)[asked])
            for _ in range(slots if not passed else 6):
                absent = np.flatnonzero(np.frombuffer(bytes(together.state), np.uint8) == 0)
                expert, demand = int(rng.choice(absent)), bool(rng.integers(2))
                there = [e for e in range(total) if together.state[e] == RESIDENT and not together.pinned[e]]
                order = sorted(there, key=lambda e: (until[e] > passed, worth[e], tie[e]))
                may = [e for e in order if demand or until[e] <= passed]
                expected = [] if together.free[0] else may[:1] or None
                assert together.allot(expert, passed, demand) == one_by_one.allot(expert, passed, demand) == expected
                if expected is not None:
                    tie[expert] = tie.max() + 1
                    pinned = bool(rng.integers(3) == 0)
                    for cache in caches:
                        cache.landed(expert)
                        cache.pinned[expert] = pinned
