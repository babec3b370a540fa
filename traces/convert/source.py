"""A file or folder that convert is given, and what its beginning tells, so that forms can be told apart."""

import csv
import re
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from ground.errors import InputError
from ground.files import check_regular
from traces.arrays import shown
from traces.convert.json_values import first_value
from traces.convert.torch_file import texts_in

_HEAD = 2**16
_MAGIC = (
    (b"\x93NUMPY", "npy"), (b"PK", "zip"), (b"PAR1", "parquet"), (b"GGUF", "gguf"), (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"BZh", "bzip2"), (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"\x89HDF", "HDF5"), (b"SQLite format 3\0", "SQLite"), (b"ARROW1", "Arrow"),
)  # fmt: skip
PACKED = ("gzip", "zstd", "xz", "bzip2", "7z", "tar")
_BASE64 = re.compile(rb"[A-Za-z0-9+/\s]{16,}=*\s*")


class Source:
    """One file or folder. What it is is found when it is asked for; nothing of it is kept."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.name = shown(path)
        check_regular(path)
        self._handles: list[IO[bytes]] = []

    @cached_property
    def head(self) -> bytes:
        """The first bytes of a file; none of a folder."""
        if self.path.is_dir():
            return b""
        try:
            with self.path.open("rb") as handle:
                return handle.read(_HEAD)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{self.name}: cannot be read: {reason}") from None

    @cached_property
    def nature(self) -> str:
        """What it is: folder, npy, npz, torch, pickle, parquet, gguf, json, base64, csv, text, binary, empty, or the
        name of what it is packed or stored with.
        """
        head = self.head
        if self.path.is_dir():
            return "folder"
        for start, nature in _MAGIC:
            if head.startswith(start):
                return nature if nature != "zip" else "torch" if self._members_end("data.pkl") else "npz"
        if not head:
            return "empty"
        if head[:1] == b"\x80":
            return "pickle"
        if re.match(rb".{4}\0{4}\{", head, re.DOTALL):
            return "safetensors"
        if head[257:262] == b"ustar":
            return "tar"
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if text[:1] in (b"{", b"["):
            return "json"
        if _BASE64.fullmatch(head) and not head.strip().isalpha() and not head.strip().isdigit():
            return "base64"
        if b"\0" in head or not _is_text(head):
            return "binary"
        first = next((line for line in text.splitlines() if line[:1] != b"#"), b"")
        return "csv" if b"," in first and all(map(bytes.strip, first.split(b","))) else "text"

    def _members_end(self, name: str) -> bool:
        return any(member.endswith(name) for member in self.members)

    @cached_property
    def members(self) -> frozenset[str]:
        """Names of a zip's members; none where it is damaged."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                return frozenset(archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return frozenset()

    @cached_property
    def arrays(self) -> frozenset[str]:
        """Names of the arrays of an .npz; an .npy has one without a name."""
        if self.nature == "npy":
            return frozenset({""})
        return frozenset(m.removesuffix(".npy") for m in self.members) if self.nature == "npz" else frozenset()

    @cached_property
    def torch_keys(self) -> frozenset[str]:
        """The first keys of what a PyTorch file holds, found without reading its tensors."""
        return frozenset(texts_in(self.path)) if self.nature == "torch" else frozenset()

    @cached_property
    def value(self) -> Any:
        """The first value of a JSON text; None of anything else."""
        return first_value(self.path) if self.nature == "json" else None

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the first value of a JSON text, if it is an object."""
        return frozenset(self.value) if isinstance(self.value, dict) else frozenset()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a parquet file or a CSV text. Raises ModuleNotFoundError without pyarrow."""
        if self.nature == "parquet":
            return parquet_columns(self.path)
        if self.nature != "csv":
            return ()
        lines = self.head.decode("utf-8", "replace").splitlines()
        return tuple(next(csv.reader([line for line in lines if line[:1] != "#"]), ()))

    @property
    def files(self) -> list[Path]:
        """The file, or all files of the folder and of its inner folders, but for hidden ones."""
        if self.nature != "folder":
            return [self.path]
        return [file for file in sorted(self.path.rglob("*")) if file.is_file() and file.name[:1] != "."]

    def open(self, path: Path | None = None) -> IO[bytes]:
        """The file, or one of the folder, opened for reading; how far it has been read is counted in `share`."""
        self._handles.append((path or self.path).open("rb"))
        return self._handles[-1]

    def inside(self, pattern: str) -> list[Path]:
        """Files of a folder whose names match, in the order of the numbers in their names."""
        return sorted((path for path in self.path.glob(pattern) if path.is_file()), key=by_number)

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def share(self) -> float:
        """How much of the opened files has been read, 0 to 1: none before they are opened, all once they are closed."""
        read: dict[str, int] = {}
        for handle in self._handles:
            if not handle.closed:
                read[handle.name] = max(read.get(handle.name, 0), handle.tell())
        if not read:
            return float(bool(self._handles))
        return sum(read.values()) / max(sum(Path(name).stat().st_size for name in read), 1)


def _is_text(head: bytes) -> bool:
    """Whether bytes are UTF-8, but for a letter that is cut off at their end."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def by_number(path: Path) -> tuple[Any, ...]:
    """A key that sorts names with numbers in them by these."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name))


def parquet_columns(path: Path) -> tuple[str, ...]:
    """Names of the columns of a parquet file. Raises ModuleNotFoundError without pyarrow, InputError if damaged."""
    import pyarrow.parquet

    try:
        return tuple(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        raise InputError(f"a damaged parquet file ({str(error).splitlines()[0]:.80})") from None


def expanded(paths: list[str | Path], takes_whole: Any) -> Iterator[Source]:
    """Sources of these paths: a folder that no form takes whole stands for its files, those of inner folders too."""
    for path in paths:
        source = Source(path)
        if source.nature != "folder" or takes_whole(source):
            yield source
            continue
        if not source.files:
            raise InputError(f"{source.name}: an empty folder, expected records")
        yield from map(Source, source.files)
