"""Search among integer vectors: equal to brute force, to the bit for one row and many, ties to the smaller number."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.predictors.search import Index


@st.composite
def searches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Keys, queries and k; small values, so that equal and zero vectors abound."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys, queries, dims = draw(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 9)))
    most = draw(st.sampled_from([1, 2, 127]))
    drawn = [rng.integers(-most, most + 1, (n, dims)).astype(np.int8) for n in (keys, queries)]
    return drawn[0], drawn[1], draw(st.integers(1, 12))


def brute(index: Index, keys: np.ndarray, query: np.ndarray, k: int) -> list[tuple[int, float]]:
    """Nearest keys in Python's whole numbers, each with its cosine."""
    found = []
    for number, key in enumerate(keys.astype(int).tolist()):
        length = math.sqrt(sum(v * v for v in key))
        whole = [round(v * index.scale / length) if length else 0 for v in key]
        found.append((-sum(a * b for a, b in zip(query.astype(int).tolist(), whole, strict=True)), number))
    length = math.sqrt(sum(int(v) ** 2 for v in query)) * index.scale
    return [(number, max(-1.0, min(1.0, -score / length)) if length else 0.0) for score, number in sorted(found)[:k]]


@given(searches())
@settings(max_examples=200)
def test_it_finds_what_brute_force_finds(given: tuple[np.ndarray, np.ndarray, int]) -> None:
    keys, queries, k = given
    index = Index(keys)
    numbers, cosines = index.search(queries, k)
    assert numbers.shape == cosines.shape == (len(queries), min(k, len(keys)))
    for row, query in enumerate(queries):
        expected = brute(index, keys, query, k)
        assert numbers[row].tolist() == [number for number, _ in expected]
        assert cosines[row].tolist() == pytest.approx([cosine for _, cosine in expected], abs=1e-6)


@given(searches())
def test_a_machine_without_faiss_finds_the_same_bits(given: tuple[np.ndarray, np.ndarray, int]) -> None:
    keys, queries, k = given
    found = Index(keys).search(queries, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "faiss", None)
        without = Index(keys).search(queries, k)
    assert [part.tobytes() for part in found] == [part.tobytes() for part in without]


@given(searches())
def test_a_row_alone_and_among_many_gets_the_same_bits(given: tuple[np.ndarray, np.ndarray, int]) -> None:
    keys, queries, k = given
    index = Index(keys)
    many = np.concatenate([queries] * 40)  # beyond the number at which FAISS turns to matrix products
    numbers, cosines = index.search(many, k)
    for row in range(len(queries)):
        alone = index.search(queries[row : row + 1], k)
        for part, whole in zip(alone, (numbers, cosines), strict=True):
            assert part.tobytes() == whole[row : row + 1].tobytes() == whole[row + len(queries) :][:1].tobytes()


@given(st.integers(0, 2**32 - 1), st.integers(2, 60))
def test_cosines_are_within_the_stated_angle(seed: int, dims: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(-100, 101, (30, dims)).astype(np.int8)
    query = rng.integers(-100, 101, (1, dims)).astype(np.int8)
    index = Index(keys)
    numbers, cosines = index.search(query, 30)
    a, b = keys[numbers[0]].astype(float), query[0].astype(float)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b)
    true = np.divide(a @ b, lengths, out=np.zeros(30), where=lengths > 0)
    assert np.abs(cosines[0] - true).max() <= math.sqrt(dims) / 2 / index.scale + 1e-6


def test_no_cosine_leaves_its_range() -> None:
    """A key is rounded and may come out longer than it was: the cosine of a vector with itself was up to 1.00014."""
    keys = np.random.default_rng(0).integers(-127, 128, (200, 96)).astype(np.int8)
    _, cosine = Index(keys).search(np.concatenate([keys, -keys]), len(keys))
    assert cosine.max() == 1 and cosine.min() == -1


def test_fewer_keys_than_asked_for_are_all_there_is() -> None:
    """Seen in facebookresearch/faiss#2657, #1206, #1731:
    asking for more neighbours than there are returns -1, the last row.
    """
    numbers, _ = Index(np.array([[1, 0], [0, 1]], np.int8)).search(np.array([[3, 1]], np.int8), 4)
    assert numbers.tolist() == [[0, 1]]
    assert Index(np.zeros((0, 2), np.int8)).search(np.array([[3, 1]], np.int8), 4)[0].shape == (1, 0)


def test_identical_keys_come_in_their_order() -> None:
    keys = np.array([[2, 2]] * 5 + [[1, 1]] * 5, np.int8)  # all of one direction
    numbers, cosines = Index(keys).search(np.array([[7, 7], [0, 0], [-1, -1]], np.int8), 3)
    assert numbers.tolist() == [[0, 1, 2]] * 3
    assert cosines.tolist() == pytest.approx(np.array([[1.0] * 3, [0.0] * 3, [-1.0] * 3]), abs=1e-4)


def test_a_zero_vector_has_cosine_0_and_moves_nobody_else() -> None:
    """Seen in vlasky/sqlite-vec#8, HKUDS/LightRAG#3421: a vector of zeros made cosines NaN and spoilt the order."""
    keys = np.array([[1, 0], [0, 0], [1, 1], [0, 1]], np.int8)
    numbers, cosines = Index(keys).search(np.array([[9, 1]], np.int8), 4)
    assert numbers[0].tolist() == [0, 2, 3, 1]
    assert cosines[0, 3] == 0
    assert np.isfinite(cosines).all()
    without, _ = Index(keys[[0, 2, 3]]).search(np.array([[9, 1]], np.int8), 3)
    assert np.array([0, 2, 3])[without[0]].tolist() == numbers[0, :3].tolist()


def test_what_is_not_a_number_is_named_by_its_row() -> None:
    """Seen in langchain-ai/langchain#31822: embeddings of NaN pass, and the index then answers -1."""
    bad = np.zeros((3, 2), np.float32)
    bad[1, 0] = np.nan
    with pytest.raises(InputError, match="keys are float32, not finite in row 1; expected integers"):
        Index(bad)
    with pytest.raises(InputError, match="queries are float32, not finite in row 1"):
        Index(np.ones((1, 2), np.int8)).search(bad, 1)


def test_what_does_not_fit_is_refused() -> None:
    index = Index(np.ones((1, 2), np.int8), norm=10)
    with pytest.raises(InputError, match=r"a query of length 12\.7; expected at most 10\.0"):
        index.search(np.array([[9, 9]], np.int8), 1)
    with pytest.raises(InputError, match=r"queries are \(1, 3\); expected \(rows, 2\)"):
        index.search(np.ones((1, 3), np.int8), 1)
    with pytest.raises(InputError, match="too many to be exact; give a norm"):
        Index(np.ones((1, 2), np.int32))
