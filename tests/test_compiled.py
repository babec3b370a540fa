"""The compiled engine against the reference: every integer of every log, on anything at random."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sim.engine import Run
from sim.log import Log
from sim.plan import Plan
from tests.worlds import World, planned

pytest.importorskip("numba", reason="the compiled engine needs numba")

from sim.compiled import run_compiled

ARRAYS = ("finish", "found", "stall_demand", "stall_late", "predict")


def assert_same(reference: Log, compiled: Log) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(compiled, name), getattr(reference, name), name)
        assert getattr(compiled, name).dtype == getattr(reference, name).dtype
    assert compiled.counters == reference.counters


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(planned())
def test_any_plan_gives_the_integers_of_the_reference(given: tuple[World, str, Plan]) -> None:
    world, _, plan = given
    reference = Run(world.work, plan, world.budget, world.discipline, world.chunks).log()
    assert_same(reference, run_compiled(world.work, plan, world.budget, world.discipline, world.chunks))
