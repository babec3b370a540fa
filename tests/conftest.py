"""The hypothesis profiles of all tests, none with deadlines, as machines are loaded: "project", the default, tries the
same examples every time; "explore" (``--hypothesis-profile=explore``) tries new ones, first those that failed before.

And what tests of the simulator's command line begin with, see ``tests.support.replays``.
"""

import gc
import os
from pathlib import Path
from typing import Any

# Before numpy and torch are imported: a worker has one processor, and threads that wait for each other burn it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests say themselves how wide a terminal is, where that matters; whoever runs them does not.
os.environ.pop("COLUMNS", None)

import pytest
from hypothesis import settings

for name, derandomize in {"explore": False, "project": True}.items():
    # Not derandomized, failures are kept and tried first the next time.
    settings.register_profile(name, deadline=None, derandomize=derandomize)
settings.load_profile("project")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests run in several processes, let one of them compile what the others then load."""
    if hasattr(session.config, "workerinput"):
        from tests.support.compiled_code import compile_once

        compile_once()


def pytest_collection_finish() -> None:
    """Let no garbage collection look through torch and all tests again: they stay."""
    gc.collect()
    gc.freeze()


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
