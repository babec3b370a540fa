"""What no engine could executed is refused before a run, naming the field, whichever engine was to run it."""

import re
from typing import Any

import numpy as np
import pytest

from sim.plan import Plan, PlanError, Prediction, Requests, Values
from sim.run.terms import settle
from tests.support.runs import executed
from tests.support.worlds import MS, handmade

WORK = handmade([[[0], [1]], [[1], [0]]], 2)
"""2 steps of 2 routed layers of 2 experts: moments 0 to 5, calls 0 to 3, experts 0 to 3."""


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def asks(**changed: Any) -> Plan:
    given = {"moment": ints(0, 3), "offsets": ints(0, 1, 2), "call": ints(0, 3), "expert": ints(1, 2)}
    return Plan(requests=Requests(**({"priority": ints(0, 0)} | given | changed)))


def valued(**changed: Any) -> Plan:
    given = {"moment": ints(0, 3), "index": ints(0, 1), "table": np.zeros((2, 4), np.int64)}
    return Plan(eviction="score", values=Values(**(given | changed)))


def layered(**changed: Any) -> Plan:
    given = {"moment": ints(0, 0), "index": ints(0, 1), "table": np.zeros((2, 2), np.int64), "layer": ints(0, 1)}
    return Plan(eviction="score", values=Values(**(given | changed)))


def predicts(**changed: Any) -> Plan:
    return Plan(prediction=Prediction(**({"moment": ints(0, 3), "ns": ints(5, 6)} | changed)))


WRONG: list[tuple[Plan, str]] = [
    (Plan(gpu_bytes=-1), "gpu_bytes is -1; expected a whole number from 0"),
    (Plan(gpu_bytes=10.5), "gpu_bytes is 10.5; expected a whole number"),  # type: ignore[arg-type]
    (Plan(gpu_bytes=True), "gpu_bytes is True; expected a whole number"),
    (Plan(chunks=-3), "chunks is -3; expected a whole number from 0 to 1000000"),
    (Plan(chunks="3"), "chunks is '3'"),  # type: ignore[arg-type]
    (Plan(discipline="lifo"), "discipline is 'lifo'; expected one of fifo, demand-first, preemptive"),  # type: ignore
    (Plan(eviction=["lru"]), "eviction is ['lru']; expected the name of a rule, or a class"),  # type: ignore[arg-type]
    (Plan(eviction="score"), "values is None; expected Values"),
    (Plan(keep=None), "keep is None; expected True or False"),  # type: ignore[arg-type]
    (Plan(everything_resident=True, keep=False), "keep is False; expected True where everything is resident"),
    (Plan(requests=[]), "requests is 'list'; expected Requests or None"),  # type: ignore[arg-type]
    (Plan(values=3), "values is 'int'; expected Values or None"),  # type: ignore[arg-type]
    (Plan(prediction=None), "prediction is 'NoneType'; expected a Prediction"),  # type: ignore[arg-type]
    (asks(moment=ints(-1, 3)), "requests.moment[0] is -1; expected 0 to 5"),
    (asks(moment=ints(0, 6)), "requests.moment[1] is 6; expected 0 to 5"),
    (asks(moment=ints(3, 3)), "requests.moment[1] is 3; expected more than 3, the one before"),
    (asks(moment=[0, 3]), "requests.moment is 'list'; expected an array of integers in 1 dimension"),
    (asks(moment=np.array([0.0, 3.0])), "requests.moment is 'float64 (2,)'"),
    (asks(moment=np.array([0, 3], np.uint64)), "requests.moment is 'uint64 (2,)'"),
    (asks(offsets=ints(0, 2)), "requests.offsets is 'int64 (2,)'; expected an array of 3"),
    (asks(offsets=ints(0, 3, 2)), "requests.offsets is [0, 3, 2]; expected rising from 0 to 2"),
    (asks(offsets=ints(1, 1, 2)), "requests.offsets is [1, 1, 2]"),
    (asks(offsets=ints(0, 1, 3)), "requests.offsets is [0, 1, 3]"),
    (asks(call=ints(0, 4)), "requests.call[1] is 4; expected 0 to 3"),
    (asks(call=ints(-2, 3)), "requests.call[0] is -2; expected 0 to 3"),
    (asks(call=ints(0, 1)), "request 1 at step 1, point 0 is for call 1, which has passed"),
    (asks(expert=ints(1, 4)), "requests.expert[1] is 4; expected 0 to 3"),
    (asks(expert=ints(2, 2)), "request 0 for call 0 (routed layer 0) names expert 2, of layer 1"),
    (asks(expert=ints(1)), "requests.expert is 'int64 (1,)'; expected an array of 2"),
    (asks(priority=np.zeros((2, 1), np.int64)), "requests.priority is 'int64 (2, 1)'"),
    (valued(moment=ints(3, 0)), "values.moment[1] is 0; expected more than 3"),
    (valued(moment=ints(0, 9)), "values.moment[1] is 9; expected 0 to 5"),
    (valued(index=ints(0, 2)), "values.index[1] is 2; expected 0 to 1"),
    (valued(index=ints(0, -1)), "values.index[1] is -1; expected 0 to 1"),
    (valued(index=ints(0)), "values.index is 'int64 (1,)'; expected an array of 2"),
    (valued(table=np.zeros((2, 3), np.int64)), "values.table is (2, 3); expected 4 columns, one an expert"),
    (
        valued(table=np.zeros(4, np.int64)),
        "values.table is 'int64 (4,)'; expected an array of integers in 2 dimensions",
    ),
    (valued(table=np.zeros((2, 4))), "values.table is 'float64 (2, 4)'"),
    (layered(layer=ints(0, 2)), "values.layer[1] is 2; expected 0 to 1"),
    (layered(layer=ints(0)), "values.layer is 'int64 (1,)'; expected an array of 2"),
    (layered(layer=ints(1, 1), moment=ints(3, 3)), "values.moment x layers + layer[1] is 7; expected more than 7"),
    (layered(moment=ints(0, 6)), "values.moment[1] is 6; expected 0 to 5"),
    (layered(table=np.zeros((2, 4), np.int64)), "values.table is (2, 4); expected 2 columns, one an expert"),
    (Plan(eviction="score-lfu"), "values is None; expected Values, which eviction 'score-lfu' goes by"),
    (
        Plan(eviction="score-lfu", values=Values(ints(0), ints(0), np.array([[0, 0, 0, -(2**62)]]))),
        f"values.table is {2**62}; expected at most {2**62 - 1}: times 2, 64 bits",
    ),
    (
        Plan(eviction="score-count", values=Values(ints(0), ints(0), np.array([[0, 2**30, 0, 0]]))),
        f"values.table is {2**30}; expected at most {2**30 - 1}: times {2**33}, 64 bits",
    ),
    (predicts(ns=ints(5, -6)), "prediction.ns[1] is -6; expected 0 to"),
    (predicts(ns=ints(5)), "prediction.ns is 'int64 (1,)'; expected an array of 2"),
    (predicts(ns=np.array([1.5, 2.0])), "prediction.ns is 'float64 (2,)'"),
    (predicts(moment=ints(0, 6)), "prediction.moment[1] is 6; expected 0 to 5"),
    (predicts(prompt_ns=-1), "prediction.prompt_ns is -1"),
    (predicts(prompt_ns=1.5), "prediction.prompt_ns is 1.5"),
    (predicts(critical="no"), "prediction.critical is 'no'; expected True or False"),
]


@pytest.mark.parametrize(("plan", "message"), WRONG, ids=[message[:50] for _, message in WRONG])
def test_a_plan_that_cannot_be_is_refused_before_any_engine_has_it(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=f"^plan: {re.escape(message)}") as refused:
        settle(WORK, plan, 4 * MS)
    assert "\n" not in str(refused.value)


def test_what_is_right_runs() -> None:
    for plan in (
        asks(),
        valued(),
        layered(),
        predicts(),
        asks(moment=np.array([0, 3], np.uint8)),
        Plan(gpu_bytes=np.int64(9)),
    ):
        assert executed(WORK, plan, 4 * MS).log.finish[-1] > 0


@pytest.mark.parametrize(
    "field, wrong",
    [
        ("priority[0]", [0.5, 1]),
        ("priority[1]", [0, np.nan]),
        ("expert[0]", np.array([2**63, 1], np.uint64)),
        ("call", [0]),
        ("moment", ["a", "b"]),
    ],
)
@pytest.mark.parametrize("build", [Requests.build, Requests.merged])
def test_requests_of_no_whole_numbers_are_refused_and_not_cut_to_some(build: Any, field: str, wrong: Any) -> None:
    given = {"moment": ints(0, 3), "call": ints(0, 3), "expert": ints(1, 2), "priority": ints(0, 0)}
    given[field.partition("[")[0]] = np.array(wrong)
    with pytest.raises(PlanError, match=rf"^plan: requests\.{re.escape(field)}" if field != "moment" else "requests"):
        build(**given)
