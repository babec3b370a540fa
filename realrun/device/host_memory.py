"""How much memory of the host this process may still take: of the machine, and of the group that it runs in."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ground.addresses import free_addresses

ROOT = Path("/")
"""Where the kernel's files lie; tests have others."""
UNLIMITED = 2**60
"""What is larger limits nothing: the first version of control groups says so with a number near 2**63."""


def free_host_bytes() -> int | None:
    """Bytes of host memory that the system can still give, None if it does not say.

    The least of what the kernel says is available, of what is left of the limits of this process's control group and
    those around it (containers have their limit there; files that are cached count as free), and of the limit of this
    process's address space.
    """
    addresses = free_addresses()
    return min((*_available(), *_left_in_groups(), *([] if addresses is None else [addresses])), default=None)


def _available() -> Iterator[int]:
    found = _figure(ROOT / "proc/meminfo", "MemAvailable:")
    if found is not None:
        yield found * 1024


def _left_in_groups() -> Iterator[int]:
    """Of the groups of both versions; where a container sees only its own, that is at the top."""
    try:
        lines = os.fsdecode((ROOT / "proc/self/cgroup").read_bytes()).split("\n")
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            top, names = ROOT / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            top = ROOT / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = PurePosixPath(path.lstrip("/"))
        if ".." in here.parts:  # of a group that cannot be seen from here
            here = PurePosixPath()
        for group in dict.fromkeys((here, *here.parents)):
            limit, used = _number(top / group / names[0]), _number(top / group / names[1])
            if limit is not None and used is not None and 0 <= limit < UNLIMITED:
                cached = _figure(top / group / "memory.stat", names[2]) or 0
                yield max(0, limit - used + min(cached, used))


def _number(path: Path) -> int | None:
    """What a file says that holds one number; None for "max" and where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _figure(path: Path, name: str) -> int | None:
    """The number that follows ``name`` in a file of one figure a line."""
    try:
        found = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in found if len(words) > 1 and words[0] == name), None)
    except (OSError, ValueError):
        return None
