"""Machine code of the compiled engine, which takes a minute of a slow processor to make."""

import fcntl
import os

from sim.compiled.availability import available, compiles_first
from sim.compiled.folder import compiler_cache


def compile_once() -> None:
    """Compile the engine unless it is on disk; of several processes that call this, one compiles and others wait."""
    folder = compiler_cache() if available() else None
    if folder is None:
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        if compiles_first():
            from sim.plan import Plan
            from tests.support.runs import compiled_log
            from tests.support.worlds import MS, handmade

            compiled_log(handmade([[[0]]], 1), Plan(), MS)
    finally:
        os.close(held)
