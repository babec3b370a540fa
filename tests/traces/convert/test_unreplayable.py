"""Files that cannot be replayed are named for what they are, with the way to one that can."""

from pathlib import Path
from typing import Any

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


def _text(content: str | bytes) -> Any:
    def write(folder: Path) -> Path:
        (folder / "x").write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / "x"

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_stat, "SGLang's recorder in mode stat, which has counts .* per_token, or ask for return_routed_experts"),
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
        (_text("Dear reader,\nthis is a letter.\n"), "of no known kind; expected one of answers, "),
    ],
)
def test_what_cannot_be_replayed_is_named_with_the_way_to_what_can(write: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as error:
        convert_files([write(tmp_path)], tmp_path / "o.npz", given=given(tmp_path))
    assert "\n" not in str(error.value)
