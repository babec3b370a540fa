"""How the functions of this package are compiled.

Only the functions that Python calls are kept on disk (``entry``); what they call is part of them. numba recognises a
changed function by the file that it stands in, not by the files of what it calls, so the folder is named after a digest
of the whole package: code that changed anywhere is never run from an old cache.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from numba import config, njit

from sim.keep import cache_folder

F = TypeVar("F", bound=Callable[..., object])


def inner(function: F) -> F:
    """Compile a function that compiled functions call."""
    compiled: F = njit(function)
    return compiled


def inlined(function: F) -> F:
    """The same for one that runs at every look-up or so: it becomes part of its caller, at the price of compile time."""
    compiled: F = njit(forceinline=True)(function)
    return compiled


def entry(function: F) -> F:
    """Compile a function that Python calls; keep the result on disk where there is a folder for it."""
    folder = compiler_cache()
    if folder is None:
        return inner(function)
    with _caching_in(folder):
        compiled: F = njit(cache=True)(function)
    return compiled


def compiler_cache() -> Path | None:
    """The folder of this version's machine code, made if need be; None if it cannot be written or is switched off."""
    return cache_folder(f"compiled-{_source_digest()}")


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Numba looks at its setting when a function is decorated; leave it as found for everybody else's functions."""
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before
