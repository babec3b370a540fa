"""Limits of a page are those of a sweep file."""

import pytest

from analysis.html.limits import limited, limits_of
from ground.errors import InputError
from tests.analysis.html.rows import GIB, run, sized


def test_runs_over_a_limit_or_without_its_figure_are_beyond_it() -> None:
    runs = [sized(3, "lru", 10, tpot_p99_ms=400.0), sized(3, "lru", 10, tpot_p99_ms=501.0), sized(3, "lru", 10)]
    assert [one.beyond for one in limited(runs, limits_of(["tpot_p99_ms=500"]))] == [False, True, True]
    assert [one.beyond for one in limited(runs, limits_of(["gpu_gib=11"]))] == [True] * 3


def test_card_is_a_limit_unless_its_memory_is_not_known_or_it_need_not_fit() -> None:
    large = sized(3, "lru", 90)
    unknown = sized(3, "lru", 90, gpu_memory_bytes=None)
    assert [one.beyond for one in limited([large, unknown], limits_of([]))] == [True, False]
    assert not limited([large], limits_of(["fits=false"]))[0].beyond
    assert not limited([sized(3, "lru", 90, gpu_memory_bytes=92 * GIB)], limits_of([]))[0].beyond


def test_what_could_not_be_run_is_beyond_no_limit() -> None:
    assert not limited([run(None)], limits_of(["gpu_gib=1"]))[0].beyond


@pytest.mark.parametrize(
    ("text", "expected"),
    [("speed=3", "--limit speed: unknown; expected one of gpu_gib"), ("gpu_gib=-1", "--limit gpu_gib: '-1'; expected "),
     ("ttft_ms", "--limit 'ttft_ms': expected name=value")],
)  # fmt: skip
def test_other_limits_are_refused(text: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        limits_of([text])
    assert str(refused.value).startswith(expected)
