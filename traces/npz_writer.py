"""Write .npz files as ``numpy.savez_compressed`` does, on all processor cores: its one takes longer than a capture may.

An array is cut into blocks of a fixed size, each compressed with the end of the one before as its dictionary, and the
pieces stand one after another: together they are one deflate stream, which any reader reads. What is written does not
depend on the number of cores.
"""

import os
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import IO

import numpy as np
from numpy.lib import format as npy

_BLOCK = 2**19  # bytes: enough that a piece's end, of which deflate makes little, does not count
_WINDOW = 2**15  # bytes that deflate looks back


def write_npz(
    handle: IO[bytes], arrays: Mapping[str, np.ndarray], seen: Callable[[float], None] = lambda share: None
) -> None:
    """Write ``arrays`` to an empty file that is open for writing; those of objects are refused by ValueError.

    Beside the arrays memory holds some blocks: one that lies in a file is never read whole. ``seen`` is told which
    share of all bytes is written, 0 to 1.
    """
    size, done = sum(array.nbytes for array in arrays.values()), 0
    with ThreadPoolExecutor() as pool, zipfile.ZipFile(handle, "w") as archive:
        for name, array in arrays.items():
            whole = _Stored(array)
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type, member.header_offset = zipfile.ZIP_DEFLATED, handle.tell()
            member.file_size, member.CRC = len(whole), 0
            handle.write(member.FileHeader())  # written again below, when all is known
            starts = range(0, len(whole), _BLOCK)
            for start, piece in zip(starts, _in_turn(pool, whole, starts), strict=True):
                member.CRC = zlib.crc32(whole.part(start, start + _BLOCK), member.CRC)
                member.compress_size += len(piece)
                handle.write(piece)
                seen(min((done + start) / size, 1.0))
            done += array.nbytes
            archive.start_dir = handle.tell()
            handle.seek(member.header_offset)
            handle.write(member.FileHeader())
            handle.seek(archive.start_dir)
            archive.filelist.append(member)


class _Stored:
    """An array as the bytes of an .npy, of which parts are made when they are asked for."""

    def __init__(self, array: np.ndarray) -> None:
        if array.dtype.hasobject:
            raise ValueError("Object arrays cannot be saved")
        header = npy.header_data_from_array_1_0(array)
        stream = BytesIO()
        npy.write_array_header_1_0(stream, header)
        data = array.T if header["fortran_order"] else np.ascontiguousarray(array)
        numbers = data.dtype.kind in "biufc" and data.size
        self._head = stream.getvalue()
        self._data = data.reshape(-1).view(np.uint8) if numbers else np.frombuffer(data.tobytes(), np.uint8)

    def __len__(self) -> int:
        return len(self._head) + len(self._data)

    def part(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to before ``stop``."""
        head = len(self._head)
        return self._head[start:stop] + self._data[max(0, start - head) : max(0, stop - head)].tobytes()


def _in_turn(pool: ThreadPoolExecutor, whole: _Stored, starts: range) -> Iterator[bytes]:
    """The pieces from ``starts`` on, in order; some are made ahead, so that all cores have work."""
    ahead = 4 * (os.cpu_count() or 1)
    made: deque[Future[bytes]] = deque()
    for start in starts:
        made.append(pool.submit(_piece, whole, start))
        if len(made) > ahead:
            yield made.popleft().result()
    for one in made:
        yield one.result()


def _piece(whole: _Stored, start: int) -> bytes:
    """The block of ``whole`` from ``start`` on, compressed so that the next piece may follow."""
    before = whole.part(max(0, start - _WINDOW), start)
    last = start + _BLOCK >= len(whole)
    deflate = zlib.compressobj(wbits=-15, zdict=before) if before else zlib.compressobj(wbits=-15)
    block = deflate.compress(whole.part(start, start + _BLOCK))
    return block + deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
