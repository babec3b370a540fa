"""Write .npz files as ``numpy.savez_compressed`` does, on all processor cores: its one takes longer than a capture may.

An array is cut into blocks of a fixed size, each compressed with the end of the one before as its dictionary, and the
pieces stand one after another: together they are one deflate stream, which any reader reads. What is written does not
depend on the number of cores.
"""

import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import IO

import numpy as np

_BLOCK = 2**19  # bytes: enough that a piece's end, of which deflate makes little, does not count
_WINDOW = 2**15  # bytes that deflate looks back


def write_npz(handle: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` to an empty file that is open for writing; those of objects are refused by ValueError.

    Peak memory is the largest array once more.
    """
    with ThreadPoolExecutor() as pool, zipfile.ZipFile(handle, "w") as archive:
        for name, array in arrays.items():
            stream = BytesIO()
            np.lib.format.write_array(stream, array, allow_pickle=False)
            whole = stream.getbuffer()
            pieces = list(pool.map(partial(_piece, whole), range(0, len(whole), _BLOCK)))
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type, member.header_offset = zipfile.ZIP_DEFLATED, handle.tell()
            member.file_size, member.compress_size, member.CRC = len(whole), sum(map(len, pieces)), zlib.crc32(whole)
            handle.write(member.FileHeader())
            handle.writelines(pieces)
            archive.filelist.append(member)
            archive.start_dir = handle.tell()


def _piece(whole: memoryview, start: int) -> bytes:
    """The block of ``whole`` from ``start`` on, compressed so that the next piece may follow."""
    before = bytes(whole[max(0, start - _WINDOW) : start])
    last = start + _BLOCK >= len(whole)
    deflate = zlib.compressobj(wbits=-15, zdict=before) if before else zlib.compressobj(wbits=-15)
    return deflate.compress(whole[start : start + _BLOCK]) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
