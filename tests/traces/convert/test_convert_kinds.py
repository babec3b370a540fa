"""The kinds of routing records that others published, each read without loss."""

from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.records import notes, published, routes
from traces.convert.kinds import convert_file
from traces.statistics.info import describe
from traces.trace import Trace


def device(**changes: Any) -> dict[str, Any]:
    """A record of the device kind, 48 layers x 128 experts: 3 prefill and 2 decode rows."""
    ids = routes(5, 48, 6, 128)
    ids[:2, 47] = -1
    sizes = np.full(48, 3_000_000)
    record = {"routes": ids, "phase": np.array([0, 0, 0, 1, 1], np.int8), "n_experts": np.int16(128), "k": np.int16(6)}
    return record | {"expert_bytes": sizes} | changes


def test_device_record(tmp_path):
    np.savez(tmp_path / "run.npz", **device())
    trace = convert_file(tmp_path / "run.npz", tmp_path / "o.npz")
    assert trace.meta["model"]["name"] == "qwen3-30b-a3b"
    assert trace.meta["model"]["expert_bytes"] == [3_000_000] * 48
    assert trace.phase.tolist() == [0, 0, 0, 1, 1] and trace.split.tolist() == ["eval"]
    assert "run with 6 experts a token; qwen3-30b-a3b's own config says 8" in notes(trace)
    assert "2 (token, layer) pairs have no route" in notes(trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": np.array([0, 1, 0, 1, 1])}, r"'phase', row 2: 0, expected 0 \(prefill\), then 1"),
        ({"phase": np.array([0, 0, 0, 1, 3])}, r"'phase', row 4: 3"),
        ({"k": np.int16(8)}, "'k': 8, expected 6"),
        ({"k": np.float64("nan")}, r"'k': float64 of shape \(\), expected one whole number"),
        ({"n_experts": np.int16(100)}, "48 layers x 100 experts is of no known model, expected --model NAME"),
        ({"expert_bytes": np.full(47, 1)}, r"'expert_bytes': int64 of shape \(47,\), expected 48 integers"),
        ({"expert_bytes": np.zeros(48, int)}, "expert_bytes, entry 0: 0, expected a whole number of bytes above 0"),
        ({"routes": routes(5, 48, 6, 200)}, r"'routes', row \d, routed layer \d+, slot \d: expert 1\d\d, expected"),
    ],
)
def test_device_record_with_a_fault(change, message, tmp_path):
    np.savez(tmp_path / "run.npz", **device(**change))
    with pytest.raises(InputError, match=message):
        convert_file(tmp_path / "run.npz", tmp_path / "o.npz")


def test_gpt_oss_record(tmp_path):
    ids = routes(7, 24, 4, 32).astype(np.uint8)
    record = {"experts": ids, "probs": np.full(ids.shape, 0.25, np.float16), "offsets": np.array([0, 3, 7])}
    record |= {"dataset": np.array(["test", "test"]), "category": np.array(["law", "law"])}
    record |= {"prompt_len": np.array([100, 20])}
    np.savez(tmp_path / "g.npz", **record)
    trace = convert_file(tmp_path / "g.npz", tmp_path / "o.npz")
    assert trace.meta["model"] == {"name": "gpt-oss-20b", "experts": 32, "top_k": 4}
    assert trace.position.tolist() == [100, 101, 102, 20, 21, 22, 23]
    assert (trace.phase == 1).all() and trace.domain.tolist() == ["law", "law"]
    assert trace.split.tolist() == ["profile", "eval"] and trace.sequence_id.tolist() == ["test/law/0", "test/law/1"]
    np.testing.assert_array_equal(trace.experts, ids)
    record["probs"][5, 3, 2] = np.nan
    np.savez(tmp_path / "g.npz", **record)
    with pytest.raises(InputError, match=r"'probs', row 5, routed layer 3, slot 2: nan"):
        convert_file(tmp_path / "g.npz", tmp_path / "o.npz")


def test_esft_record(tmp_path):
    ids = routes(5, 26, 6, 64).astype(np.uint8)
    record = {"experts": ids, "weights": np.full(ids.shape, 0.1, np.float16), "offsets": np.array([0, 2, 5])}
    np.savez(tmp_path / "law.npz", **record)
    trace = convert_file(tmp_path / "law.npz", tmp_path / "o.npz")
    assert trace.meta["model"]["name"] == "deepseek-v2-lite" and trace.layers.tolist() == list(range(1, 27))
    assert trace.domain.tolist() == ["law", "law"] and (trace.phase == 1).all()
    assert "all rows are read as decode" in notes(trace)


PUBLISHED = {
    "qwen3_30b_device.npz": ("qwen3-30b-a3b", 156, 28, 48, 128, 6),
    "gpt_oss_120b_device.npz": ("gpt-oss-120b", 149, 85, 36, 128, 2),
    "gpt_oss_20b_decode_mmlu.npz": ("gpt-oss-20b", 152_445, 0, 24, 32, 4),
    "deepseek_v2_lite_esft_intent.npz": ("deepseek-v2-lite", 4112, 0, 26, 64, 6),
    "deepseek_v2_lite_esft_law.npz": ("deepseek-v2-lite", 4252, 0, 26, 64, 6),
    "deepseek_v2_lite_esft_summary.npz": ("deepseek-v2-lite", 5359, 0, 26, 64, 6),
    "deepseek_v2_lite_esft_translation.npz": ("deepseek-v2-lite", 4634, 0, 26, 64, 6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_records_convert_without_loss(name, tmp_path):
    source = published(name)
    convert_file(source, tmp_path / "o.npz")
    trace = Trace.load(tmp_path / "o.npz")
    facts = describe(trace)
    shape = (facts["model"], trace.n_rows, facts["rows"]["prefill"], trace.n_layers, trace.n_experts, trace.top_k)
    assert shape == PUBLISHED[name]
    with np.load(source) as record:
        ids = record["routes" if "device" in name else "experts"]
        np.testing.assert_array_equal(trace.experts, ids)
        assert facts["activations"] == int((ids >= 0).sum())
        if "esft" in name:
            np.testing.assert_array_equal(trace.gates, record["weights"])
