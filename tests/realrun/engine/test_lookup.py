"""The look-up of prediction tables: every way finds what numpy finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from ground.errors import InputError
from realrun.calibrate.lookup_ways import error, ways
from realrun.calibrate.machine import Machine
from realrun.engine.lookup import eager


@st.composite
def look_ups(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Small whole numbers, so that products are exact and ties are many."""
    count, entries, dims = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 16))
    seed = draw(st.integers(0, 999))
    numbers = np.random.default_rng(seed).integers(-3, 4, (count * entries + 1, dims))
    bf16 = torch.tensor(numbers, dtype=torch.bfloat16)
    return bf16[:-1].reshape(count, entries, dims), bf16[-1], draw(st.integers(1, entries))


@settings(max_examples=50)
@given(look_ups())
def test_the_nearest_are_numpys(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tables, query, k = case
    scores = tables.float().numpy() @ query.float().numpy()
    best, entry = eager(tables, query, k)
    assert best.tolist() == (-np.sort(-scores, axis=1)[:, :k]).tolist()
    assert np.take_along_axis(scores, entry.numpy(), 1).tolist() == best.tolist()
    assert all(len(set(row)) == k for row in entry.tolist())
    assert error((best, entry), tables, query, k) == 0


def test_an_error_is_seen() -> None:
    draws = torch.Generator().manual_seed(0)
    tables, query = (torch.randn(*shape, generator=draws).bfloat16() for shape in ((2, 30, 8), (8,)))
    best, entry = eager(tables, query, 4)
    worst = (tables.float() @ query.float()).argmin(dim=1)
    wrong = entry.clone()
    wrong[:, 0] = worst
    assert error((best, wrong), tables, query, 4) > 0.1
    assert error((best * 2, entry), tables, query, 4) > 0.1
    assert error((best, entry[:, :1].expand(2, 4)), tables, query, 4) == float("inf")
    assert error((best * float("nan"), entry), tables, query, 4) == float("inf")


def test_shapes_that_do_not_fit_are_refused() -> None:
    tables, query = torch.zeros(2, 5, 8), torch.zeros(8)
    for case in ((tables, query[:4], 2), (tables[0], query, 2), (tables, query, 0), (tables, query, 6)):
        with pytest.raises(InputError, match="look-up: "):
            eager(*case)
    with pytest.raises(InputError, match="contiguous"):
        eager(tables.transpose(0, 1), query, 1)


def test_every_way_is_timed_against_the_bytes() -> None:
    found, floor = ways(Machine("cpu", 3), tables=2, entries=50, dims=32, k=4)
    assert floor > 0
    assert all(way.wrong < 1e-2 and way.alone.ns > 0 for way in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernels_find_the_same_on_a_gpu() -> None:
    found, _ = ways(Machine("cuda", 3), tables=2, entries=500, dims=1024)
    assert len(found) > 4
    assert all(way.wrong < (1e-2 if way.name.startswith("torch") else 1e-4) for way in found)
