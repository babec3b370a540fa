"""The arrays of an archive (.npz), of one array (.npy) or of a PyTorch file, by name."""

import zipfile
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ground.errors import InputError
from traces.arrays import read_arrays
from traces.convert.source import Source
from traces.convert.torch_file import read_torch
from traces.spool import Spool, give_back_pages_of

_LARGE = 2**25  # bytes of an array that is not read into memory
_CHUNK = 2**22


def opened(source: Source) -> dict[str, np.ndarray]:
    """The arrays; large ones lie in a file and not in memory. Raises InputError."""
    if source.nature == "torch":
        held: Any = read_torch(source.path)
        if not isinstance(held, Mapping):
            raise InputError(f"holds a {type(held).__name__}, expected named tensors")
        return {name: array for name, array in held.items() if isinstance(array, np.ndarray)}
    if source.nature == "npy" and source.path.stat().st_size > _LARGE:
        mapped = np.load(source.path, mmap_mode="r", allow_pickle=False)
        give_back_pages_of(mapped._mmap)
        return {"": mapped}
    large = _large(source)
    small = frozenset(source.arrays - set(large)) if large else None
    return read_arrays(source.path, only=small)[0] | large


def _large(source: Source) -> dict[str, np.ndarray]:
    """The large arrays of numbers in an archive, unpacked into files without a name."""
    found = {}
    if source.nature == "npz" and source.arrays:
        with zipfile.ZipFile(source.path) as archive:
            for member in archive.infolist():
                if member.file_size > _LARGE:
                    with archive.open(member) as stream:
                        array = _unpacked(stream)
                    if array is not None:
                        found[member.filename.removesuffix(".npy")] = array
    return found


def _unpacked(stream: IO[bytes]) -> np.ndarray | None:
    """The array of one .npy stream, read to its end, where an archive checks it; None of texts and objects."""
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        return None
    shape, by_column, dtype = readers[version](stream)
    if by_column or dtype.kind not in "biuf":
        return None
    spool = Spool(np.uint8)
    while chunk := stream.read(_CHUNK):
        spool.add(np.frombuffer(chunk, np.uint8))
    return spool.read().view(dtype).reshape(shape)


def check_others(arrays: Collection[str], wanted: tuple[str, ...]) -> list[str]:
    """A note that names the arrays which are no part of the record.

    Raises InputError if one is an array of any form, or nearly: it would be lost.
    """
    from traces.convert.forms import forms  # which are what calls this

    others = sorted(set(arrays) - set(wanted))
    known = {name for form in forms().values() for name in form.arrays}
    for name in others:
        if get_close_matches(name.lower(), known, cutoff=0.8):
            raise InputError(f"unknown array {name!r}, expected {', '.join(wanted)}")
    return [f"arrays that are no part of such a record were passed over: {', '.join(others):.200}"] if others else []
