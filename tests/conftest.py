"""One hypothesis profile for all tests: no deadlines (machines are loaded), the same examples every time under CI.

And what tests of the simulator's command line begin with, see ``tests.replays``.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "project",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("project")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The small trace, as a file."""
    from tests.replays import toy_trace

    path = tmp_path / "toy.npz"
    toy_trace().save(path)
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command of the simulator and return (status, standard output, standard error)."""
    from sim.__main__ import main

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    yield run
