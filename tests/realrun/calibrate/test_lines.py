"""Times over work as a straight line, and when it is not to be trusted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrun.calibrate.lines import Line, doubt
from realrun.calibrate.timing import Timing


@given(st.floats(0, 1e6), st.floats(0.01, 1e4), st.lists(st.integers(1, 10**9), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed: float, rate: float, work: list[int]) -> None:
    line = Line.through([(size, fixed + size / rate) for size in work])
    for size in work:
        assert line.fixed_ns + size / line.rate == pytest.approx(fixed + size / rate, rel=1e-3)
    assert line.worst < 1e-3


def test_a_line_never_falls_below_nothing() -> None:
    assert Line.through([(10, 100), (1000, 50)]).fixed_ns == 100
    through_nothing = Line.through([(10, 1), (1000, 1000)])
    assert through_nothing.fixed_ns == 0 and through_nothing.rate > 0


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=2, max_size=6), st.floats(0.1, 100))
def test_no_rate_goes_beyond_what_the_place_reaches(points: list[tuple[float, float]], most: float) -> None:
    line = Line.through(points, most)
    assert 0 < line.rate <= most * (1 + 1e-9) and line.fixed_ns >= 0
    if Line.through(points).rate <= most:
        assert line == Line.through(points)


def timings(*samples: list[float]) -> list[Timing]:
    return [Timing.of(each) for each in samples]


@given(
    st.floats(0, 1e6), st.floats(0.01, 1e3),
    st.lists(st.integers(10**7, 10**9), min_size=2, max_size=6, unique=True), st.floats(1, 1.9),
)  # fmt: skip
def test_steady_times_along_a_line_are_trusted(fixed: float, rate: float, work: list[int], more: float) -> None:
    points = [(size, fixed + size / rate) for size in sorted(work)]
    ns = [ns for _, ns in points]
    steady = timings(*([time, time, time * more] for time in ns))
    assert doubt(Line.through(points), ns, steady, rises=False) == ""
    assert bool(doubt(Line.through(points), ns, steady, rises=True)) == (ns[-1] < 1.5 * ns[0])


@pytest.mark.parametrize(
    ("ms", "says"),
    [
        ([7.9973, 7.9983, 8.0036, 12.075, 11.667], "more took no longer"),  # as an H200's host once gave
        ([1, 2, 1.2, 8, 16], "more took less time"),
        ([1, 2, 4, 8, 40], "no line fits"),
    ],
)
def test_what_cannot_be_trusted_says_so(ms: list[float], says: str) -> None:
    ns, work = [one * 1e6 for one in ms], [1, 2, 4, 8, 16]
    line = Line.through(list(zip(work, ns, strict=True)))
    assert says in doubt(line, ns, timings(*([time] for time in ns)), rises=True)
    erratic = timings(*([time, 3 * time, 3 * time, 3 * time] for time in ns[:3]), *([time] for time in ns[3:]))
    assert "half of the runs" in doubt(line, ns, erratic, rises=False)


def test_timings_are_medians_within_their_spread() -> None:
    timing = Timing.of([5, 1, 9, 3, 7])
    assert (timing.ns, timing.runs) == (5, 5)
    assert timing.low <= timing.ns <= timing.high
    assert timing.over(5).ns == 1
