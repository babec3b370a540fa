"""Every form that an engine writes comes back as it was, and damaged it is refused in a line."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.engine_records import BUILDERS, LENGTHS, TOKENS, TRUTH, given
from tests.support.records import notes
from traces.convert.kinds import convert_files
from traces.trace import Trace

DAMAGES = int(os.environ.get("MOE_REPLAY_DAMAGES", "8"))
"""How often each form is damaged; more by the environment variable."""
UNORDERED = {"megatron, routes alone"}  # which has no logits to order a route's experts by
NO_TOKENS = {"edge", "esft text", "gpt-oss examples", "megatron", "megatron, routes alone"}
ALL_DECODE = {"flame", "esft text", "gpt-oss examples"}
UNCHECKED = {
    "vllm old", "vllm object", "policylang lines", "policylang parquet", "edge", "esft text", "gpt-oss examples",
    "megatron", "megatron, routes alone", "flame",
}  # fmt: skip
"""Forms in which nothing shows that a digit was changed, or that lines at the end are missing."""


@pytest.mark.parametrize("name", BUILDERS)
def test_a_record_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    paths = BUILDERS[name](tmp_path)
    convert_files(paths, tmp_path / "o.npz", given=given(tmp_path))
    trace = Trace.load(tmp_path / "o.npz")
    truth = TRUTH[:1] if name == "flame" else sorted(TRUTH, key=len) if "recorder" in name else TRUTH
    order = [next(i for i in range(3) if TRUTH[i] is one) for one in truth]
    found = [trace.experts[trace.sequence == s] for s in range(trace.n_sequences)]
    if "recorder" in name:  # requests come in the order in which they end
        order = [next(i for i in range(3) if TRUTH[i].shape == one.shape) for one in found]
        truth = [TRUTH[i] for i in order]
    assert len(found) == len(truth)
    for s, (one, true, i) in enumerate(zip(found, truth, order, strict=True)):
        np.testing.assert_array_equal(one, np.sort(true, axis=2) if name in UNORDERED else true)
        mine = trace.sequence == s
        prefill = 0 if name in ALL_DECODE else LENGTHS[i][0]
        assert (trace.phase[mine] == 0).sum() == prefill
        if name not in NO_TOKENS:
            np.testing.assert_array_equal(trace.token[mine], TOKENS[i][: len(one)])
    assert trace.layers.tolist() == list(range(5)) and trace.n_experts == 16
    assert trace.meta["converted"]["kind"] and len(trace.meta["converted"]["sha256"]) == 64


def _damaged(paths: list[Path], rng: random.Random) -> None:
    """Cut one of the files off, take a piece out of it, or write over a piece."""
    inside = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    files = [file for file in inside if file.is_file()]
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    at, size = rng.randrange(len(data) or 1), rng.choice((1, 3, 40, 400))
    way = rng.choice(("cut", "out", "over", "fields"))
    if way == "fields" and file.suffix in (".json", ".jsonl"):
        text = data.decode()
        names = sorted({part for part in text.split('"')[1::2] if 2 < len(part) < 30 and part.isidentifier()})
        data = bytearray(text.replace(f'"{rng.choice(names)}"', '"renamed"').encode())
    elif way == "cut":
        del data[at:]
    elif way == "out":
        del data[at : at + size]
    else:
        data[at : at + size] = bytes(rng.randrange(128, 256) for _ in data[at : at + size])
    file.write_bytes(data)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_damaged_record_is_refused_in_a_line_or_read_as_what_is_whole_of_it(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    built = BUILDERS[name](whole)
    model = given(tmp_path)
    for seed in range(DAMAGES):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "damaged")
        paths = [tmp_path / "damaged" / path.relative_to(whole) for path in built]
        _damaged(paths, random.Random(seed))
        out = tmp_path / "o.npz"
        out.unlink(missing_ok=True)
        try:
            trace = convert_files(paths, out, given=model)
        except InputError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error), (seed, str(error))
            assert not out.exists()
        else:
            true = {np.sort(row, axis=None).tobytes() for one in TRUTH for row in one}
            odd = [row for row in trace.experts if np.sort(row, axis=None).tobytes() not in true]
            assert not odd or name in UNCHECKED, (seed, odd)


def test_answers_with_their_requests_have_domains_and_conversations(tmp_path: Path) -> None:
    from tests.support.engine_records import dynamo

    rows = [{"response": dynamo(i), "domain": ("law", "code", "law")[i], "conversation": f"c{i}"} for i in range(3)]
    rows.append({"response": {"error": {"message": "overloaded"}}, "domain": "law"})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = convert_files([tmp_path / "a.jsonl"], tmp_path / "o.npz", given=given(tmp_path))
    assert trace.domain.tolist() == ["law", "code", "law"]
    assert "1 answers are errors without routes" in notes(trace)
