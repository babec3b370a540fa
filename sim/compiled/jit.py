"""How the functions of this package are compiled.

Only the functions that Python calls are kept on disk (``entry``); what they call is part of them. numba recognises a
changed function by the file that it stands in, not by the files of what it calls, so the folder is named after a digest
of the whole package: code that changed anywhere is never run from an old cache.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from numba import config, njit

from sim.keep import cache_folder

F = TypeVar("F", bound=Callable[..., object])


def inner(function: F) -> F:
    """Compile a function that compiled functions call."""
    return cast(F, njit(function))


def inlined(function: F) -> F:
    """The same for one that runs at every look-up: it becomes part of its caller and compiles longer."""
    return cast(F, njit(forceinline=True)(function))


def entry(function: F) -> F:
    """Compile a function that Python calls; keep the result on disk where there is a folder for it."""
    folder = compiler_cache()
    if folder is None:
        return inner(function)
    with _caching_in(folder):
        return cast(F, njit(cache=True)(function))


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
    settings = vars(config)
    before, settings["CACHE_DIR"] = settings["CACHE_DIR"], str(folder)
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before
