"""From a file to a report: what is learned from, what is charged, what memory is counted."""

from pathlib import Path

import numpy as np
import pytest

from sim.run.scene import plan_for, replay, scene
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta

H200 = {"hardware": "h200", "cache_size": "4"}


@pytest.fixture
def split_trace(tmp_path: Path) -> Path:
    """Profile sequences take experts 0 to 3, evaluation ones 4 to 7; prompts of 3 tokens at positions 0 to 2."""
    rng = np.random.default_rng(1)
    routes = rng.random((40, 2, 4)).argsort(axis=2)[:, :, :2] + np.repeat([0, 4], 20)[:, None, None]
    trace = make_trace(
        routes, n_experts=8, phase=([0] * 3 + [1] * 7) * 4, sequence=np.repeat([0, 1, 2, 3], 10).tolist(),
        split=["profile", "profile", "eval", "eval"], domain=["law"] * 4,
    )  # fmt: skip
    trace.meta["model"] |= toy_meta(2)
    path = tmp_path / "split.npz"
    trace.save(path)
    return path


@pytest.mark.parametrize("split", ["eval", "all"])
def test_policies_learn_from_the_profile_split_alone(split_trace: Path, split: str) -> None:
    here = scene(split_trace, split=split, **H200)
    values = plan_for(here, "popularity")[0].values
    assert values is not None
    counts = values.table.reshape(-1, 2, 8)
    assert counts[:, :, :4].sum() == 2 * 14 * 2, "every decode token of the profile, two experts at each of two layers"
    assert counts[:, :, 4:].sum() == 0, "nothing of the evaluation split"


def test_a_prefill_is_charged_for_its_own_tokens(split_trace: Path) -> None:
    here = scene(split_trace, **H200)
    prefill = here.work.schedule.phase == 0
    # By hand for 3 tokens on the toy model (hidden 64, 4 heads of 16, 2 of them for keys and values): all blocks are so
    # small that floors and launches decide; the LM head reads 100 x 64 weights of 2 bytes, 3 ns, after one launch.
    software = here.hardware.software
    floor_us = software.layer_floor_us.value + software.route_wait_us.value
    assert (here.work.layer_ns.reshape(-1, 2)[prefill] >= floor_us * 1e3 - 1).all()
    assert np.abs(here.work.head_ns[prefill] - (software.operation_us.value * 1e3 + 3)).max() <= 1
    longer = scene(split_trace, split="all", **H200)
    assert longer.work.layer_ns.min() == here.work.layer_ns.min(), "the same prompt costs the same among others"


@pytest.mark.parametrize(("batch", "tokens"), [(1, 10), (2, 20)])
def test_the_memory_of_keys_and_values_is_that_of_all_running_tokens(
    split_trace: Path, batch: int, tokens: int
) -> None:
    here = scene(split_trace, batch=batch, **H200)
    # Keys and values of 2 heads of 16, 2 bytes each, at 2 layers; two sequences of 10 tokens.
    assert replay(here, "lru").gpu_bytes["kv"] == tokens * 2 * 2 * 16 * 2 * 2
