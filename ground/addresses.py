"""Addresses that this process may still take where ``ulimit -v`` limits them: not every library survives a refusal."""

import os
import resource
import sys
from pathlib import Path

LEAST = 176 * 2**20
"""What the libraries take that every command imports, on two processors, and a little to work with."""
_TORCH = 768 * 2**20


def free_addresses() -> int | None:
    """Bytes that the limit of this process's address space leaves; None where there is no limit, or it is not told."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return max(0, limit - pages * resource.getpagesize())


def check_addresses(least: int, what: str) -> None:
    """Raise MemoryError, saying ``what`` needs them, where fewer than ``least`` bytes of addresses are left."""
    free = free_addresses()
    if free is not None and free < least:
        left = f"{free // 2**20} MiB of addresses are left (ulimit -v)"
        raise MemoryError(f"{what} needs {least // 2**20} MiB, and {left}")


def check_torch() -> None:
    """The same before torch is imported, which without room for its threads' data ends the process."""
    if "torch" not in sys.modules:
        check_addresses(_TORCH, "torch")


def ends_if_few() -> None:
    """End the process with status 2 and a line where so few are left that its imports would fail, each in its way."""
    free = free_addresses()
    if free is not None and free < LEAST:
        words = f"out of memory: {free // 2**20} MiB of addresses are left (ulimit -v); give at least {LEAST // 2**20}"
        print(f"error: {words}", file=sys.stderr, flush=True)
        os._exit(2)
