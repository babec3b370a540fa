"""How the functions of this package are compiled.

Only the functions that Python calls are kept on disk (``entry``); what they call is part of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import config, njit, typeof

from ground.addresses import check_addresses
from sim.compiled.availability import COMPILING
from sim.compiled.folder import compiler_cache, drop_compiled

F = TypeVar("F", bound=Callable[..., object])


def inner(function: F) -> F:
    """Compile a function that compiled functions call."""
    return cast(F, njit(function))


def inlined(function: F) -> F:
    """The same for one that runs at every look-up: it becomes part of its caller and compiles longer."""
    return cast(F, njit(forceinline=True)(function))


def entry(function: F) -> F:
    """Compile a function that Python calls; keep the result on disk where there is a folder for it."""
    return cast(F, _Entry(function))


def unlocked(function: F) -> F:
    """As ``entry``, for one that runs without Python's interpreter lock."""
    return cast(F, _Entry(function, nogil=True))


class _Entry:
    """A function whose first call finds out whether what is kept on disk can be read, and compiles anew if not."""

    _any_compiled = False

    def __init__(self, function: Callable[..., object], nogil: bool = False) -> None:
        self._function, self._nogil = function, nogil
        self._compiled: Callable[..., object] | None = None

    def prepare(self, *arguments: object) -> None:
        """Compile what arguments like these call, without calling it."""
        if self._compiled is None:
            self._compile(lambda compiled: cast(Any, compiled).compile(tuple(map(typeof, arguments))))

    def __call__(self, *arguments: object) -> object:
        if self._compiled is not None:
            return self._compiled(*arguments)
        return self._compile(lambda compiled: compiled(*arguments))

    def _compile(self, use: Callable[[Callable[..., object]], object]) -> object:
        if not _Entry._any_compiled:
            check_addresses(COMPILING, "compiling")
        # Pickles and machine code that are damaged fail in more ways than can be listed, and before anything has run.
        for _ in range(2):
            with suppress(Exception):
                return self._first(self._kept(), use)
            drop_compiled()
        return self._first(njit(nogil=self._nogil)(self._function), use)

    def _kept(self) -> Callable[..., object]:
        folder = compiler_cache()
        if folder is None:
            return cast(Callable[..., object], njit(nogil=self._nogil)(self._function))
        with _caching_in(folder):
            return cast(Callable[..., object], njit(cache=True, nogil=self._nogil)(self._function))

    def _first(self, compiled: Callable[..., object], use: Callable[[Callable[..., object]], object]) -> object:
        result = use(compiled)
        self._compiled, _Entry._any_compiled = compiled, True
        return result


@contextmanager
def _caching_in(folder: Path) -> Iterator[None]:
    """Numba looks at its setting when a function is decorated; leave it as found for everybody else's functions."""
    settings = vars(config)
    before, settings["CACHE_DIR"] = settings["CACHE_DIR"], str(folder)
    try:
        yield
    finally:
        settings["CACHE_DIR"] = before
