"""Compiled code on disk: damage is repaired, old versions go, and nothing that cannot be compiled stops a run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sim.compiled.availability
from ground.errors import InputError
from sim.compiled.folder import KEPT, compiler_cache
from sim.compiled.jit import _Entry
from sim.plan import Plan
from tests.support.places import REPOSITORY
from tests.support.runs import executed
from tests.support.worlds import MS, handmade

ROOT = REPOSITORY


def twice(number: int) -> int:
    return 2 * number


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_REPLAY_CACHE", str(tmp_path))
    return tmp_path


def kept(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


def garble(content: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in content)


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"", garble])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_damaged_code_is_compiled_anew(home: Path, damage: Callable[[bytes], bytes], suffix: str) -> None:
    assert _Entry(twice)(4) == 8
    files = [path for path in kept(home) if path.suffix == suffix]
    assert files
    whole = {path: path.read_bytes() for path in files}
    for path, content in whole.items():
        path.write_bytes(damage(content))
    assert _Entry(twice)(5) == 10
    assert all(len(path.read_bytes()) > len(whole[path]) // 2 for path in kept(home) if path in whole)
    assert _Entry(twice)(7) == 14


def test_a_folder_that_turns_read_only_is_no_reason_to_fail(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    entry = _Entry(twice)
    assert (entry(4), entry(5)) == (8, 10)
    assert not kept(home)


def test_code_of_old_versions_goes_when_new_is_made(home: Path) -> None:
    for age in range(KEPT + 3):
        folder = home / f"compiled-{age}"
        folder.mkdir()
        os.utime(folder, (1000 - age, 1000 - age))
    (home / "plans").mkdir()
    made = compiler_cache()
    assert made is not None
    assert {path.name for path in home.iterdir()} == {made.name, "plans", *(f"compiled-{age}" for age in range(KEPT))}
    (made / "code").touch()
    (home / "compiled-x").mkdir()
    compiler_cache()
    assert (home / "compiled-x").is_dir(), "only a new folder prunes"


def test_numba_that_cannot_be_imported_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.run.engines.SHORT", 0)
    monkeypatch.setattr(sim.compiled.availability, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "numba", None)
    work = handmade([[[0], [1]]], 2)
    done = executed(work, Plan(), 4 * MS)
    assert done.engine == "simpy"
    assert "numba cannot be imported" in done.notes[0]
    with pytest.raises(InputError, match="engine compiled: numba cannot be imported"):
        executed(work, Plan(), 4 * MS, engine="compiled")


def test_numba_that_may_not_compile_is_a_note(home: Path) -> None:
    code = """
import sim.run.engines
from sim.plan import Plan
from tests.support.runs import executed
from tests.support.worlds import handmade
sim.run.engines.SHORT = 0
done = executed(handmade([[[0], [1]]], 2), Plan(), 4_000_000)
print(done.engine, *done.notes)
"""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, cwd=ROOT, text=True)
    assert done.stdout == "simpy run on the SimPy engine: numba is told not to compile, by NUMBA_DISABLE_JIT\n"
    assert done.stderr == ""
