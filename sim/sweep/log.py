"""The log of a sweep: a row a line, appended as each design ends, in a folder that one sweep at a time writes into.

A killed sweep leaves whole rows and at most one that is torn, which the next one sets aside. What a full disk refuses
leaves the rows before it as they are.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ground.errors import InputError
from ground.files import atomic_path
from sim.sweep.row import Row, Status

LOG = "rows.jsonl"
TORN = "rows.torn"
_LOCK = ".lock"


@dataclass(frozen=True)
class Kept:
    """Where the row of a design stands in the log, and its status; one that failed is run again."""

    place: int
    status: Status

    @property
    def settled(self) -> bool:
        """Whether the design need not be run again."""
        return self.status != "failed"


class Log:
    """The rows of a folder, by the identity of their designs; use as a context manager.

    ``torn`` lines could not be read when it was opened; they stand in a file beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOG
        self.rows: dict[str, Kept] = {}
        self.torn = 0

    def __enter__(self) -> Self:
        """Raise InputError if another sweep writes into the folder, OSError if it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InputError(f"{self.folder}: another sweep is writing into it; wait for it, or name another") from None
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.fsync(self._file)
        os.close(self._file)
        os.close(self._lock)

    def _read(self) -> None:
        """Find the rows; set torn lines aside."""
        self.rows, bad = kept(self.folder)
        if bad:
            self._set_aside(bad)

    def _set_aside(self, bad: list[bytes]) -> None:
        with (self.folder / TORN).open("ab") as aside:
            aside.write(b"".join(line.rstrip(b"\n") + b"\n" for line in bad))
        with atomic_path(self.path) as part, part.open("wb") as out, self.path.open("rb") as file:
            out.writelines(line for line in file if Row.of_line(line) is not None)
        self.torn = len(bad)
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self.rows, _ = kept(self.folder)

    def append(self, row: Row) -> None:
        """Add a row, whole or not at all. Raises OSError, naming the log, if the disk does not take it."""
        place, line = os.fstat(self._file).st_size, row.to_line()
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, place)
            raise type(error)(error.errno, error.strerror, str(self.path)) from error
        self.rows[row.key] = Kept(place, row.status)

    def in_order(self, keys: Iterable[str]) -> Iterator[Row]:
        """The rows of these designs, which are there, one in memory at a time."""
        with self.path.open("rb") as file:
            for key in keys:
                file.seek(self.rows[key].place)
                row = Row.of_line(file.readline())
                assert row is not None  # it was read, or written, by this very process
                yield row


def kept(folder: Path) -> tuple[dict[str, Kept], list[bytes]]:
    """The rows that a folder's log has, by identity, and its damaged lines. Of a design the last row counts."""
    rows: dict[str, Kept] = {}
    bad: list[bytes] = []
    place = 0
    with (folder / LOG).open("rb") as file:
        for line in file:
            row = Row.of_line(line)
            if row is None:
                bad.append(line)
            else:
                rows[row.key] = Kept(place, row.status)
            place += len(line)
    return rows, bad
