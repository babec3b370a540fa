"""Intervals of ratios: closed forms on toys, and shares that add up to the run's own report."""

import numpy as np
import pytest
from hypothesis import given, settings

from analysis.bootstrap import Ratio, compared, mean_ratio
from ground.errors import InputError
from sim.log import MISS
from sim.report.shares import Shares, shares
from tests.support.runs import simpy_run
from tests.support.worlds import World, worlds
from traces.schema import DECODE


def toy(ns: list[int], hits: list[int] | None = None, tokens: int = 10) -> Shares:
    count = len(ns)
    return Shares(
        tokens=np.full(count, tokens),
        ns=np.array(ns),
        lookups=np.full(count, 100),
        hits=np.array(hits or [50] * count),
        late=np.full(count, 20),
    )


def test_two_sequences_give_the_interval_between_their_own_ratios() -> None:
    # Drawn with replacement: both of one with probability 1/4 each, so the 95 % interval is from one to the other.
    ratio = compared("throughput", toy([100, 100]), toy([150, 250]))
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (pytest.approx(1.5), pytest.approx(2.5))


def test_policies_are_resampled_together() -> None:
    # Twice as fast on every sequence, however unlike they are: there is nothing to be unsure of.
    slow = [100, 1000, 10, 555]
    ratio = compared("throughput", toy(slow), toy([2 * ns for ns in slow]))
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(2),) * 3


def test_the_interval_of_many_sequences_is_that_of_the_delta_method() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(900, 1100, 400), rng.integers(1800, 2200, 400)
    ratio = compared("throughput", toy(a.tolist()), toy(b.tolist()))
    value = b.sum() / a.sum()
    error = np.std(b - value * a) / np.sqrt(400) / a.mean()
    assert ratio.value == pytest.approx(value)
    assert ratio.high is not None and ratio.low is not None
    assert ratio.high - ratio.low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_a_seed_fixes_the_interval() -> None:
    rng = np.random.default_rng(0)
    one, other = (toy(rng.integers(100, 200, 30).tolist()) for _ in range(2))
    assert compared("throughput", one, other, seed=1).to_json() == compared("throughput", one, other, seed=1).to_json()
    assert compared("throughput", one, other, seed=1).to_json() != compared("throughput", one, other, seed=2).to_json()


def test_hits_are_compared_by_look_up() -> None:
    ratio = compared("hit ratio", toy([1, 1, 1], [60, 60, 60]), toy([1, 1, 1], [40, 40, 40]))
    assert ratio.to_json() == {"value": 1.5, "low": 1.5, "high": 1.5}
    caught = compared("hit or late", toy([1, 1, 1], [60, 60, 60]), toy([1, 1, 1], [40, 40, 40]))
    assert caught.value == pytest.approx(80 / 60)


def test_what_has_no_ratio_has_none() -> None:
    assert compared("hit ratio", toy([1, 1], [5, 5]), toy([1, 1], [0, 0])).value is None  # over nothing
    single = compared("throughput", toy([100]), toy([150]))
    assert (single.value, single.low) == (1.5, None)  # one sequence says nothing of others
    rare = compared("hit ratio", toy([1, 1], [5, 5]), toy([1, 1], [0, 10]))
    assert (rare.value, rare.low) == (1.0, None)  # some draws are over nothing
    with pytest.raises(ValueError, match="different traces"):
        compared("throughput", toy([1, 2]), toy([1, 2, 3]))


def test_the_mean_of_workloads_is_surer_than_each() -> None:
    rng = np.random.default_rng(0)
    each = [compared("throughput", toy([100] * 8), toy(rng.integers(100, 300, 8).tolist()), seed) for seed in range(4)]
    mean = mean_ratio(each)
    assert mean.value == pytest.approx(np.mean([r.value for r in each]))
    assert mean.high is not None and mean.low is not None

    def width(r: Ratio) -> float:
        assert r.high is not None and r.low is not None
        return r.high - r.low

    assert width(mean) < 0.75 * max(map(width, each))
    assert mean_ratio([Ratio(2.0), each[0]]).low is None
    assert mean_ratio([]).value is None


@settings(max_examples=40)
@given(world=worlds())
def test_shares_add_up_to_the_run(world: World) -> None:
    from sim.policies import make_policy
    from sim.view import View

    plan = make_policy("lru", world.setting).plan(View(world.trace, world.work))
    log = simpy_run(world.work, plan, world.budget).log()
    if world.batch > 1 and (np.diff(world.work.schedule.offsets)[world.work.schedule.phase == DECODE] > 1).any():
        with pytest.raises(InputError, match="batch 1"):
            shares(world.trace, world.work, log)
        return
    parts = shares(world.trace, world.work, log)
    decode = world.work.schedule.phase == DECODE
    assert parts.ns.sum() == np.diff(log.finish, prepend=0)[decode].sum()
    assert parts.tokens.sum() == decode.sum()
    lookup = decode[world.work.call // world.work.n_layers]
    assert parts.lookups.sum() == lookup.sum()
    assert parts.hits.sum() == (log.found[lookup] <= 1).sum()
    assert (parts.hits + parts.late).sum() == (log.found[lookup] != MISS).sum()
    tokens = np.bincount(world.trace.sequence[world.trace.decode_rows], minlength=world.trace.n_sequences)
    assert parts.tokens.tolist() == tokens.tolist()
