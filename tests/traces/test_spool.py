"""Rows that wait in a file come back as they were, also while their pages are given back."""

import gc
import time

import numpy as np
import pytest

from traces.spool import _READ, Spool, pages_given_back


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.float32])
def test_rows_come_back_as_they_were(dtype, tmp_path):
    parts = [np.arange(n * 6).reshape(n, 2, 3).astype(dtype) for n in (3, 0, 5)]
    spool = Spool(dtype, tmp_path)
    for part in parts:
        spool.add(part[::-1])
    assert len(spool) == 8
    np.testing.assert_array_equal(spool.read(), np.concatenate([part[::-1] for part in parts]))
    assert list(tmp_path.iterdir()) == []
    assert Spool(dtype).read().shape == (0, 0)


def test_rows_stay_while_their_pages_are_given_back_and_maps_are_forgotten_with_their_arrays():
    spool = Spool(np.int16)
    spool.add(np.arange(2**16).astype(np.int16))
    rows = np.ascontiguousarray(spool.read().view(np.uint16).reshape(2, -1))
    del spool
    gc.collect()
    with pages_given_back():
        for _ in range(4):
            np.testing.assert_array_equal(rows.ravel(), np.arange(2**16))
            time.sleep(0.03)
        assert len(_READ) >= 1
    before = len(_READ)
    del rows
    gc.collect()
    assert len(_READ) == before - 1
