"""What is left of the host's memory, from made-up files of a kernel."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import realrun.device.host_memory as host_memory

GIB = 2**30


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with 8 GiB available and no control groups."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "free_addresses", lambda: None)
    put(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 * 2**20} kB\n")
    (tmp_path / "proc/self").mkdir()
    return tmp_path


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def test_the_kernel_is_asked_and_may_not_answer(kernel: Path) -> None:
    assert host_memory.free_host_bytes() == 8 * GIB
    put(kernel / "proc/meminfo", "MemAvailable: much\n")
    assert host_memory.free_host_bytes() is None
    (kernel / "proc/meminfo").unlink()
    assert host_memory.free_host_bytes() is None


def test_a_container_has_what_its_own_group_leaves(kernel: Path) -> None:
    put(kernel / "proc/self/cgroup", "0::/\n")
    group = kernel / "sys/fs/cgroup"
    put(group / "memory.max", "max\n")
    put(group / "memory.current", 5 * GIB)
    assert host_memory.free_host_bytes() == 8 * GIB
    put(group / "memory.max", 6 * GIB)
    assert host_memory.free_host_bytes() == GIB
    put(group / "memory.stat", f"anon {3 * GIB}\ninactive_file {2 * GIB}\n")
    assert host_memory.free_host_bytes() == 3 * GIB, "cached files give way"
    put(group / "memory.current", 7 * GIB)
    put(group / "memory.stat", "")
    assert host_memory.free_host_bytes() == 0


@pytest.mark.parametrize("name", [b"/\xff", "/a\u2028b".encode(), b"/../..", b"/a:b c", b"/\0"])
def test_odd_names_of_groups_are_no_error(kernel: Path, name: bytes) -> None:
    (kernel / "proc/self/cgroup").write_bytes(b"0::" + name + b"\n")
    top = kernel / "sys/fs/cgroup"
    put(top / "memory.max", 3 * GIB)
    put(top / "memory.current", 2 * GIB)
    assert host_memory.free_host_bytes() == GIB
    if b"a" in name:
        group = top / name.decode().lstrip("/")
        put(group / "memory.max", GIB)
        put(group / "memory.current", GIB)
        assert host_memory.free_host_bytes() == 0
    put(top / "memory.max", -1)
    assert host_memory.free_host_bytes() in (0, 8 * GIB)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=4), st.booleans())
def test_the_narrowest_of_the_groups_around_it_counts(limits: list[int], first_version: bool) -> None:
    import tempfile

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        patch.setattr(host_memory, "ROOT", root)
        put(root / "proc/meminfo", f"MemAvailable: {8 * 2**20} kB\n")
        path = "/" + "/".join("abcd"[: len(limits) - 1])
        top = root / "sys/fs/cgroup" / ("memory" if first_version else "")
        limit, used = ("limit_in_bytes", "usage_in_bytes") if first_version else ("max", "current")
        put(root / "proc/self/cgroup", f"4:cpu:/x\n5:memory:{path}\n0::/else\n" if first_version else f"0::{path}\n")
        for depth, size in enumerate(limits):
            group = top.joinpath(*"abcd"[:depth])
            put(group / f"memory.{limit}", size * GIB if size else 2**63 - 4096 if first_version else "max")
            put(group / f"memory.{used}", GIB)
        assert host_memory.free_host_bytes() == min([8, *(size - 1 for size in limits if size)]) * GIB


def test_the_limit_of_addresses_counts(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_addresses", lambda: 2**20)
    assert host_memory.free_host_bytes() == 2**20
