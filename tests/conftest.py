"""One hypothesis profile for all tests: no deadlines (machines are loaded), the same examples every time under CI.

And what tests of the simulator's command line begin with, see ``tests.replays``.
"""

import os
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
def main() -> Any:
    """Whose commands ``said`` runs: the simulator's, unless a file of tests says otherwise."""
    from sim.__main__ import main

    return main


@pytest.fixture
def said(main: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command and return (status, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run
