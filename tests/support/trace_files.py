"""Trace files made by hand: their arrays, every optional one, and what a command says of a bad one."""

import json
from pathlib import Path

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.strategies import make_trace
from traces.__main__ import main
from traces.trace import Trace


def stored(trace: Trace) -> dict[str, np.ndarray]:
    """The arrays of a trace file, to be changed and written by hand."""
    fields = {n: getattr(trace, n) for n in Trace.__dataclass_fields__ if n not in ("meta", "source", "sha256")}
    return {"meta": np.array(json.dumps(trace.meta))} | {n: a for n, a in fields.items() if a is not None}


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run info on a bad file: status 2, one line that names it, no result file. Returns the line."""
    result = path.parent / "result.json"
    assert main(["info", str(path), "--json", str(result)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and path.name in err
    assert not result.exists()
    return err


FULL = {
    "experts": [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, -1], [0, 1]]],
    "phase": [0, 1, 1],
    "layers": [1, 3],
    "gates": np.array([[[0.5, 0.5], [1, 0]], [[0.5, 0.5], [1, 0]], [[0.5, 0], [1, 0]]], np.float16),
    "probs": np.zeros((3, 2, 3), np.uint8),
    "prob_experts": np.tile(np.array([3, 1, 0], np.int16), (3, 2, 1)),
    "embeddings": np.ones((2, 3, 4), np.int8),
    "prefill_embeddings": np.ones((1, 4), np.int8),
    "embedding_scale": np.ones(3, np.float32),
    "lookahead": np.array([[[0, 1], [-1, -1]]] * 3, np.int16),
    "predicted_experts": np.array([[[0, 1], [-1, -1]]] * 3, np.int16),
    "predicted_probs": np.array([[[200, 9], [0, 0]]] * 3, np.uint8),
    "expert_bytes": [100, 200],
    "meta": {"embedding": {"dims": 4, "prefill_layer": 0}, "predictor": {"sha256": "1" * 64}},
}


def full_trace() -> Trace:
    """Three rows of one sequence with every optional array."""
    return make_trace(n_experts=4, **{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in FULL.items()})
