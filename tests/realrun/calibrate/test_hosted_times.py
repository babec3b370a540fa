"""What experts on the host take by size and by call, told from measured times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from realrun.calibrate.hosted_times import HostedRates, HostedTimes
from realrun.calibrate.timing import Timing


def timed(size: int, at_once: int, idle: float, busy: float) -> HostedTimes:
    times = {copies: Timing(max(1, round(ns)), 1, 1, 1) for copies, ns in ((False, idle), (True, busy))}
    return HostedTimes(size, at_once, 4, {4: times})


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(5, 200), st.floats(0.3, 1))
def test_rates_floor_and_call_are_found_again(call: int, floor: int, rate: float, share: float) -> None:
    large, small = 352 * 10**6, 9_437_184

    def ns(size: int, at_once: int, rate: float) -> float:
        return call / at_once + floor + size / rate

    found = HostedRates.of(
        timed(large, 2, ns(large, 2, rate), ns(large, 2, rate * share)),
        timed(small, 8, ns(small, 8, rate), 1),
        timed(small, 1, ns(small, 1, rate), 1),
    )
    assert found.call_ns == pytest.approx(call, abs=3)
    assert found.floor_ns == pytest.approx(floor, abs=3)
    assert found.alone == pytest.approx(rate, rel=1e-3)
    assert found.shared == pytest.approx(rate * share, rel=1e-3)


def test_a_small_expert_that_took_longer_gives_no_rate_and_no_floor() -> None:
    found = HostedRates.of(timed(1000, 2, 500, 400), timed(100, 8, 900, 900), timed(100, 1, 100, 100))
    assert (found.call_ns, found.floor_ns, found.alone, found.shared) == (0, 0, 2, 2)
