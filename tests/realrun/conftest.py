"""What makes real runs of tests short: they measure nothing, so what measuring needs is left out or small."""

import pytest

from tests.support.real_worlds import little_to_collect


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with little garbage to look through, and with small tables to look up in."""
    little_to_collect()
    monkeypatch.setattr("realrun.engine.predicting._TABLE_BYTES", 2**16)
