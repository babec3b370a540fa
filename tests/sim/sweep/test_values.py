"""The values of an axis as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.policies import policy_classes
from sim.sweep.spec import Spec, spec_of, with_axes
from sim.sweep.values import Span, typed_values, values_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("10%:40%:10%", ("10%", "20%", "30%", "40%")),
        ("0.1:0.5:0.2", (0.1, 0.3, 0.5)),
        ("1:4:1", (1, 2, 3, 4)),
        ("1:64:x4", (1, 4, 16, 64)),
        ("4GiB:16GiB:x2", ("4GiB", "8GiB", "16GiB")),
        ("4/layer:16/layer:x2", ("4/layer", "8/layer", "16/layer")),
        ("12.5:60:x2", (12.5, 25.0, 50.0)),
        ("lru,domoe", ("lru", "domoe")),
        ("lru,scope=layer; domoe", ("lru,scope=layer", "domoe")),
        ("64,10%:30%:10%", ("64", "10%", "20%", "30%")),
        ("0.5:8", Span(0.5, 8)),
        ("0.5:8:log", Span(0.5, 8, log=True)),
        ("mine:Policy", ("mine:Policy",)),
    ],
)
def test_what_is_typed(text: str, values: Any) -> None:
    assert typed_values(text, "axis") == values


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ({"from": 10, "to": 30, "step": 10}, (10, 20, 30)),
        ({"from": "10%", "to": "20%", "step": "5%"}, ("10%", "15%", "20%")),
        ({"from": 1, "to": 100, "points": 3, "scale": "log"}, (1.0, 10.0, 100.0)),
        ({"from": 0.0, "to": 1.0, "points": 3}, (0.0, 0.5, 1.0)),
        ({"from": 1, "to": 8, "factor": 2}, (1, 2, 4, 8)),
        ({"from": 2, "to": 9}, Span(2, 9, whole=True)),
    ],
)
def test_ranges_as_tables(table: dict[str, Any], values: Any) -> None:
    assert values_of(table, "axis") == values


@pytest.mark.parametrize(
    "given",
    [
        "9:1:1",
        "1%:9:1",
        "0:8:x2",
        "1:8:x1",
        "1:9:0",
        "0:9:log",
        [],
        ["1:9"],
        "1:900000:1",
        {"from": 1},
        {"from": 1, "to": 2, "step": 1, "points": 2},
        {"from": 1, "to": 2, "points": 1},
        {"from": True, "to": 2, "step": 1},
        {"from": 1, "to": 2, "scale": "square"},
        {"from": 1, "to": 2, "by": 1},
    ],
)
def test_what_is_no_range_is_refused_in_a_line(given: Any) -> None:
    with pytest.raises(InputError, match=r"^axis.*expected [^\n]*$"):
        values_of(given, "axis")


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 40))
def test_steps_reach_the_end_and_no_further(low: int, step: int, count: int) -> None:
    high = low + step * count
    assert values_of(f"{low}:{high}:{step}", "axis") == tuple(range(low, high + 1, step))
    assert values_of(f"{low / 10}:{high / 10}:{step / 10}", "axis") == tuple(n / 10 for n in range(low, high + 1, step))


def fields(spec: Spec) -> list[dict[str, Any]]:
    space = spec.space
    designs = space.grid(1000) if spec.method == "grid" else space.random(spec.designs or 0, spec.seed)
    return [dict(design.fields) for design in designs]


def test_a_grid_is_every_combination_and_linked_fields_go_together() -> None:
    spec = spec_of({
        "run": {"trace": "a.npz"},
        "vary": {"cache": [64, "25%"], "hardware": {"link": {"gbps": [25]}}},
        "together": [{"batch": [1, 4], "set": {"scope": ["layer", "global"]}}],
    })  # fmt: skip
    always = {"trace": "a.npz", "hardware.link.gbps": 25.0}
    pairs = [{"batch": 1, "set.scope": "layer"}, {"batch": 4, "set.scope": "global"}]
    assert fields(spec) == [always | {"cache": cache} | pair for cache in ("64", "25%") for pair in pairs]


def test_every_policy_is_an_axis_without_naming_them() -> None:
    found = fields(spec_of({"run": {"trace": "a.npz"}, "vary": {"policy": ["all", "lru", "mine:Policy"]}}))
    names = [one["policy"] for one in found]
    assert set(policy_classes()) < set(names) and len(set(names)) == len(names) and names[-1] == "mine:Policy"


def test_drawn_designs_are_different_within_their_spans_and_the_same_again() -> None:
    spec = spec_of({
        "method": "random", "designs": 30, "seed": 3, "run": {"trace": "a.npz"},
        "vary": {"cache": "10%:90%", "hardware.link.gbps": "1:100:log", "policy": ["lru", "lfu"]},
    })  # fmt: skip
    drawn = fields(spec)
    assert drawn == fields(spec) and len({str(one) for one in drawn}) == 30
    assert drawn != fields(spec.model_copy(update={"seed": 4}))
    assert all(10 <= float(one["cache"].removesuffix("%")) <= 90 for one in drawn)
    assert all(1 <= one["hardware.link.gbps"] <= 100 for one in drawn)
    few = fields(spec.model_copy(update={"vary": {"policy": ["lru", "lfu"]}}))
    assert sorted(one["policy"] for one in few) == ["lfu", "lru"]


def test_what_is_typed_takes_the_place_of_what_the_file_says() -> None:
    spec = spec_of({"run": {"trace": "a.npz", "batch": 2}, "vary": {"cache": "10%:90%:10%"}})
    typed = with_axes(spec, "b.npz", ["cache=64", "batch=1:3:1"])
    assert fields(typed) == [{"trace": "a.npz", "cache": "64", "batch": batch} for batch in (1, 2, 3)]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"vary": {"cash": ["10%"]}}, "cash: no such field; expected one of trace, model, quant, hardware"),
        ({"vary": {"batch": ["many"]}}, "batch: 'many'; expected a whole number"),
        ({"vary": {"hardware.link.speed": [1.0]}}, "no such figure; expected one of gpu.memory_gb"),
        ({"vary": {"hardware.link.gbps": ["fast"]}}, "expected a number, or a factor"),
        ({"vary": {"cache": "10%:90%"}}, "cache has no step; expected one, or method random or search"),
        ({"vary": {"batch": [1]}, "run": {"batch": 1}}, "batch: is set twice"),
        ({"together": [{"batch": [1, 2], "seed": [1]}]}, "together 1: values vary together and differ in number"),
        ({"method": "random"}, "designs with method random"),
        ({"vary": {"policy": ["lru"]}}, "sets neither trace nor mix"),
        ({"axes": {}}, "axes: expected no such field"),
    ],
)
def test_what_is_wrong_with_a_sweep_file_is_said_in_a_line(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        fields(spec_of(tables))
    assert message in str(error.value) and "\n" not in str(error.value)
