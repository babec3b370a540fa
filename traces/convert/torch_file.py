"""What a PyTorch file (.pt) holds, without torch and without running anything that the file says.

Such a file is a zip of a pickle and of the tensors' bytes. The pickle may name only what is listed here: tensors, NumPy
arrays and plain containers. Everything else is refused by name.
"""

import collections
import contextlib
import math
import mmap
import pickle
import pickletools
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from ground.errors import InputError
from traces.spool import Spool, give_back_pages_of

_STORAGES = {
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?", "BFloat16Storage": "bf16",
    "UntypedStorage": "u1",
}  # fmt: skip
_UNTYPED = {"uint16": "<u2", "uint32": "<u4", "uint64": "<u8"}  # of storages without a type of their own
_BEGINNING = 2**16
# What zipfile, pickle and NumPy have been seen to raise on damaged bytes.
_DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, EOFError, RecursionError,
    NotImplementedError, struct.error, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError,
)  # fmt: skip
_NAME = "array"  # a name that says nothing more
_KEPT = 2**12  # characters or bytes of a text that a pickle may refer to again
_STORED = 30  # bytes of a zip member's own header before its name


def read_torch(path: Path) -> Any:
    """The object of a .pt file, its tensors as read-only arrays mapped from the file (bfloat16 as float32).

    Raises InputError for objects of other kinds, and for a damaged file.
    """
    try:
        with path.open("rb") as handle, zipfile.ZipFile(handle) as archive:
            return _read(handle, archive)
    except _DAMAGE as error:
        if isinstance(error, InputError):
            raise InputError(f"{path.name}: {error}") from None
        reason = str(error).split("\n")[0][:80] or type(error).__name__
        raise InputError(f"{path.name}: a damaged PyTorch file ({reason})") from None


def _read(handle: IO[bytes], archive: zipfile.ZipFile) -> Any:
    (pickled,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise InputError("a PyTorch file of big-endian tensors, expected little-endian ones")
    for member in archive.infolist():  # read once, so that its checksum is tried
        with archive.open(member) as stream:
            while stream.read(2**20):
                pass
    mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    give_back_pages_of(mapped)
    with archive.open(pickled) as stream:
        plain = _Plain(stream, archive, folder, mapped)
        value = plain.load()
    return _whole(value, plain.spool.read())


def texts_in(path: Path) -> set[str]:
    """Texts at the beginning of a .pt file's pickle, its first keys among them; none where it is damaged."""
    found: set[str] = set()
    with contextlib.suppress(OSError, *_DAMAGE), zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        with archive.open(pickled) as stream:
            for _, text, _ in pickletools.genops(stream.read(_BEGINNING)):
                found |= {text} if isinstance(text, str) else set()
    return found


class _Storage:
    """The type of a tensor's bytes, as the pickle names it."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class _Memo(dict[int, Any]):
    """What a pickle may refer to again. An array's bytes it never does, and they may be larger than memory."""

    def __setitem__(self, key: int, value: Any) -> None:
        super().__setitem__(key, None if _is_large(value) else value)


def _is_large(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_large, value))
    return isinstance(value, str | bytes) and len(value) > _KEPT


class _Plain(pickle._Unpickler):  # the one in Python, whose memo can be replaced
    """Unpickles tensors, arrays and plain containers. The elements of arrays go into ``spool``."""

    def __init__(self, stream: IO[bytes], archive: zipfile.ZipFile, folder: str, mapped: mmap.mmap) -> None:
        super().__init__(stream)
        self._archive, self._folder, self._mapped = archive, folder, mapped
        self.memo, self.spool = _Memo(), Spool(np.uint8)

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle may name."""
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Storage(_STORAGES[name])
        if module == "torch" and name in _UNTYPED:
            return _Storage(_UNTYPED[name])
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            ("torch", "Size"): tuple,
            ("builtins", "set"): set,
            ("__builtin__", "set"): set,
            ("builtins", "bytes"): lambda: b"",  # of an array without elements
            ("__builtin__", "bytes"): lambda: b"",
            ("numpy", "ndarray"): _NAME,
            ("numpy", "dtype"): _Dtype,
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(self.spool),
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(self.spool),
            ("numpy._core.multiarray", "scalar"): _scalar,
            ("numpy.core.multiarray", "scalar"): _scalar,
            ("numpy._core.numeric", "_frombuffer"): lambda *state: _Array(self.spool).hold(*state),
            ("numpy.core.numeric", "_frombuffer"): lambda *state: _Array(self.spool).hold(*state),
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in known:
            raise InputError(
                f"holds {module}.{name}, expected tensors, arrays and plain containers: save those alone by torch.save"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The elements of a storage, mapped from the file."""
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise InputError(f"holds {kind!r:.40}, expected tensors")
        member = self._archive.getinfo(f"{self._folder}data/{key}")
        if member.compress_type != zipfile.ZIP_STORED:
            raise InputError("its tensors are compressed, expected a file of torch.save")
        at = member.header_offset
        at += _STORED + int.from_bytes(self._mapped[at + 26 : at + 28], "little")
        at += int.from_bytes(self._mapped[member.header_offset + 28 : member.header_offset + 30], "little")
        half = storage.dtype == "bf16"
        elements = np.frombuffer(self._mapped, "<u2" if half else storage.dtype, count, at)
        if elements.nbytes > member.file_size:
            raise InputError(f"a tensor of {elements.nbytes} bytes in {member.file_size}")
        return (elements.astype("<u4") << 16).view("<f4") if half else elements


def _tensor(storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else offset
    if offset < 0 or any(s < 0 for s in stride) or any(n < 0 for n in size) or (all(size) and last >= len(storage)):
        raise InputError(f"a tensor of shape {size} in {len(storage)} elements")
    whole = storage[offset:]
    return np.lib.stride_tricks.as_strided(whole, size, tuple(s * storage.itemsize for s in stride), writeable=False)


def _typed_tensor(
    storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], gradient: Any, hooks: Any,
    kind: _Storage, *_: Any,
) -> np.ndarray:  # fmt: skip
    return _tensor(storage.view(kind.dtype), offset, size, stride)


class _Dtype:
    """The type of a NumPy array's elements; only its name and its byte order are taken."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.dtype = np.dtype(str(name))
        if self.dtype.kind not in "biufSU":
            raise InputError(f"holds an array of {self.dtype}, expected numbers")

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """A NumPy array whose elements come with its state, and wait in a spool."""

    def __init__(self, spool: Spool) -> None:
        self._spool, self._at, self._bytes = spool, 0, 0
        self._dtype, self._order = np.dtype("u1"), "C"
        self._shape: tuple[int, ...] = (0,)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, data = state
        self.hold(data, kind, shape, "F" if by_column else "C")

    def hold(self, data: Any, kind: _Dtype, shape: tuple[int, ...], order: str, *_: Any) -> "_Array":
        """Keep the elements; raises ValueError if they are not as many as the shape says."""
        self._dtype, self._shape, self._order = kind.dtype, shape, order
        self._at, self._bytes = len(self._spool), len(data)
        if self._bytes != math.prod(shape) * kind.dtype.itemsize:
            raise ValueError(f"an array of shape {shape!s:.40} in {self._bytes} bytes")
        self._spool.add(np.frombuffer(data, np.uint8))
        return self

    def array(self, whole: np.ndarray) -> np.ndarray:
        """The array, of all that the spool holds."""
        part = whole[self._at : self._at + self._bytes].view(self._dtype)
        return part.reshape(self._shape, order=self._order)  # type: ignore[call-overload]


def _whole(value: Any, held: np.ndarray) -> Any:
    """The object with arrays in the place of what stood for them."""
    if isinstance(value, _Array):
        return value.array(held)
    if isinstance(value, dict):
        return {key: _whole(one, held) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(one if type(one) is int else _whole(one, held) for one in value)
    return value


def _scalar(kind: _Dtype, data: Any) -> Any:
    return np.frombuffer(data, kind.dtype, 1)[0].item()


def _encode(text: str, code: str = "latin1") -> bytes:
    return text.encode(code)
