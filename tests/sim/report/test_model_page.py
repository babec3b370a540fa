"""The page of one model whose layers are of several kinds."""

import json

import pytest

from sim.report.catalogue import model_json, model_table
from tests.traces.models.test_mixed_models import DEEPSEEK, GEMMA, QWEN3_NEXT
from traces.models.known import model_spec


@pytest.mark.parametrize(
    ("config", "attention", "cached"),
    [
        (
            QWEN3_NEXT,
            "gated GQA 16/2/256; 36 layers delta net 16/32/128x128",
            "24576 bytes a token, 77856768 a sequence",
        ),
        (DEEPSEEK, "MLA 128 heads, kv rank 512, index 64/128; 61 layers choose 2048", "85888 bytes a token"),
        (GEMMA, "GQA 16/2/512; 25 layers GQA 16/8/256; 25 layers reach 1024", "225280 bytes a token"),
    ],
)
def test_a_model_of_several_kinds_of_layers_shows_each(config, attention, cached, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    table = model_table(str(path))
    rows = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert (rows["attention"], rows["KV cache"]) == (attention, cached)
    told = model_json(str(path))
    assert told.get("other_layers", []) == list(model_spec(str(path)).other_layers)
