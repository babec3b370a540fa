"""Expert ids and routes in a trace: every type that holds them, none that would wrap, every shape of a route."""

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.strategies import assert_same, make_trace
from tests.support.trace_files import full_trace, stored
from traces.statistics.info import describe
from traces.trace import Trace

# --- dtypes ---


def test_ids_of_512_experts_are_kept(tmp_path):
    """Seen in PrimeIntellect-ai/prime-rl#3051: ids of a model of 512 experts were packed into 8 bits."""
    trace = make_trace([[300, 511], [44, 255]], n_experts=512)
    trace.save(tmp_path / "wide.npz")
    loaded = Trace.load(tmp_path / "wide.npz")
    assert loaded.experts.tolist() == [[[300, 511]], [[44, 255]]]
    assert describe(loaded)["distinct_experts"]["used"] == 4
    with np.load(tmp_path / "wide.npz") as archive:
        assert archive["experts"].dtype.itemsize >= 2


def test_minus_one_in_unsigned_8_bits_is_not_expert_255(tmp_path):
    """Seen in sgl-project/sglang#9499: filler of -1 in an unsigned 8-bit buffer reads as expert 255."""
    arrays = stored(make_trace([0, 1, 2, 2, 2], n_experts=256))
    arrays["experts"] = np.array([0, 1, -1, -1, -1]).astype(np.uint8).reshape(5, 1, 1)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 2, routed layer 0, slot 0: 255 in 8 bits may be -1"):
        Trace.load(tmp_path / "t.npz")


def test_joining_narrow_and_wide_turns_keeps_id_300(tmp_path):
    """Seen in PrimeIntellect-ai/prime-rl#2487: each turn has its own narrow type, and joining them cut later ids."""
    one, two = stored(make_trace([199, 200], n_experts=512)), stored(make_trace([300, 7], n_experts=512))
    one["experts"] = one["experts"].astype(np.uint8)
    two["sequence_id"] = np.array(["later"])
    np.savez(tmp_path / "1.npz", **one)
    np.savez(tmp_path / "2.npz", **two)
    first = Trace.load(tmp_path / "1.npz")
    assert any("8 bits" in note for note in first.meta["notes"])
    joined = Trace.concat([first, Trace.load(tmp_path / "2.npz")])
    assert joined.experts.ravel().tolist() == [199, 200, 300, 7]


def test_signed_8_bits_are_refused_by_row_and_layer(tmp_path):
    """Seen in verl-project/verl#7880: ids of 128 to 255 are negative in signed 8 bits."""
    arrays = stored(make_trace([[[0], [1]], [[2], [3]]], n_experts=256))
    arrays["experts"] = np.array([[[0], [1]], [[2], [-56]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 1, routed layer 1, slot 0: expert -56, expected -1 to 255"):
        Trace.load(tmp_path / "t.npz")
    arrays["experts"] = np.array([[[0], [1]], [[2], [-1]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="-1 in 8 bits may be expert 255"):
        Trace.load(tmp_path / "t.npz")


def test_big_endian_equals_little_endian(tmp_path):
    """Seen in pytorch/pytorch#3671, cositools/cosipy#636: big-endian arrays were read as garbage."""
    trace = full_trace()
    arrays = {n: a if n == "meta" else a.astype(a.dtype.newbyteorder(">")) for n, a in stored(trace).items()}
    arrays["gates"] = trace.gates.astype(">f4")
    arrays["experts"] = trace.experts.astype(">i8")
    np.savez(tmp_path / "t.npz", **arrays)
    assert_same(Trace.load(tmp_path / "t.npz"), trace)


@pytest.mark.parametrize(
    ("array", "dtype", "value", "message"),
    [
        ("experts", np.int64, 2**16 + 1, r"'experts', row 0, routed layer 0, slot 0: 65537 does not fit"),
        ("token", np.uint64, 2**40, r"'token', row 0: 1099511627776 does not fit"),
        ("phase", np.int32, 256, r"'phase', row 0: 256 does not fit"),
        ("gates", np.float32, 1e6, r"'gates', row 0, routed layer 0, slot 0: 1000000.0 does not fit in float16"),
        ("position", np.float64, 0, r"'position': dtype float64, expected integers"),
    ],
)
def test_values_are_never_wrapped(array, dtype, value, message, tmp_path):
    arrays = stored(full_trace())
    arrays[array] = arrays[array].astype(dtype)
    arrays[array].flat[0] = value
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=message):
        Trace.load(tmp_path / "t.npz")


def test_float_embeddings_are_refused(tmp_path):
    """Seen in langchain-ai/langchain#31822: embeddings of NaN pass, and the index then answers -1."""
    arrays = stored(full_trace())
    arrays["embeddings"] = np.full(arrays["embeddings"].shape, np.nan, np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="'embeddings': dtype float32, expected int8"):
        Trace.load(tmp_path / "t.npz")


# --- routes ---


def test_an_id_equal_to_the_number_of_experts_is_refused():
    """Seen in sgl-project/sglang#30079, lightseekorg/tokenspeed#1461:
    a router of NaN returned the number of experts as an id.
    """
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0, slot 1: expert 8, expected -1 to 7"):
        make_trace([[0, 8]], n_experts=8)


def test_the_same_expert_twice_is_refused():
    """Seen in vllm-project/vllm#18343: a row held the same expert twice."""
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0: \[3, 3\] repeats an expert"):
        make_trace([[3, 3], [1, 2]], n_experts=4)


def test_a_route_may_hold_fewer_experts_than_slots():
    """Seen in DynMoE (LINs-lab/DynMoE): the number of experts differs by token."""
    trace = make_trace([[0, -1, -1, -1], [3, 2, 1, 0], [-1] * 4, [-1, 2, -1, 1]], n_experts=4)
    facts = describe(trace)
    assert facts["activations"] == 7 and facts["none_ids"] == 9


def test_routes_without_a_slot_axis_are_top_1(tmp_path):
    """Seen in jingyaogong/minimind#858: top 1 is stored as a special case."""
    arrays = stored(make_trace([[[0], [1]], [[2], [0]]], n_experts=3))
    arrays["experts"] = arrays["experts"][:, :, 0]
    arrays["gates"] = np.ones((2, 2), np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.top_k == 1 and trace.experts.tolist() == [[[0], [1]], [[2], [0]]]
    assert trace.gates.tolist() == [[[1], [1]], [[1], [1]]]


def test_a_prompt_of_no_tokens_is_named(tmp_path):
    """Seen in inference-sim/inference-sim#1301: prompts of no tokens gave latencies without meaning."""
    arrays = stored(make_trace([0, 1, 2], n_experts=3, sequence=[0, 1, 2]))
    arrays["sequence"] = np.array([0, 0, 2], np.int32)
    arrays["position"] = np.array([0, 1, 0], np.int32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"sequence 1 \('s1'\) has no rows \(a prompt of 0 tokens\)"):
        Trace.load(tmp_path / "t.npz")


@pytest.mark.parametrize("sequences", [0, 1])
def test_a_trace_without_rows_is_refused(sequences, tmp_path):
    """Seen in inference-sim/inference-sim#1301: prompts of no tokens gave latencies without meaning."""
    arrays = stored(make_trace([0], n_experts=2))
    for name in ("experts", "token", "sequence", "position", "phase"):
        arrays[name] = arrays[name][:0]
    for name in ("domain", "split", "sequence_id"):
        arrays[name] = arrays[name][:sequences]
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="no rows" if sequences else "no sequence"):
        Trace.load(tmp_path / "t.npz")
