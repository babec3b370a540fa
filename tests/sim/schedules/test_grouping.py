"""Splitting the tokens of two batches by their routes, against the optimum found in a plainer way."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.schedules.grouping import MOST_EXACT, SPLITS, exact, kmeans, needed_by


@st.composite
def rounds(draw: st.DrawFn, most: int = 8) -> tuple[np.ndarray, int, np.ndarray, int]:
    """Paths (n, D), the size of the first group, a present split of that size and a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, width = draw(st.integers(2, most)), draw(st.integers(1, 12))
    kinds = rng.random((2, width)) < draw(st.sampled_from([0.0, 0.2, 0.6]))
    paths = kinds[rng.integers(0, 2, n)] ^ (rng.random((n, width)) < draw(st.sampled_from([0.0, 0.1, 0.5])))
    size = (n + 1) // 2
    present = np.zeros(n, bool)
    present[rng.permutation(n)[:size]] = True
    return paths, size, present, draw(st.integers(0, 2**16))


def union(paths: np.ndarray, members: list[int]) -> int:
    return len({place for token in members for place in np.flatnonzero(paths[token]).tolist()})


@given(rounds())
def test_exact_is_the_best_of_all_splits(given: tuple[np.ndarray, int, np.ndarray, int]) -> None:
    paths, size, _, seed = given
    n = len(paths)
    best = min(
        union(paths, list(one)) + union(paths, [token for token in range(n) if token not in one])
        for one in combinations(range(n), size)
    )
    found = exact(paths, size, np.random.default_rng(seed))
    assert found.sum() == size
    assert needed_by(paths, found) == best


@given(rounds(most=12), st.sampled_from(sorted(SPLITS)))
def test_every_split_is_equal_and_drawn_from_its_seed_alone(
    given: tuple[np.ndarray, int, np.ndarray, int], name: str
) -> None:
    paths, size, present, seed = given
    one, other = (SPLITS[name](paths, size, np.random.default_rng(seed), present) for _ in range(2))
    assert one.dtype == bool
    assert one.shape == (len(paths),)
    assert one.sum() == size
    np.testing.assert_array_equal(one, other)


@given(rounds(most=12))
def test_two_means_are_never_better_than_the_optimum_nor_worse_than_what_is_there(
    given: tuple[np.ndarray, int, np.ndarray, int],
) -> None:
    paths, size, present, seed = given
    rng = np.random.default_rng(seed)
    found = needed_by(paths, kmeans(paths, size, rng, present))
    assert needed_by(paths, exact(paths, size, rng)) <= found <= needed_by(paths, present)


@pytest.mark.parametrize("split", [kmeans, exact])
def test_tokens_of_two_kinds_come_apart(split: object) -> None:
    kind = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    paths = np.repeat(np.eye(2, dtype=bool), 6, axis=1)[kind]
    first = split(paths, 4, np.random.default_rng(0))  # type: ignore[operator]
    assert needed_by(paths, first) == 12
    assert len(set(kind[first])) == 1


@pytest.mark.parametrize("split", [kmeans, exact])
def test_a_split_that_is_as_good_stays(split: object) -> None:
    paths, present = np.ones((6, 4), bool), np.array([False, True, False, True, True, False])
    np.testing.assert_array_equal(split(paths, 3, np.random.default_rng(0), present), present)  # type: ignore[operator]


def test_too_many_tokens_to_try_all_splits() -> None:
    with pytest.raises(InputError, match="17 tokens of two batches; expected at most 16, as of --batch 8"):
        exact(np.ones((MOST_EXACT + 1, 3), bool), 9, np.random.default_rng(0))
