"""The pieces that an expert is copied in."""

from hypothesis import example, given
from hypothesis import strategies as st

from sim.machine.hardware import Hardware
from sim.machine.pieces import PIECE_BYTES, SMALL_BYTES, goes_whole, pieces_of
from sim.workload import batched, workload
from tests.support.strategies import make_trace
from tests.support.worlds import toy_model
from traces.models.known import model_spec


@given(st.integers(1, 2**36), st.integers(1, 3))
@example(SMALL_BYTES, 3)
@example(SMALL_BYTES + 1, 3)
@example(3 * PIECE_BYTES, 3)
@example(3 * PIECE_BYTES + 1, 3)
def test_an_expert_is_whole_or_in_as_few_equal_pieces_of_its_matrices_as_are_at_most_8_mib(
    size: int, matrices: int
) -> None:
    pieces = pieces_of(size, matrices)
    assert (pieces == 1) if goes_whole(size) else (pieces % matrices == 0)
    if pieces > 1:
        assert size <= pieces * PIECE_BYTES
        fewer = pieces - matrices
        assert fewer == 0 or size > fewer * PIECE_BYTES, "fewer would do"


def test_a_matrix_of_mixtral_takes_fourteen_and_an_expert_of_qwen3_none() -> None:
    pieces = {}
    for name in ("mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b"):
        spec = model_spec(name)
        pieces[name] = pieces_of(spec.expert_bytes[0], spec.expert_matrices)
    assert pieces == {"mixtral-8x7b": 3 * 14, "phi-3.5-moe": 3 * 7, "qwen1.5-moe-a2.7b": 3, "qwen3-30b-a3b": 1}


def test_a_workload_is_in_the_pieces_of_its_largest_expert() -> None:
    trace = make_trace([[[0], [1]]], n_experts=2)
    model = toy_model(2, 2, 1, (2 * PIECE_BYTES, 30 * PIECE_BYTES))
    assert workload(trace, model, Hardware.load("l40"), batched(trace, 1)).chunks == 30
