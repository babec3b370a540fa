"""Rows that need not fit in memory: written to a file as they come, read back as a memory map."""

import mmap
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_READ: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()  # maps of files that arrays still lie in
_SECONDS = 0.005  # in which a process can look at some ten megabytes


class Spool:
    """Rows of one shape and type. The file has no name (on Windows: until it is closed), so that a process that is
    killed leaves nothing behind; it lies in ``folder``, else where temporary files do.
    """

    def __init__(self, dtype: Any = np.float32, folder: Path | None = None) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="moe-", dir=folder)  # noqa: SIM115 (it lives as long as its rows)
        self._folder = folder or tempfile.gettempdir()
        self._hint = "" if folder else " (TMPDIR names another folder)"
        self._dtype, self._rows, self._shape = np.dtype(dtype), 0, (0,)

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: np.ndarray) -> None:
        """Append rows (n, ...)."""
        self._rows, self._shape = self._rows + len(rows), rows.shape[1:]
        with self._named():
            self._file.write(np.ascontiguousarray(rows, self._dtype).data)

    def read(self) -> np.ndarray:
        """All rows; the file is no longer written."""
        if not self._rows:
            return np.empty((0, *self._shape), self._dtype)
        with self._named():
            self._file.flush()
        rows = np.memmap(self._file, self._dtype, "r", shape=(self._rows, *self._shape))
        give_back_pages_of(rows._mmap)  # type: ignore[attr-defined]
        return rows

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A full disk does not say whose file it could not hold, and this one has no name."""
        try:
            yield
        except OSError as error:
            where = f"temporary files in {self._folder}" + self._hint
            raise type(error)(error.errno, error.strerror, where) from error


def give_back_pages_of(mapped: mmap.mmap) -> None:
    """Make `pages_given_back` heed a map that is only read."""
    _READ.add(mapped)


def give_back_pages() -> None:
    """Give pages of files that are mapped back to the system."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for mapped in list(_READ):
            mapped.madvise(mmap.MADV_DONTNEED)


@contextmanager
def pages_given_back() -> Iterator[None]:
    """Within it, pages of files that are mapped are given back to the system every moment: else all that has been
    looked at counts as the process's memory until others need it.
    """
    done = threading.Event()

    def give_back() -> None:
        while not done.wait(_SECONDS):
            give_back_pages()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
