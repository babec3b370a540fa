"""A profile as text: what is written is read back, and curves rise."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from realrun.calibrate.profile_text import curve, to_toml
from realrun.calibrate.timing import Timing
from sim.machine.figures import Curve

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
PLAIN = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), TEXT)
TABLES = st.recursive(
    st.dictionaries(TEXT, st.one_of(PLAIN, st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3)), max_size=4),
    lambda inner: st.dictionaries(TEXT, st.one_of(PLAIN, inner, st.lists(inner, min_size=1, max_size=3)), max_size=4),
    max_leaves=6,
)


@given(TABLES)
def test_toml_reads_back_as_it_was_written(tables: dict) -> None:
    assert tomllib.loads(to_toml(tables, "a comment\nof two lines")) == tables


@given(st.dictionaries(st.integers(1, 10**12), st.integers(1, 10**9), min_size=2, max_size=9))
def test_any_times_make_a_curve_that_the_schema_takes(times: dict[int, int]) -> None:
    table = curve({size: Timing(ns, ns, ns, 1) for size, ns in times.items()}, "seen")
    points = Curve.model_validate(table).points
    assert [size for size, _ in points] == sorted(times)
    assert all(ns >= times[size] for size, ns in points)
    if list(dict(sorted(times.items())).values()) == sorted(set(times.values())):
        assert dict(points) == times
