"""Somebody's model at work: what it raises becomes one line that names it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ground.errors import InputError
from ground.text import first_words

DEBUG = "MOE_REPLAY_DEBUG"
"""Environment variable: set, an exception in somebody's model or policy comes through with its traceback."""

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextmanager
def running(model: str, failed: str, remedy: str) -> Iterator[None]:
    """Turn what a model raises into an InputError naming it, what ``failed`` (or that memory did, and a ``remedy``)."""
    try:
        yield
    except InputError:
        raise
    except Exception as wrong:
        if os.environ.get(DEBUG):
            raise
        # The allocator of host memory raises a plain RuntimeError.
        if isinstance(wrong, MemoryError) or any(words in str(wrong).lower() for words in _NO_MEMORY):
            failed = f"out of memory, {remedy}"
        reason = f"{type(wrong).__name__}: {first_words(wrong)}"
        raise InputError(f"{model}: {failed} ({reason}; {DEBUG}=1 shows the traceback)") from None
