"""Files that cannot be replayed are named for what they are, with the way to one that can."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.engine_records import given
from traces.convert.kinds import convert_files


def _stat(folder: Path) -> Path:
    import torch

    torch.save(
        {"rank": 0, "logical_count": torch.zeros(3, 5, 16), "average_utilization_rate_over_window": None}, folder / "x"
    )
    return folder / "x"


def _per_pass(folder: Path) -> Path:
    import torch

    one = {"forward_pass_id": 0, "rank": 0, "gatherer_key": "primary", "global_physical_count": torch.zeros(5, 16)}
    torch.save({"records": [one], "last_physical_to_logical_map": torch.zeros(5, 16, dtype=torch.int64)}, folder / "x")
    return folder / "x"


def _arrays(**arrays: np.ndarray) -> Any:
    def write(folder: Path) -> Path:
        np.savez(folder / "x.npz", **arrays)
        return folder / "x.npz"

    return write


def _safetensors(folder: Path) -> Path:
    header = json.dumps({"12_3": {"dtype": "I32", "shape": [16], "data_offsets": [0, 64]}}, separators=(",", ":"))
    (folder / "x").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(64))
    return folder / "x"


def _text(content: str | bytes) -> Any:
    def write(folder: Path) -> Path:
        (folder / "x").write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / "x"

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_stat, "SGLang's recorder in mode stat, which has counts .* per_token, or ask for return_routed_experts"),
        (_per_pass, "/x: SGLang's recorder in mode per_pass, which has counts .* per_token"),
        (_arrays(expert_load=np.ones((5, 16)), window=np.arange(3)), "how often experts were taken, without tokens"),
        (_safetensors, "how often experts were taken, without tokens"),
        (_text("layer_id,expert_id,hits\n0,3,17\n"), "how often experts were taken, without tokens"),
        (_text('{"logical_count": [[3, 4], [5, 6]]}'), "how often experts were taken, without tokens"),
        (_text('{"layer_0": {"0": 12, "1": 3}, "layer_1": {"0": 5}}'), "how often experts were taken, without tokens"),
        (_text('{"model": "x", "expert_counts": {"0": {"7": 3}}}'), "how often experts were taken, without tokens"),
        (_arrays(routed_experts=np.ones((5, 16), int)), r"shape \(5, 16\), layers x experts, so it is how often"),
        (_text(gzip.compress(b'{"choices": []}')), "packed with gzip: unpack it first"),
        (_text(b"BZh91AY&SY"), "packed with bzip2: unpack it first"),
        (_text(bytes(257) + b"ustar\x0000"), "packed with tar: unpack it first"),
        (_text(b"\x89HDF\r\n\x1a\n"), "a file of HDF5: of no known kind"),
        (_text(b"\x13\xff\x80 \xfe" * 40), "binary data: of no known kind"),
        (_text('{"choices": \x00'), "not JSON"),
        (_text("layer,expert\n0,3\n0,5\n"), "as llama.cpp writes it, without tokens.*python -m traces capture"),
        (_text(b"\x02\0\0\0\x18\0\0\0blk.0.ffn_down_exps.weight"), "an importance matrix of llama.cpp"),
        (_text(b"GGUF\x03\0\0\0general.type imatrix"), "an importance matrix of llama.cpp"),
        (
            _text('{"sample_count": 1, "think_expert_analytics": {"layer_0": {"31": {"prob_density": 0.1}}}}'),
            "_examples.json",
        ),
        (
            _text('{"experts": {"1": [12]}, "shared_experts": false, "non_expert_modules": false}'),
            "expert_weights_N.txt",
        ),
        (_text('{"input": "x", "output": "y", "score": 1.0, "step": 1}\n'), "dumped as text, without routes"),
        (
            _text("Dear reader,\nthis is a letter.\n"),
            "a text of other content: of no known kind; expected one of answers, ",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named_with_the_way_to_what_can(write: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as error:
        convert_files([write(tmp_path)], tmp_path / "o.npz", given=given(tmp_path))
    assert "\n" not in str(error.value) and str(error.value).count(f"{tmp_path.name}/x") == 1


@pytest.mark.parametrize(
    "content",
    [
        "step,layer,expert,hits\n0,0,3,1\n", '{"error": {"message": "overloaded"}, "usage": {"prompt_tokens": 3}}',
        '{"counts": "three"}', '{"usage": [{"tokens": 1}]}',
    ],
)  # fmt: skip
def test_other_files_are_not_taken_for_counts(content: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        convert_files([_text(content)(tmp_path)], tmp_path / "o.npz", given=given(tmp_path))
    assert "how often" not in str(error.value)
