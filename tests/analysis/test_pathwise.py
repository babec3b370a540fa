"""The share of the gap from LRU to MIN, and which rows copy a profile."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.experiments.pathwise import _copies, gap
from tests.support.strategies import traces
from traces.schema import DECODE
from traces.trace import Trace

counts = st.lists(st.integers(0, 50), min_size=2, max_size=6)


@given(counts, st.data())
def test_lru_closes_nothing_and_min_everything(lru: list[int], data: st.DataObject) -> None:
    pytest.importorskip("scipy")
    low = np.array(lru)
    high = low + np.array([data.draw(st.integers(1, 9)) for _ in lru])
    assert gap(low, low, high) == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert gap(high, low, high) == {"value": 1.0, "low": 1.0, "high": 1.0}
    between = gap((low + high) / 2, low, high)
    assert between["low"] == between["value"] == between["high"] == 0.5


def test_without_a_gap_there_is_no_share_and_with_one_sequence_no_interval() -> None:
    ten = np.array([10, 10])
    assert gap(ten, ten, ten)["value"] is None
    assert gap(np.array([5]), np.array([0]), np.array([10])) == {"value": 0.5, "low": None, "high": None}


@given(traces())
def test_every_row_copies_itself_and_none_one_that_takes_others(trace: Trace) -> None:
    if (trace.phase == DECODE).any() and (trace.experts >= 0).all() and 2 * trace.top_k <= trace.n_experts:
        assert _copies(trace, trace) == 1
        none = dataclasses.replace(trace, experts=np.full_like(trace.experts, -1))
        assert _copies(trace, none) == 0
