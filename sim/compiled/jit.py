"""How the functions of this package are compiled.

Only the functions that Python calls are kept on disk (``entry``); what they call is part of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from numba import config, njit

from sim.compiled.folder import compiler_cache

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


@contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Numba looks at its setting when a function is decorated; leave it as found for everybody else's functions."""
    settings = vars(config)
    before, settings["CACHE_DIR"] = settings["CACHE_DIR"], str(folder)
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before
