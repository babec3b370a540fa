"""Output files appear whole or not at all, and never in the place of what a command reads."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ground.errors import InputError

Name = str | Path
_PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing fails with, and nothing else; such errors do not name the file."""


def keep_apart(
    inputs: Iterable[Name | None],
    outputs: Mapping[str, Name | None],
    *,
    folders: Mapping[str, tuple[Name, Iterable[str]]] | None = None,
) -> None:
    """Refuse, before any work is done, outputs that cannot be written or would destroy an input or another output.

    ``inputs`` are all that the command reads; one that is no path (the name of a model) or None is passed over, and a
    folder stands for all that is in it. ``outputs`` are the files that it writes, by option; None and ``-`` (standard
    output) are passed over. ``folders`` are those that it makes or writes into, with the names of the files there.
    Links, symbolic or hard, count as what they lead to. Nothing is made. Raises InputError naming the option, or an
    input that :func:`check_regular` refuses; OSError for a path that cannot be looked at.
    """
    read = [Path(path) for path in inputs if path is not None and os.path.lexists(path)]
    for source in read:
        check_regular(source)
    written = [(option, Path(path)) for option, path in outputs.items() if path is not None and str(path) != "-"]
    for option, path in written:
        _check_writable(path, f"{option} {path}")
    for option, (made, names) in (folders or {}).items():
        folder = Path(made)
        _check_makeable(folder, f"{option} {folder}")
        inside = [(option, folder / name) for name in names]
        for _, path in inside:
            if os.path.lexists(path):
                _check_writable(path, f"{option} {path}")
        written += [(option, folder), *inside]
    earlier: list[tuple[str, Path]] = []
    for option, path in written:
        if _in_place(path):  # a device or a pipe loses nothing
            continue
        for source in read:
            if _same(path, source) or (source.is_dir() and path.is_file() and _within(path, source)):
                raise InputError(f"{option} {path}: would overwrite an input of the command ({source}); name another")
        for other, taken in earlier:
            if _same(path, taken):
                raise InputError(f"{option} {path}: is what {other} names too; name another")
        earlier.append((option, path))


def check_regular(path: Name) -> None:
    """Raise InputError if there is a pipe, a device or a socket: reading it may never end, and only once succeeds."""
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        raise InputError(f"{path}: must be a regular file; save what it gives to one first")


@contextmanager
def atomic_path(path: Name) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` when the block succeeds.

    A block that fails, or a process that is killed, leaves the old ``path`` as it was and nothing new under its name.
    The temporary file of a killed process stays until the next write of the same file removes it.
    The file that a symbolic link leads to is replaced, not the link; a device, a pipe or the file behind standard
    output is written to at the end and stays what it is. Raises InputError if its folder does not exist or it is one,
    OSError, naming ``path``, if it cannot be written.
    """
    _check_writable(Path(path), str(path))
    in_place = _in_place(Path(path))
    target = Path(os.path.realpath(path))
    part = None
    try:
        with _beside(Path(tempfile.gettempdir()) / target.name if in_place else target) as part:
            yield part
            if in_place:
                stream = _stream(path)  # which goes on where it is
                descriptor = os.open(path, os.O_WRONLY) if stream is None else os.dup(stream)
                with part.open("rb") as whole, os.fdopen(descriptor, "wb") as out:
                    shutil.copyfileobj(whole, out)
            else:
                with part.open("rb+") as written:
                    os.fsync(written.fileno())
                part.chmod(_mode(target))
                part.replace(target)
    except OSError as error:
        # The temporary name says nothing to a person.
        full = error.filename is None and error.errno in _FULL
        if part is None or full or error.filename in (part, str(part)):
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary file beside ``target``, locked while it is in use: one that is not is what a killed process left."""
    prefix = f".{target.name[:40]}."
    _remove_stale(target.parent, prefix)
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=_PART)
        with suppress(OSError):  # not every file system has locks; there nothing is taken for stale either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(name).exists():  # else another process found it before it was locked
            break
        os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(handle)


def _remove_stale(folder: Path, prefix: str) -> None:
    with suppress(OSError):  # a folder that may be written to and not be looked at
        for part in folder.iterdir():
            if re.fullmatch(re.escape(prefix) + r"[a-z0-9_]{8}" + re.escape(_PART), part.name):
                with suppress(OSError), part.open("rb+") as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while somebody writes it
                    part.unlink(missing_ok=True)


def _check_writable(path: Path, name: str) -> None:
    """Raise InputError unless ``path`` can become, or be overwritten as, a file."""
    if path.is_dir():
        which = "the current" if path == Path() else "a"
        raise InputError(f"{name}: is {which} folder; expected the name of a file to write")
    if path.exists() and not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise InputError(f"{name}: may not be written")
    if _in_place(path):
        return
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    there = _first_there(folder)
    if there.exists() and not there.is_dir():
        raise InputError(f"{name}: {there} is a file; expected a folder")
    if not folder.is_dir():
        raise InputError(f"{name}: the folder {folder} does not exist; make it first")
    _check_room(folder, name)


def _check_makeable(folder: Path, name: str) -> None:
    """Raise InputError unless ``folder`` is there, or can be made, and takes files."""
    there = _first_there(folder)
    if not there.is_dir():
        what = "a file" if there.exists() else "a link to what is not there"
        raise InputError(f"{name}: {'is' if there == folder else f'{there} is'} {what}; expected a folder")
    _check_room(there, name)


def _first_there(folder: Path) -> Path:
    """``folder``, or the nearest of those around it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _check_room(folder: Path, name: str) -> None:
    """Raise InputError unless a file can be made in ``folder``; permissions alone do not tell (/proc, a full disk)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{name}: the folder {folder} may not be written ({error.strerror})") from None


def _in_place(path: Path) -> bool:
    """Whether there is something that must not be replaced: no regular file, or where standard output goes."""
    return path.exists() and not path.is_dir() and (not path.is_file() or _stream(path) is not None)


def _stream(path: Name) -> int | None:
    """The descriptor of standard output or error if that is what ``path`` leads to."""
    for descriptor in (1, 2):
        try:
            if os.path.samestat(Path(path).stat(), os.fstat(descriptor)):
                return descriptor
        except OSError:  # closed
            continue
    return None


def _mode(target: Path) -> int:
    """Permissions as they are, or those of any new file: mkstemp makes private ones."""
    if target.exists():
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


def _within(path: Path, folder: Path) -> bool:
    """Whether ``path``, or what it leads to, lies in ``folder``, or what a name in that leads to is ``path``."""
    places = (os.path.realpath(path), Path(os.path.realpath(path.parent)) / path.name)
    top = os.path.realpath(folder)
    return any(Path(place).is_relative_to(top) for place in places) or any(_same(path, one) for one in folder.iterdir())
