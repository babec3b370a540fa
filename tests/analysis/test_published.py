"""Published numbers are data with sources, and fit together where the paper says how."""

import pytest
from pydantic import ValidationError

from analysis.published import Claim, domoe


def test_every_number_names_its_table_and_its_sentence() -> None:
    paper = domoe()
    records = [*paper.claim, *paper.point, *paper.statement]
    assert records and all(r.figure and r.where for r in records)
    assert {r.figure for r in records} == {"Table 2", "Figure 1", "Figure 2", "Figure 4", "Figure 5"}


def test_ratios_of_the_ablation_are_those_of_its_points() -> None:
    paper = domoe()
    for model in ("mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b"):
        at = {p.at: p.tokens_per_s for p in paper.points("Figure 4", model)}
        for step, above, below in (
            ("table over trajectory", "table", "trajectory"),
            ("table (T+M) over table", "table (T+M)", "table"),
        ):
            (claim,) = paper.claims("Figure 4", "throughput", model, step=step)
            one, other = at[above], at[below]
            assert one is not None and other is not None and claim.high is not None
            assert one / other == pytest.approx(claim.high, abs=0.01)


def test_claims_of_each_model_are_found_for_any_and_averages_only_for_all() -> None:
    paper = domoe()
    assert [c.text for c in paper.claims("Table 2", "hit ratio", "qwen3-30b-a3b", over="fmoe")] == ["1.1–1.15"]
    assert paper.claims("Table 2", "throughput", "qwen3-30b-a3b", over="fmoe") == []
    assert [c.text for c in paper.claims("Table 2", "throughput", "all", over="fmoe")] == ["1.32"]
    assert [c.text for c in paper.claims("Table 2", "throughput", "phi-3.5-moe", over="moe-infinity")] == ["up to 2.25"]


def test_a_claim_meets_an_interval_that_shares_a_value_with_it() -> None:
    both = Claim(figure="T", where="s", metric="throughput", model="m", over="o", low=1.2, high=1.4)
    assert both.meets(1.0, 1.2) and both.meets(1.3, 1.31) and both.meets(1.0, 2.0)
    assert not both.meets(1.0, 1.19) and not both.meets(1.41, 2)
    above = Claim(figure="T", where="s", metric="throughput", model="m", over="o", low=1.2)
    assert above.meets(1.1, 1.3) and not above.meets(5, 6) and not above.meets(0.5, 1.1) and above.text == "from 1.2"
    up_to = Claim(figure="T", where="s", metric="throughput", model="m", over="o", high=2.25)
    assert not up_to.meets(1.0, 1.2), "a number far below is not what 'up to' reports"


@pytest.mark.parametrize("wrong", [{}, {"low": 2.0, "high": 1.0}, {"low": 1.0, "step": "s"}, {"low": 0.0}])
def test_a_claim_that_says_nothing_or_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Claim.model_validate({"figure": "T", "where": "s", "metric": "throughput", "model": "m", "over": "o"} | wrong)
