"""Whether code can be compiled here, and kept for the next process. Imports no engine."""

from functools import cache
from importlib.util import find_spec

from ground.addresses import free_addresses
from sim.compiled.folder import compiler_cache

SHORT = 20_000
"""Look-ups that Python has done before numba is imported."""

ROOM = 704 * 2**20
"""Bytes of addresses for numba, what it compiles and the arrays of a run. LLVM ends a process that has too few."""
COMPILING = 384 * 2**20
"""Those that are still to be there when the first function is compiled; of 290 MiB all others take their part too."""


@cache
def no_room() -> str | None:
    """Why a compiler has no room here, in a line; None if it has. Asked once: later it takes up the room itself."""
    free = free_addresses()
    if free is None or free >= ROOM:
        return None
    return f"compiling needs {ROOM // 2**20} MiB of addresses, and {free // 2**20} are left (ulimit -v)"


def no_numba() -> str | None:
    """Why nothing can be compiled, in a line; None if it can. Imports numba."""
    if find_spec("numba") is None:
        return "numba is not installed; pip install 'moe-replay[fast]'"
    if reason := no_room():
        return reason
    try:
        from numba import config
    except Exception as wrong:  # built for another numpy, say
        return f"numba cannot be imported: {' '.join(str(wrong).split())}"
    return "numba is told not to compile, by NUMBA_DISABLE_JIT" if vars(config)["DISABLE_JIT"] else None


def cannot_keep_code() -> str | None:
    """Why compiled code would be made anew in every process, in a line; None if there is a folder for it."""
    if compiler_cache() is None:
        return "no folder to keep compiled code in; set MOE_REPLAY_CACHE to one that can be written"
    return None


def available() -> bool:
    """Whether code can be compiled and kept."""
    return no_numba() is None and compiler_cache() is not None


def compiles_first() -> bool:
    """Whether the first run in this place will take seconds to compile."""
    folder = compiler_cache()
    return available() and folder is not None and not any(folder.rglob("gpu.run*.nbc"))
