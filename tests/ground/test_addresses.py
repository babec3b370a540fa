"""What commands do where the limit of addresses (ulimit -v) leaves too few: one line, or another engine."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ground.addresses import LEAST, free_addresses

MIB = 2**20


def limited(limit: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``limit`` bytes of addresses."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, preexec_fn=few, timeout=100
    )  # fmt: skip


@pytest.mark.parametrize("package", ["sim", "traces", "realrun", "analysis"])
def test_too_few_for_the_imports_is_one_line(package: str) -> None:
    done = limited(100 * MIB, "-m", package, "--version")
    assert done.returncode == 2
    assert done.stderr.startswith("error: out of memory: ")
    assert done.stderr.endswith(f"give at least {LEAST // MIB}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("engine", ["auto", "compiled"])
def test_too_few_for_a_compiler_never_end_in_its_own_words(trace: Path, engine: str) -> None:
    code = """
import sys
import sim.run.engines
import sim.bounds
from sim.__main__ import main
sim.run.engines.SHORT = sim.bounds.SHORT = 0
sys.exit(main(sys.argv[1:]))
"""
    done = limited(400 * MIB, "-c", code, "replay", str(trace), "--engine", engine)
    if engine == "auto":
        assert (done.returncode, done.stderr) == (0, "")
        assert "run on the SimPy engine: compiling needs" in " ".join(done.stdout.split())
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("error: engine compiled: compiling needs ")
        assert done.stderr.count("\n") == 1


def test_what_a_limit_leaves_is_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert free_addresses() is None
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**50, 2**50))
    free = free_addresses()
    assert free is None or 0 < free < 2**50
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1, 1))
    assert free_addresses() in (None, 0)
