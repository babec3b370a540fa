"""Files of the writer that compresses in parallel, read by numpy and zipfile."""

import io
import zipfile

import numpy as np
import pytest

import traces.npz_writer
from traces.npz_writer import write_npz

BLOCK = traces.npz_writer._BLOCK


def arrays():
    rng = np.random.default_rng(0)
    return {
        "meta": np.array('{"a": "é"}'),
        "empty": np.empty((0, 3), np.int16),
        "few": rng.integers(0, 4, 3 * BLOCK + 17).astype(np.uint8),
        "noise": rng.standard_normal(BLOCK // 2).astype(np.float16).reshape(-1, 4).T,
        "whole": np.zeros(BLOCK - 128, np.uint8),  # with its header of 128 bytes one block to the byte
        "words": np.array(["law", "code"]),
    }


def written(of):
    file = io.BytesIO()
    write_npz(file, of)
    return file.getvalue()


def test_what_is_written_is_what_numpy_and_zipfile_read():
    data = written(arrays())
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    with np.load(io.BytesIO(data)) as found:
        assert list(found) == list(arrays())
        for name, array in arrays().items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_files_are_equal_to_the_byte_and_hardly_larger_than_numpy_s():
    one, plain = written(arrays()), io.BytesIO()
    np.savez_compressed(plain, **arrays())
    assert one == written(arrays())
    assert len(one) < 1.01 * len(plain.getvalue())


def test_objects_are_refused():
    with pytest.raises(ValueError, match="Object arrays"):
        written({"bad": np.array([None])})
