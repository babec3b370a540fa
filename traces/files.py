"""Output files appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.errors import InputError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that becomes ``path`` when the block succeeds.

    A block that fails, or a process that is killed, leaves the old ``path`` as it was and nothing new under its name.
    Raises InputError if its folder does not exist or it is one, OSError if it cannot be written.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise InputError(f"{target}: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise InputError(f"{target}: is a folder; expected the name of a file to write")
    handle, name = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as written:
            os.fsync(written.fileno())
        # mkstemp makes private files; results are as readable as any other file that the person writes.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
