"""Where one policy pays over another, and that nothing is compared which did not run side by side."""

from typing import Any

import pytest

from analysis.html.designs import Designs
from analysis.html.gains import LEAST, Gains, gain_answers, gain_plots, gains_of
from analysis.html.plots import Curves, HeatMap
from analysis.html.runs import Run
from ground.errors import InputError
from tests.analysis.html.rows import run

LINKS = (10.0, 20.0, 40.0)
PAIR = "oracle over lru"


def at(speed: float, policy: str, link: float, cache: str = "25%", **values: Any) -> Run:
    fields = {"trace": "law.npz", "cache": cache, "hardware.link.gbps": link, "hardware.link.latency_us": 1000 / link}
    return run(speed, policy, fields, time_compute_ms=100.0, **values)


GRID = [
    *(at(4.0, "lru", link, cache, time_stall_demand_ms=4000 / link, time_stall_late_ms=1000 / link)
      for link in LINKS for cache in ("25%", "50%")),
    *(at(speed, "oracle", link, cache, reference="told", expert_bytes=2**20)
      for link, speed in zip(LINKS, (4.0, 4.2, 6.0), strict=True) for cache in ("25%", "50%")),
    at(9.0, "domoe", 10.0),
]  # fmt: skip


def gains(*texts: str, runs: list[Run] = GRID) -> tuple[Gains, Designs]:
    designs = Designs.of(runs)
    return gains_of(texts, designs), designs


def test_policies_are_compared_where_both_ran_and_all_else_is_alike() -> None:
    found, _ = gains(PAIR, "domoe over lru")
    assert [(one.times, one.stall) for one in found[PAIR]] == [
        (1.0, 5.0), (1.0, 5.0), (1.05, 2.5), (1.05, 2.5), (1.5, 1.25), (1.5, 1.25),
    ]  # fmt: skip
    assert [(one.times, one.other.fields["cache"]) for one in found["domoe over lru"]] == [(2.25, "25%")]


@pytest.mark.parametrize("text", ["oracle", "oracle over", "oracle over psychic", "over lru", "lru vs oracle"])
def test_what_did_not_run_side_by_side_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(InputError, match=r"^--gain .*expected ONE over OTHER, [^\n]*lru, oracle and domoe$"):
        gains(text)


def test_the_answer_says_in_how_many_places_it_pays_and_where() -> None:
    found, _ = gains(PAIR, "lru over oracle")
    pays, not_ = gain_answers(found)
    assert pays == (
        f"{PAIR}: at least 1.05 times as fast in 4 of 6 places, at most 1.50 times. In the middle nine tenths of these "
        "the other waits 1.25 to 2.50 s for each second that it computes."
    )
    assert not_ == "lru over oracle: at least 1.05 times as fast in 0 of 6 places."


def test_gains_stand_below_what_hiding_copies_can_give() -> None:
    found, designs = gains(PAIR)
    curves = gain_plots(found, designs)[0]
    assert isinstance(curves, Curves) and curves.x.log and not curves.y.zero
    dots, bound = curves.series[0], curves.series[-1]
    assert (dots.style, list(dots.x)) == ("dots", [1.25, 1.25, 2.5, 2.5, 5.0, 5.0]) and bound.style == "bound"
    assert bound.y[0] == pytest.approx(2.25 / 1.25) and bound.y[-1] == pytest.approx(6 / 5)
    assert "left out" not in curves.says


def test_medians_are_of_places_alike_and_what_hardly_waits_is_left_out() -> None:
    stalls = [100.0 * LEAST / 2, *[100.0] * 5, *[1000.0] * 4]
    runs = [at(4.0, "lru", float(n), time_stall_demand_ms=stall) for n, stall in enumerate(stalls, 1)]
    runs += [at(4.0 + n, "oracle", float(n)) for n in range(1, 1 + len(stalls))]
    found, designs = gains(PAIR, runs=runs)
    curves = gain_plots(found, designs)[0]
    assert isinstance(curves, Curves) and "1 dot is left out" in curves.says
    dots, medians, _ = curves.series
    assert len(dots.x) == 9 and dots.name == medians.name, "one colour for both"
    assert (list(medians.x), list(medians.y)) == ([1.0], [2.0]), "of four places there is no median"


def test_shares_and_maps_are_over_the_axes_and_fields_that_vary_together_are_one() -> None:
    found, designs = gains(PAIR)
    assert designs.varying == ["cache", "hardware.link.gbps", "policy"]
    _, shares, whole = gain_plots(found, designs)
    assert isinstance(shares, HeatMap) and isinstance(whole, HeatMap)
    assert dict(zip(shares.rows_of, shares.values, strict=True)) == {
        "cache 25%": [pytest.approx(200 / 3)], "cache 50%": [pytest.approx(200 / 3)],
        "link 10 GB/s": [0], "link 20 GB/s": [100], "link 40 GB/s": [100],
    }  # fmt: skip
    assert whole.columns_of == ["link 10 GB/s", "link 20 GB/s", "link 40 GB/s"]
    assert whole.values == [[1.0, 1.05, 1.5], [1.0, 1.05, 1.5]]


def test_the_size_of_experts_is_an_axis_where_models_differ() -> None:
    sized = {"mixtral.npz": 336 * 2**20, "qwen.npz": 9 * 2**20}
    runs = [run(speed, policy, {"trace": trace}, expert_bytes=size, time_compute_ms=1.0, time_stall_demand_ms=1.0)
            for trace, size in sized.items() for policy, speed in (("lru", 1.0), ("oracle", 2.0))]  # fmt: skip
    found, designs = gains(PAIR, runs=runs)
    shares = gain_plots(found, designs)[1]
    assert isinstance(shares, HeatMap)
    assert shares.rows_of == ["mixtral", "qwen", "experts of 9 MiB", "experts of 336 MiB"]


def test_without_pairs_there_is_nothing() -> None:
    found, designs = gains()
    assert (gain_plots(found, designs), gain_answers(found)) == ([], [])
