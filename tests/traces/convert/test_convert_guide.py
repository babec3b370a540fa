"""The guide to converting: every command in it, and every line of Python, makes a trace of what its engine writes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.engine_records import BUILDERS, LENGTHS, TOKENS, TRUTH, given, verl
from tests.support.places import REPOSITORY
from traces.__main__ import main
from traces.convert.kinds import convert_files
from traces.trace import Trace

GUIDE = {
    "answers.jsonl": "vllm chat", "routed.npz": "serving", "sglang.jsonl": "sglang openai", "dynamo.jsonl": "dynamo",
    "expert_distribution_recorder_*.pt": "sglang recorder, ranks", "outputs.json": "tensorrt-llm", "batch.pt": "verl",
    "rollout_0.pt": "slime", "router_traces": "megatron", "flame-moe-290m/actives/iter_5473": "flame",
    "trace.parquet": "policylang parquet", "trace.jsonl": "policylang lines", "route_trace.csv": "edge",
    "law_tables": "esft text", "True_False_examples.json": "gpt-oss examples",
}  # fmt: skip
"""The files that the guide's commands name, and what such a file is."""
TEXT = (REPOSITORY / "docs/convert.md").read_text("utf-8")
COMMANDS = re.findall(r"^python -m traces convert (.*)$", TEXT, re.MULTILINE)


def _convert(paths: list[str], options: list[str], model: str) -> Trace:
    """What the guide's command makes, of the small model in place of the released one that it names."""
    at = options.index("--model") if "--model" in options else len(options)
    assert main(["convert", *paths, *options[:at], "--model", model, *options[at + 2 :]]) == 0
    return Trace.load(options[1])


@pytest.mark.parametrize("command", [one for one in dict.fromkeys(COMMANDS) if "--domain" not in one])
def test_every_command_of_the_guide_makes_a_trace_of_what_its_engine_writes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = command.split()
    paths = BUILDERS[GUIDE[name]](tmp_path)
    if "*" not in name:
        paths = [paths[0].rename(tmp_path / name)]
    monkeypatch.chdir(tmp_path)
    trace = _convert([str(path.relative_to(tmp_path)) for path in paths], options, str(given(tmp_path).model))
    assert trace.n_sequences == (1 if name.startswith("flame") else 3)


def test_every_form_that_is_replayed_has_a_command_in_the_guide() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(GUIDE)
    without = {"vllm object", "openai batch", "verl archive"}  # which are of the form of another one
    forms = {name.split(",")[0].split(" ")[0] for name in GUIDE.values()}
    assert {name.split(",")[0].split(" ")[0] for name in BUILDERS if name not in without} == forms


def test_the_lines_of_python_in_the_guide_save_what_convert_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    outputs = [
        SimpleNamespace(
            prompt_token_ids=ids[:n].tolist(),
            outputs=[SimpleNamespace(token_ids=ids[n:].tolist(), routed_experts=true.astype(np.uint8))],
        )
        for ids, true, (n, _) in zip(TOKENS, TRUTH, LENGTHS, strict=True)
    ]
    data = SimpleNamespace(batch=torch.load(verl(tmp_path)[0], weights_only=True))
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL):
        exec(block, {"outputs": outputs, "data": data, "numpy": np, "torch": torch, "json": json})
    for name in ("routed.npz", "outputs.json", "batch.pt"):
        trace = convert_files([name], "o.npz", given=given(tmp_path))
        np.testing.assert_array_equal(trace.experts, np.concatenate(TRUTH))
        np.testing.assert_array_equal(trace.token, np.concatenate([ids[:-1] for ids in TOKENS]))
