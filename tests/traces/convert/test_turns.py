"""Prompts, and turns of a conversation that bring earlier rows again."""

from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.records import notes, routes


def test_a_prompt_of_no_tokens_is_named(serve):
    """Seen in inference-sim/inference-sim#1301: prompts of no tokens gave latencies without meaning."""
    with pytest.raises(InputError, match=r"'prompt_lens', request 1: 0, a prompt of 0 tokens, expected 1 to 2"):
        serve(routes(6), offsets=np.array([0, 2, 4, 6]), prompt_lens=np.array([1, 0, 1]))


def test_a_prompt_longer_than_its_rows_is_refused(serve):
    with pytest.raises(InputError, match=r"'prompt_lens', request 0: 7, expected 1 to 6"):
        serve(routes(6), prompt_lens=np.array([7]))


@pytest.mark.parametrize("dummy", [0, -1])
@pytest.mark.parametrize("told", [True, False])
def test_the_dummy_row_of_a_turn_is_replaced_by_the_real_one(dummy, told, serve):
    """Seen in NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807:
    a turn's last row is a dummy, the next turn holds the real one.
    """
    real = routes(5)
    first = real[:3].copy()
    first[2] = dummy
    more: dict[str, Any] = {"conversation": np.array([7, 7])} if told else {}
    trace = serve(np.concatenate([first, real]), offsets=np.array([0, 3, 8]), **more)
    assert trace.n_sequences == 1
    np.testing.assert_array_equal(trace.experts, real)


def test_a_later_turn_that_starts_at_the_dummy_row(serve):
    """Seen in NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807:
    a turn's last row is a dummy, the next turn holds the real one.
    """
    real = routes(5)
    first = real[:3].copy()
    first[2] = routes(1, seed=5)
    trace = serve(
        np.concatenate([first, real[2:]]), offsets=np.array([0, 3, 6]), conversation=np.array([0, 0]),
        start=np.array([0, 2]), prompt_lens=np.array([2, 4]), token_ids=np.array([10, 11, 12, 12, 13, 14]),
    )  # fmt: skip
    np.testing.assert_array_equal(trace.experts, real)
    assert trace.token.tolist() == [10, 11, 12, 13, 14]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1]


def test_a_copied_last_row_is_dropped_where_tokens_show_it(serve):
    """Seen in NVIDIA-NeMo/RL#3485, PrimeIntellect-ai/prime-rl#1807:
    a turn's last row is a dummy, the next turn holds the real one.
    """
    ids = routes(6, layers=4)
    ids[5] = ids[4]
    trace = serve(ids, token_ids=np.arange(6))
    assert trace.n_rows == 5 and "copies of the row before" in notes(trace)
    assert serve(ids, token_ids=np.arange(7)).n_rows == 6


@pytest.mark.parametrize("told", [True, False])
def test_turns_that_contain_the_whole_history_count_once(told, serve):
    """Seen in strands-rl/strands-sglang#72: every turn returns the whole history, and joining counted it again."""
    ids = routes(9)
    more: dict[str, Any] = {"conversation": np.zeros(3, int)} if told else {}
    trace = serve(np.concatenate([ids[:4], ids[:7], ids]), offsets=np.array([0, 4, 11, 20]), **more)
    assert trace.n_rows == 9 and trace.n_sequences == 1
    np.testing.assert_array_equal(trace.experts, ids)
    assert "11 of 20 rows dropped" in notes(trace)


def test_turns_that_overlap_with_other_routes_are_refused(serve):
    """Seen in strands-rl/strands-sglang#72: every turn returns the whole history, and joining counted it again."""
    ids = np.concatenate([routes(4), routes(7, seed=3)])
    with pytest.raises(InputError, match="request 1: positions 0 to 3 overlap the turn before"):
        serve(ids, offsets=np.array([0, 4, 11]), conversation=np.array([0, 0]))
    with pytest.raises(InputError, match=r"'start', request 1: 5, expected at most 4"):
        serve(ids, offsets=np.array([0, 4, 11]), conversation=np.array([0, 0]), start=np.array([0, 5]))


def test_requests_that_share_a_prompt_stay_apart(serve):
    prompt, one, two = routes(6), routes(3, seed=1), routes(3, seed=2)
    trace = serve(np.concatenate([prompt, one, prompt, two]), offsets=np.array([0, 9, 18]))
    assert trace.n_sequences == 2 and trace.n_rows == 18


def test_token_ids_and_routes_of_other_lengths_are_refused(serve):
    """Seen in PrimeIntellect-ai/verifiers#1423: tokens were cut and routes were not."""
    with pytest.raises(InputError, match="'token_ids': 8 tokens for 10 rows of routed_experts, expected 10 or"):
        serve(routes(10), token_ids=np.arange(8))
