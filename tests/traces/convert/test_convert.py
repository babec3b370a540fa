"""Routing records of other tools: what becomes of them, and the faults that are refused or named."""

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.records import notes, routes
from traces.__main__ import main
from traces.assemble import split_in_order
from traces.convert.kinds import Given, convert_file
from traces.layer_numbers import parse_layers
from traces.plausibility import doubts
from traces.statistics.info import describe
from traces.statistics.usage import expert_counts
from traces.trace import Trace

# --- plain serving records ---


def test_one_request(serve):
    ids = routes(9)
    trace = serve(ids, prompt_lens=np.array([6]), token_ids=np.arange(10))
    np.testing.assert_array_equal(trace.experts, ids)
    assert trace.phase.tolist() == [0] * 6 + [1] * 3
    assert trace.token.tolist() == list(range(9))
    assert trace.split.tolist() == ["eval"] and trace.domain.tolist() == ["chat"]
    assert trace.meta["notes"] == []


def test_requests_one_after_another_and_padded_are_the_same_trace(serve):
    ids = routes(8)
    flat = serve(ids, offsets=np.array([0, 3, 8]), prompt_lens=np.array([2, 4]))
    padded = np.full((2, 6, 2, 2), 7, np.int16)
    padded[0, :3], padded[1, :5] = ids[:3], ids[3:]
    for name in ("lengths", "n_valid"):
        same = serve(padded, prompt_lens=np.array([2, 4]), **{name: np.array([3, 5])})
        np.testing.assert_array_equal(same.experts, flat.experts)
        assert same.sequence.tolist() == flat.sequence.tolist() == [0] * 3 + [1] * 5
        assert same.phase.tolist() == flat.phase.tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_an_npy_file_is_one_request(tmp_path):
    np.save(tmp_path / "code.npy", routes(5))
    given = Given(model="toy", experts=8, layers="3,5", domain="code", source="my code", licence="CC0-1.0")
    trace = convert_file(tmp_path / "code.npy", tmp_path / "o.npz", given=given)
    assert trace.layers.tolist() == [3, 5] and trace.domain.tolist() == ["code"]
    assert trace.meta["text"] == {"source": "my code", "licence": "CC0-1.0"}
    assert trace.meta["converted"]["kind"] == "serving" and len(trace.meta["converted"]["sha256"]) == 64


def test_a_known_model_is_told_by_its_shape(tmp_path):
    np.savez(tmp_path / "m.npz", routed_experts=routes(5, 16, 8, 64))
    trace = convert_file(tmp_path / "m.npz", tmp_path / "o.npz")
    assert trace.meta["model"] == {"name": "olmoe-1b-7b", "experts": 64, "top_k": 8}
    np.savez(tmp_path / "m.npz", routed_experts=routes(5, 32, 2, 8))
    with pytest.raises(InputError, match=r"fits mixtral-8x7b and phi-3\.5-moe, expected --model NAME"):
        convert_file(tmp_path / "m.npz", tmp_path / "o.npz")


def test_domains_are_split_70_to_30_in_order(serve):
    domain = np.array(["law"] * 10 + ["code"])
    trace = serve(routes(22), offsets=np.arange(0, 23, 2), domain=domain)
    assert trace.split.tolist() == ["profile"] * 7 + ["eval"] * 4
    assert split_in_order(np.array(["a", "b", "a"])).tolist() == ["profile", "eval", "eval"]


# --- dtypes ---


def test_ids_of_512_experts_are_kept(serve):
    """Seen in PrimeIntellect-ai/prime-rl#3051: ids of a model of 512 experts were packed into 8 bits."""
    trace = serve([[[300, 511]], [[44, 255]]], n_experts=512)
    assert trace.experts.ravel().tolist() == [300, 511, 44, 255]
    assert describe(trace)["distinct_experts"]["used"] == 4


@pytest.mark.parametrize("k", [1, 2])
def test_filler_of_minus_one_in_unsigned_8_bits_is_dropped(k, serve):
    """Seen in sgl-project/sglang#9499: filler of -1 in an unsigned 8-bit buffer reads as expert 255."""
    ids = np.full((5, 1, k), -1)
    ids[:2] = np.arange(2 * k).reshape(2, 1, k)
    for dtype in (np.uint8, np.int16):
        trace = serve(ids.astype(dtype), n_experts=256)
        assert trace.n_rows == 2 and expert_counts(trace.experts, trace.n_experts)[0, 255] == 0
        assert "3 filler rows at the end of requests were dropped" in notes(trace)


def test_expert_255_itself_is_kept(serve):
    """Seen in sgl-project/sglang#9499: filler of -1 in an unsigned 8-bit buffer reads as expert 255."""
    trace = serve(np.array([[[255, 1]], [[3, 255]]], np.uint8), n_experts=256)
    assert expert_counts(trace.experts, trace.n_experts)[0, 255] == 2


def test_a_wrapped_minus_one_inside_a_route_is_refused(serve):
    """Seen in sgl-project/sglang#9499: filler of -1 in an unsigned 8-bit buffer reads as expert 255."""
    with pytest.raises(InputError, match=r"row 1, routed layer 0, slot 1: 255 in a model of 8 experts is -1"):
        serve(np.array([[[0, 1]], [[2, -1]]]).astype(np.uint8))


def test_ids_of_8_bits_of_a_larger_model_are_noted(serve):
    """Seen in PrimeIntellect-ai/prime-rl#2487: each turn has its own narrow type, and joining them cut later ids."""
    assert "stored in 8 bits though the model has 512" in notes(serve(routes(5).astype(np.uint8), n_experts=512))


def test_signed_8_bits_are_refused_by_row_and_layer(serve):
    """Seen in verl-project/verl#7880: ids of 128 to 255 are negative in signed 8 bits."""
    ids = np.array([[[0], [1]], [[2], [200]]]).astype(np.int8)
    with pytest.raises(InputError, match=r"row 1, routed layer 1, slot 0: -56 is an id of 128 or more.*\(200\?\)"):
        serve(ids, n_experts=256)


def test_big_endian_ids_are_read(serve):
    """Seen in pytorch/pytorch#3671, cositools/cosipy#636: big-endian arrays were read as garbage."""
    ids = routes(6)
    np.testing.assert_array_equal(serve(ids.astype(">i8")).experts, ids)


def test_ids_that_do_not_fit_are_never_wrapped(serve):
    ids = routes(3).astype(np.int64)
    ids[2, 1, 0] = 2**16
    with pytest.raises(InputError, match=r"row 2, routed layer 1, slot 0: 65536 does not fit"):
        serve(ids)


def test_float_ids_are_refused(serve):
    with pytest.raises(InputError, match="'routed_experts': dtype float64, expected integers"):
        serve(routes(3).astype(float))


# --- padding and offsets ---


def test_rows_beyond_n_valid_are_not_counted(serve):
    """Seen in vllm-project/vllm#38128: padding of captured graphs and of data-parallel batches inflated counts."""
    ids = routes(16)
    trace = serve(ids, n_valid=np.int64(11))
    assert trace.n_rows == 11 and expert_counts(trace.experts, trace.n_experts).sum() == 11 * 2 * 2
    with pytest.raises(InputError, match=r"'n_valid', request 0: 17, expected 1 to 16"):
        serve(ids, n_valid=np.int64(17))


def test_identical_rows_at_the_end_are_named(serve):
    """Seen in vllm-project/vllm#38128: padding of captured graphs and of data-parallel batches inflated counts."""
    ids = np.concatenate([routes(11, layers=4), np.tile(routes(1, layers=4, seed=9), (5, 1, 1))])
    trace = serve(ids)
    assert trace.n_rows == 16 and doubts(trace)[0].startswith("5 of 16 rows are identical")
    assert doubts(serve(routes(16, layers=4))) == []


def test_offsets_must_rise_from_0_to_the_number_of_rows(serve):
    """Seen in vllm-project/vllm#43737: padding of each shard shifted every later slice."""
    ids = routes(8)
    assert np.bincount(serve(ids, offsets=np.array([0, 3, 8])).sequence).tolist() == [3, 5]
    for offsets, message in (
        ([0, 3, 7], "'offsets', entry 2: 7, expected 8"),
        ([0, 9, 8], "'offsets', entry 2: 8 after 9, not increasing"),
        ([1, 3, 8], "'offsets', entry 0: 1, expected 0"),
        ([0, 3, 3, 8], r"'offsets', entry 2: 3 after 3, sequence 1 has no rows \(a prompt of 0 tokens\)"),
        ([0], "'offsets': .*expected S . 1 integers"),
    ):
        with pytest.raises(InputError, match=message):
            serve(ids, offsets=np.array(offsets))


@pytest.mark.parametrize("value", [-1, 0])
def test_filler_rows_at_the_end_are_dropped_and_elsewhere_refused(value, serve):
    ids = np.tile(routes(8), (1, 1, 1))
    ids[6:] = value
    trace = serve(ids)
    assert trace.n_rows == 6 and "2 filler rows" in notes(trace)
    ids = routes(8)
    ids[2] = value
    with pytest.raises(InputError, match=r"row 2 \(request 0\): filler before real rows"):
        serve(ids)


def test_a_padded_array_without_lengths_loses_its_filler(serve):
    padded = np.zeros((2, 6, 2, 2), np.int16)
    padded[0, :3], padded[1, :5] = routes(3), routes(5, seed=1)
    assert np.bincount(serve(padded).sequence).tolist() == [3, 5]


def test_a_record_of_zeros_is_refused(serve):
    with pytest.raises(InputError, match=r"every id of 5 rows is 0 \(nothing was captured\)"):
        serve(np.zeros((5, 3, 2), np.int32))


def test_a_layer_of_zeros_is_refused(serve):
    ids = routes(5)
    ids[:, 1] = 0
    with pytest.raises(InputError, match=r"'routed_experts', row 0, routed layer 1: \[0, 0\] repeats an expert"):
        serve(ids)


def test_a_layer_that_never_changes_is_named(serve):
    ids = routes(20, layers=3)
    ids[:, 1] = [4, 6]
    assert doubts(serve(ids))[0].startswith("all rows take the same experts in layers 1:")


def test_an_id_out_of_range_is_refused(serve):
    """Seen in sgl-project/sglang#30079, lightseekorg/tokenspeed#1461:
    a router of NaN returned the number of experts as an id.
    """
    ids = routes(4)
    ids[3, 1, 1] = 8
    with pytest.raises(InputError, match=r"row 3, routed layer 1, slot 1: expert 8, expected -1 to 7 \(8 experts"):
        serve(ids)


def test_without_a_slot_axis_k_is_1(serve):
    """Seen in jingyaogong/minimind#858: top 1 is stored as a special case."""
    assert serve(np.array([[0, 1], [2, 3]])).experts.tolist() == [[[0], [1]], [[2], [3]]]


# --- layers ---


def test_layers_must_be_named(serve):
    """Seen in PrimeIntellect-ai/prime-rl#2738:
    routes of the MoE layers alone were read by the model's layer numbers.
    """
    assert serve(routes(4), layer_ids=[1, 3]).layers.tolist() == [1, 3]
    with pytest.raises(InputError, match="layers: toy is not known and the file has no layer_ids"):
        serve(routes(4), layer_ids=None)
    with pytest.raises(InputError, match=r"deepseek-v2-lite has dense layers \(1\).*--layers 1-26"):
        serve(routes(4, 26, 6, 64), layer_ids=None, n_experts=64, given=Given(model="deepseek-v2-lite"))


def test_a_buffer_of_all_layers_loses_the_dense_one_only_if_it_is_filler(serve):
    """Seen in PrimeIntellect-ai/prime-rl#2738:
    routes of the MoE layers alone were read by the model's layer numbers.
    """
    ids = routes(4, 27, 6, 64)
    ids[:, 0] = 0
    given = Given(model="deepseek-v2-lite", layers="1-26")
    trace = serve(ids, layer_ids=None, n_experts=None, given=given)
    np.testing.assert_array_equal(trace.experts, ids[:, 1:])
    assert trace.layers.tolist() == list(range(1, 27)) and "left out" in notes(trace)
    with pytest.raises(InputError, match="27 layers, expected 26"):
        serve(routes(4, 27, 6, 64), layer_ids=None, n_experts=None, given=given)


def test_layers_that_contradict_the_model_or_each_other(serve):
    mixtral = Given(model="mixtral-8x7b")
    with pytest.raises(InputError, match="16 recorded, expected the 32 routed layers of mixtral-8x7b"):
        serve(routes(4, 16), layer_ids=None, given=mixtral)
    with pytest.raises(InputError, match="expected all 32 routed layers of mixtral-8x7b, 0-31"):
        serve(routes(4, 16), given=mixtral)
    with pytest.raises(InputError, match="one layer only"):
        serve(routes(4, 1), given=mixtral)
    with pytest.raises(InputError, match="first two axes look swapped"):
        serve(routes(4, 32).swapaxes(0, 1), layer_ids=None, given=mixtral)
    with pytest.raises(InputError, match=r"'layer_ids': 1 after 3, expected increasing"):
        serve(routes(4), layer_ids=[3, 1])
    with pytest.raises(InputError, match="layers: the record says 0-1, but --layers says 1-2"):
        serve(routes(4), given=Given(model="toy", layers="1-2"))


def test_one_layer_of_an_unknown_model_is_noted(serve):
    assert "one layer only" in notes(serve(routes(4, 1)))


def test_experts_that_contradict(serve):
    with pytest.raises(InputError, match=r"experts: --experts says 4, the record says 8"):
        serve(routes(4), given=Given(model="toy", experts=4))
    with pytest.raises(InputError, match="mixtral-8x7b says 8"):
        serve(routes(4, 32), n_experts=16, given=Given(model="mixtral-8x7b"))
    with pytest.raises(InputError, match=r"does not say how many toy has, expected --experts N"):
        serve(routes(4), n_experts=None)


def test_layer_texts():
    assert parse_layers("1-3,7, 9-9") == [1, 2, 3, 7, 9]
    for text in ("", "a", "3-1", "1,1", "-1", "1;2", "1-2-3"):
        with pytest.raises(InputError, match="layers"):
            parse_layers(text)


# --- recognising ---


def test_an_unknown_array_is_named(serve):
    with pytest.raises(InputError, match="unknown array 'prompt_len', expected routed_experts, offsets"):
        serve(routes(4), prompt_len=np.array([2]))


def test_unknown_records_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", ids=np.zeros(3))
    with pytest.raises(InputError, match=r"arrays ids: of no known kind; expected one of .*device, .*serving"):
        convert_file(tmp_path / "x.npz", tmp_path / "o.npz")
    with pytest.raises(InputError, match=r"kind 'moe': expected .*device, .*serving"):
        convert_file(tmp_path / "x.npz", tmp_path / "o.npz", kind="moe")
    with pytest.raises(InputError, match="array 'routes' is missing"):
        convert_file(tmp_path / "x.npz", tmp_path / "o.npz", kind="device")


def test_a_failed_conversion_leaves_the_old_output(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", routed_experts=np.zeros((3, 2, 2), int))
    (tmp_path / "o.npz").write_bytes(b"old")
    assert main(["convert", str(tmp_path / "x.npz"), "-o", str(tmp_path / "o.npz"), "--model", "mixtral-8x7b"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert (tmp_path / "o.npz").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_warnings_go_to_standard_error(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", routed_experts=routes(3, 32), n_experts=8)
    assert main(["convert", str(tmp_path / "x.npz"), "-o", str(tmp_path / "o.npz")]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "warning: no prompt length is known of 1 requests" in err
    trace = Trace.load(tmp_path / "o.npz")
    assert trace.meta["model"] == {"name": "mixtral-8x7b", "experts": 8, "top_k": 2}


@pytest.mark.parametrize("domain", ["", "a\x1bb"])
def test_a_domain_without_a_name_is_refused_before_the_record_is_read(domain, tmp_path, capsys):
    path = tmp_path / "r.npy"
    path.touch()
    assert main(["convert", str(path), "-o", str(tmp_path / "t.npz"), "--domain", domain]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --domain: ") and error.count("\n") == 1
