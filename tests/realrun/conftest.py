"""What makes real runs of tests short: they measure nothing, so what measuring needs is left out or small."""

import gc

import pytest


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs find little garbage to look through, and small tables to look up in.

    A run collects garbage before it measures, which among all that torch and the tests hold takes half a second each
    time. So all that is there before a test stays frozen.
    """
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    monkeypatch.setattr("realrun.engine.predicting._TABLE_BYTES", 2**16)
    gc.freeze()
