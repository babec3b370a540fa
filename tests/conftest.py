"""The hypothesis profiles of all tests, none with deadlines, as machines are loaded: "project", the default, tries the
same examples every time; "explore" (``--hypothesis-profile=explore``) tries new ones, first those that failed before.

And what tests of the simulator's command line begin with, see ``tests.support.replays``.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

for name, derandomize in {"explore": False, "project": True}.items():
    settings.register_profile(
        name,
        deadline=None,
        derandomize=derandomize,  # which also leaves the database of failures alone
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("project")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The small trace, as a file."""
    from tests.support.replays import toy_trace

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
