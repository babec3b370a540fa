"""Arrays from files that others wrote: read without pickles, convert without wrapping."""

import contextlib
import hashlib
import lzma
import math
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ground.errors import InputError
from ground.files import check_regular
from ground.text import amount

# Everything that zipfile, zlib and NumPy's header parser have been seen to raise on damaged bytes.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, KeyError, IndexError, TypeError, struct.error,
    SyntaxError, tokenize.TokenError, NotImplementedError, RuntimeError, OverflowError, OSError,
)  # fmt: skip

PLENTY, MOST_PACKED = 256 * 2**20, 100
"""Bytes that any archive may unpack to, and how many times its packed size a larger one may. Real routing packs to a
quarter or a sixth; a thousandth is the most that the format can do, with bytes that are all the same."""


def shown(path: str | Path) -> str:
    """Text of a path for people and JSON: valid Unicode whatever bytes the path holds and whatever the locale."""
    try:
        return os.fsencode(path).decode("utf-8", "replace")
    except UnicodeEncodeError:  # a name that did not come from the system, under a locale that cannot hold it
        return str(path)


def read_arrays(
    path: str | Path, known: frozenset[str] | None = None, only: frozenset[str] | None = None
) -> tuple[dict[str, np.ndarray], str]:
    """Read every array of an .npz (or the one of an .npy, under the name ``""``) and the file's sha256.

    ``known`` limits the names an .npz may hold, ``only`` (None: all) the arrays that are read of it. Peak memory is the
    arrays as stored. The hash is that of the bytes that were read. Raises InputError, one line, for a file that is
    missing, no regular file, truncated, damaged, written to meanwhile, of another kind, that unpacks to far more than
    real routing does, or holds object arrays (never unpickled) or unknown names; the sizes that archive and headers
    state are compared before an array is made. Raises MemoryError, naming the file, if there is too little for it.
    """
    name = shown(path)
    try:
        check_regular(path)
        size = Path(path).stat().st_size
        handle = Path(path).open("rb")  # noqa: SIM115 (closed by the with below; only opening may fail here)
    except InputError:
        raise
    except IsADirectoryError:
        raise InputError(f"{name}: is a folder, expected an .npz file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    with handle:
        try:
            before = _sha256(handle)
            arrays = dict(_members(handle, name, known, only))
            if _sha256(handle) != before:
                raise InputError(f"{name}: changed while it was read; expected a file that nothing writes to")
            return arrays, before
        except InputError:
            raise
        except _DAMAGE as error:
            nature = "" if isinstance(error, OSError) else _nature(handle)
            reason = nature or str(error).split("\n")[0] or type(error).__name__
            raise InputError(f"{name} ({size} bytes): truncated or not an npz ({reason})") from None
        except MemoryError as error:
            raise MemoryError(f"{name}: {error}") from None


def _sha256(handle: IO[bytes]) -> str:
    """The hash of an open file, which is left at its start."""
    handle.seek(0)
    digest = hashlib.file_digest(handle, "sha256").hexdigest()  # type: ignore[arg-type]
    handle.seek(0)
    return digest


def _nature(handle: IO[bytes]) -> str:
    """What a file that is no archive of arrays seems to be; empty where nothing is known."""
    handle.seek(0)
    start = handle.read(4096)
    if not start:
        return "an empty file"
    if start[:1] == b"\x80":
        return "a pickle, as .pt and .pkl files are; pickles are never read: save arrays by numpy.savez"
    if start.lstrip()[:1] in (b"{", b"["):
        return "JSON text, as an engine answers; expected its routes as integer arrays"
    if re.fullmatch(rb"[A-Za-z0-9+/\s]{16,}=*\s*", start) and not start.strip().isalpha():
        return "base64 text, as an engine answers; expected its routes decoded, as integer arrays"
    return ""


def _members(
    handle: IO[bytes], name: str, known: frozenset[str] | None, only: frozenset[str] | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of an open .npz or .npy file."""
    start = handle.read(6)
    handle.seek(0)
    if start == npy.MAGIC_PREFIX:
        _check_size(handle, "", os.fstat(handle.fileno()).st_size)
        handle.seek(0)
        yield "", _array(handle, name, "")
        return
    with zipfile.ZipFile(handle) as archive:
        members = archive.namelist()
        if not members:
            raise InputError(f"{name}: an empty archive, expected .npy members")
        if any(member.endswith("data.pkl") for member in members):
            raise InputError(f"{name}: a PyTorch file (.pt), expected an .npz: save its tensors by numpy.savez")
        for member in members:
            array = member.removesuffix(".npy")
            if array == member:
                raise InputError(f"{name}: {member!r} is not an array, expected .npy members only")
            if known is not None and array not in known:
                hint = "records of other tools: python -m traces convert"
                raise InputError(f"{name}: unknown array {array!r}, expected those of a trace ({hint})")
            if members.count(member) > 1:
                raise InputError(f"{name}: array {array!r} is there twice")
        wanted = [one for one in archive.infolist() if only is None or one.filename.removesuffix(".npy") in only]
        packed, whole = sum(one.compress_size for one in wanted), sum(one.file_size for one in wanted)
        if whole > max(PLENTY, MOST_PACKED * packed):
            raise InputError(
                f"{name}: its {amount(packed)} unpack to {amount(whole)}; expected at most {MOST_PACKED} times as much"
            )
        for one in wanted:
            array = one.filename.removesuffix(".npy")
            with archive.open(one) as stream:
                _check_size(stream, array, one.file_size)
            with archive.open(one) as stream:
                yield array, _array(stream, name, array)


def _check_size(stream: IO[bytes], array: str, size: int) -> None:
    """Raise ValueError unless an .npy stream of ``size`` bytes has the shape that its header says."""
    version = npy.read_magic(stream)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read_header is None:  # of names of fields
        raise ValueError(f"array {array!r} is of .npy version {version}")
    shape, _, dtype = read_header(stream)
    stated = stream.tell() + math.prod(shape) * dtype.itemsize
    if stated != size and not dtype.hasobject:  # which is refused in words of its own
        raise ValueError(f"array {array!r} has {size} bytes, and {stated} by its header")


def _array(stream: IO[bytes], name: str, array: str) -> np.ndarray:
    """Read one .npy stream to its end, where an archive checks it; object arrays are refused by name, never read."""
    try:
        values: np.ndarray = npy.read_array(stream, allow_pickle=False)
    except ValueError as error:
        if "Object arrays" in str(error):
            raise InputError(f"{name}: array {array!r} holds Python objects; object arrays are not accepted") from None
        raise
    if stream.read(1):
        raise ValueError(f"array {array!r} is longer than its header says")
    return values


def integers(array: np.ndarray, dtype: Any, where: str) -> np.ndarray:
    """``array`` as native ``dtype``, copied in blocks of rows only where it differs; values are never wrapped.

    Raises InputError naming ``where``, the index and the value of the first one that does not fit.
    """
    dtype = np.dtype(dtype)
    if array.dtype.kind not in "iu":
        raise InputError(f"{where}: dtype {array.dtype}, expected integers")
    if array.dtype == dtype:
        return array
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if not np.can_cast(array.dtype, dtype) and array.size and (array.min() < low or array.max() > high):
        refuse(
            (array < low) | (array > high),
            lambda *index: f"{where}{at(*index)}: {array[index]} does not fit, expected {low} to {high}",
        )
    return array.astype(dtype)


def refuse(bad: np.ndarray, words: Callable[..., str]) -> None:
    """Raise InputError with the ``words`` for the index (one number an axis) of the first True of ``bad``, if any."""
    if bad.any():
        raise InputError(words(*(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))))


def at(*index: int) -> str:
    """Words for an index of a per-row array: row, then routed layer, then slot."""
    return "".join(f", {axis} {i}" for axis, i in zip(("row", "routed layer", "slot"), index, strict=False))


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Put the file's name before the message of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
