"""Code of others at work, a model or a policy: what it raises becomes one line that names it."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ground.errors import InputError
from ground.text import first_words

DEBUG = "MOE_REPLAY_DEBUG"
"""Environment variable: set, an exception of a model or policy comes through with its traceback."""

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_MOST = 1000
"""Characters of an error that are shown."""


@contextmanager
def errors_name(
    whose: str, failed: str = "", remedy: str = "", *, ours: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn whatever the code of others raises, or its attempt to exit, into an InputError that names it.

    The line says ``whose`` it is, what ``failed`` (or that memory did, and a ``remedy``), the error and, where nothing
    else says it, the place. An InputError and those of the kinds ``ours`` go on as they are. What it prints goes to
    standard error: standard output is for the command's own.
    """
    go_on: tuple[type[Exception], ...] = (InputError, *ours)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except go_on:
        raise
    except (Exception, SystemExit) as wrong:
        if os.environ.get(DEBUG):
            raise
        # The allocator of host memory raises a plain RuntimeError.
        if isinstance(wrong, MemoryError) or any(words in str(wrong).lower() for words in _NO_MEMORY):
            failed = f"out of memory, {remedy}" if remedy else "out of memory"
        reason, hint = f"{type(wrong).__name__}: {first_words(wrong, _MOST)}", f"{DEBUG}=1 shows the traceback"
        if failed:
            raise InputError(f"{whose}: {failed} ({reason}; {hint})") from None
        last = traceback.extract_tb(wrong.__traceback__)[-1]
        place = "" if "importlib" in last.filename else f"{Path(last.filename).name}, line {last.lineno}; "
        raise InputError(f"{whose}: {reason} ({place}{hint})") from None
