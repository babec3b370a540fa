"""Expert ids and routes in a trace: every type that holds them, none that would wrap, every shape of a route."""

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.strategies import assert_same, make_trace
from tests.support.trace_files import full_trace, stored
from traces.statistics.info import describe
from traces.trace import Trace

# --- K02 dtypes ---


def test_g02_1_512_experts_keep_their_ids(tmp_path):
    trace = make_trace([[300, 511], [44, 255]], n_experts=512)
    trace.save(tmp_path / "wide.npz")
    loaded = Trace.load(tmp_path / "wide.npz")
    assert loaded.experts.tolist() == [[[300, 511]], [[44, 255]]]
    assert describe(loaded)["distinct_experts"]["used"] == 4
    with np.load(tmp_path / "wide.npz") as archive:
        assert archive["experts"].dtype.itemsize >= 2


def test_g02_2_minus_one_in_unsigned_8_bits_is_not_expert_255(tmp_path):
    arrays = stored(make_trace([0, 1, 2, 2, 2], n_experts=256))
    arrays["experts"] = np.array([0, 1, -1, -1, -1]).astype(np.uint8).reshape(5, 1, 1)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 2, routed layer 0, slot 0: 255 in 8 bits may be -1"):
        Trace.load(tmp_path / "t.npz")


def test_g02_3_joining_narrow_and_wide_turns_keeps_id_300(tmp_path):
    one, two = stored(make_trace([199, 200], n_experts=512)), stored(make_trace([300, 7], n_experts=512))
    one["experts"] = one["experts"].astype(np.uint8)
    two["sequence_id"] = np.array(["later"])
    np.savez(tmp_path / "1.npz", **one)
    np.savez(tmp_path / "2.npz", **two)
    first = Trace.load(tmp_path / "1.npz")
    assert any("8 bits" in note for note in first.meta["notes"])
    joined = Trace.concat([first, Trace.load(tmp_path / "2.npz")])
    assert joined.experts.ravel().tolist() == [199, 200, 300, 7]


def test_g02_4_signed_8_bits_are_refused_by_row_and_layer(tmp_path):
    arrays = stored(make_trace([[[0], [1]], [[2], [3]]], n_experts=256))
    arrays["experts"] = np.array([[[0], [1]], [[2], [-56]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 1, routed layer 1, slot 0: expert -56, expected -1 to 255"):
        Trace.load(tmp_path / "t.npz")
    arrays["experts"] = np.array([[[0], [1]], [[2], [-1]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="-1 in 8 bits may be expert 255"):
        Trace.load(tmp_path / "t.npz")


def test_g02_5_big_endian_equals_little_endian(tmp_path):
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


def test_g09_1_float_embeddings_are_refused(tmp_path):
    arrays = stored(full_trace())
    arrays["embeddings"] = np.full(arrays["embeddings"].shape, np.nan, np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="'embeddings': dtype float32, expected int8"):
        Trace.load(tmp_path / "t.npz")


# --- K06, K07, K08 routes ---


def test_g06_1_an_id_equal_to_the_number_of_experts():
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0, slot 1: expert 8, expected -1 to 7"):
        make_trace([[0, 8]], n_experts=8)


def test_g06_2_the_same_expert_twice_is_refused():
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0: \[3, 3\] repeats an expert"):
        make_trace([[3, 3], [1, 2]], n_experts=4)


def test_g07_2_fewer_experts_than_slots():
    trace = make_trace([[0, -1, -1, -1], [3, 2, 1, 0], [-1] * 4, [-1, 2, -1, 1]], n_experts=4)
    facts = describe(trace)
    assert facts["activations"] == 7 and facts["none_ids"] == 9


def test_g07_3_routes_without_a_slot_axis_are_top_1(tmp_path):
    arrays = stored(make_trace([[[0], [1]], [[2], [0]]], n_experts=3))
    arrays["experts"] = arrays["experts"][:, :, 0]
    arrays["gates"] = np.ones((2, 2), np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.top_k == 1 and trace.experts.tolist() == [[[0], [1]], [[2], [0]]]
    assert trace.gates.tolist() == [[[1], [1]], [[1], [1]]]


def test_g08_1_a_prompt_of_no_tokens_is_named(tmp_path):
    arrays = stored(make_trace([0, 1, 2], n_experts=3, sequence=[0, 1, 2]))
    arrays["sequence"] = np.array([0, 0, 2], np.int32)
    arrays["position"] = np.array([0, 1, 0], np.int32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"sequence 1 \('s1'\) has no rows \(a prompt of 0 tokens\)"):
        Trace.load(tmp_path / "t.npz")


@pytest.mark.parametrize("sequences", [0, 1])
def test_g08_1_a_trace_without_rows_is_refused(sequences, tmp_path):
    arrays = stored(make_trace([0], n_experts=2))
    for name in ("experts", "token", "sequence", "position", "phase"):
        arrays[name] = arrays[name][:0]
    for name in ("domain", "split", "sequence_id"):
        arrays[name] = arrays[name][:sequences]
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="no rows" if sequences else "no sequence"):
        Trace.load(tmp_path / "t.npz")
