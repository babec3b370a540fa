"""Rows in a file without a name: they come back as they were, and a disk that is full says where the file lay."""

import errno
from pathlib import Path

import numpy as np
import pytest

from traces.spool import Spool


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    spool = Spool(np.int16, tmp_path)
    rows = np.arange(24, dtype=np.int16).reshape(4, 2, 3)
    spool.add(rows[:1])
    spool.add(rows[1:])
    assert len(spool) == 4
    assert (spool.read() == rows).all()


def test_a_full_disk_is_named_by_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = write

    spool = Spool(folder=tmp_path)
    monkeypatch.setattr(spool, "_file", Full())
    with pytest.raises(OSError, match="No space left") as wrong:
        spool.add(np.zeros((1, 2)))
    assert str(tmp_path) in wrong.value.filename
