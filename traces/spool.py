"""Rows that need not fit in memory: written to a file as they come, read back as a memory map."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


class Spool:
    """Rows of one shape and type. The file has no name (on Windows: until it is closed), so that a process that is
    killed leaves nothing behind; it lies in ``folder``, else where temporary files do.
    """

    def __init__(self, dtype: Any = np.float32, folder: Path | None = None) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="moe-", dir=folder)  # noqa: SIM115 (it lives as long as its rows)
        self._folder = folder or tempfile.gettempdir()
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
        return np.memmap(self._file, self._dtype, "r", shape=(self._rows, *self._shape))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A full disk does not say whose file it could not hold, and this one has no name."""
        try:
            yield
        except OSError as error:
            where = f"temporary files in {self._folder} (TMPDIR names another folder)"
            raise type(error)(error.errno, error.strerror, where) from error
