"""The front holds what nothing beats, and its knee is where a hand would put it."""

from hypothesis import given
from hypothesis import strategies as st

from analysis.html.front import front, knee

_POINTS = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), min_size=1, max_size=30)


@given(_POINTS)
def test_front_is_what_no_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    on_it = [points[at] for at in front(points)]
    assert on_it == sorted(on_it) and len(set(on_it)) == len(on_it)
    assert set(on_it) == {point for point in points if not any(beats(other, point) for other in points)}


def test_knee_is_farthest_above_the_line_between_the_ends() -> None:
    assert knee([(0, 0), (1, 8), (5, 9), (10, 10)]) == 1
    assert knee([(0, 0), (4, 3), (6, 9), (10, 10)]) == 2


def test_straight_hollow_and_short_fronts_have_no_knee() -> None:
    assert knee([(0, 0), (5, 5), (10, 10)]) is None
    assert knee([(0, 0), (5, 1), (10, 10)]) is None
    assert knee([(0, 0), (10, 10)]) is None


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=20), st.integers(1, 9))
def test_knee_does_not_depend_on_units(steps: list[tuple[int, int]], factor: int) -> None:
    x = y = 0.0
    points = [(x, y)]
    for dx, dy in steps:
        x, y = x + dx, y + dy
        points.append((x, y))
    found = knee(points)
    assert found == knee([(2.0**factor * x, y / 2.0**factor) for x, y in points])
    assert found is None or 0 < found < len(points) - 1
