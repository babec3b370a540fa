"""Numbers that lie beside a record are the same, whichever part of them is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from traces.convert.sidecar import Sidecar, Softmax, Vectors


def short(values: np.ndarray) -> np.ndarray:
    """bfloat16 of numbers."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 45), st.integers(0, 45))
def test_a_part_is_the_same_as_that_of_the_whole(lengths: list[int], start: int, stop: int) -> None:
    rng = np.random.default_rng(sum(lengths))
    steps = [[short(rng.normal(size=(n, 4))) for _ in range(3)] for n in lengths]
    whole = np.concatenate([np.stack(layers, axis=1) for layers in steps]).astype("<u4") << 16
    vectors = Vectors("x", steps)
    assert vectors.shape == whole.shape and len(vectors) == len(whole)
    np.testing.assert_array_equal(vectors[start:stop], whole.view("<f4")[start:stop])
    shares = np.exp(whole.view("<f4").astype(float))
    shares /= shares.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(Softmax(vectors)[start:stop], shares[start:stop], atol=1e-6)


def test_what_is_not_finite_of_other_widths_or_cut_off_is_refused(tmp_path: Path) -> None:
    good: Any = short(np.ones((2, 4)))
    with pytest.raises(InputError, match="x: a value of rows 2 to 3 is not finite"):
        Vectors("x", [[good], [short(np.full((2, 4), np.inf))]])[2:4]
    with pytest.raises(InputError, match=r"x: records of \[3, 4\] values, expected one width"):
        Vectors("x", [[good], [good[:, :3]]])
    (tmp_path / "x.bin").write_bytes(good.tobytes())
    np.testing.assert_array_equal(Sidecar(tmp_path / "x.bin", "a").rows(8, (1, 4)), good[1:])
    with pytest.raises(InputError, match=r"x\.bin: ends at byte 16, expected 16 from 2"):
        Sidecar(tmp_path / "x.bin", "a").rows(2, (2, 4))
    with pytest.raises(InputError, match=r"y\.bin: cannot be read: .*; it lies beside a"):
        Sidecar(tmp_path / "y.bin", "a")
