"""The benchmark of capturing, on a model that a CPU runs in no time."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ground.errors import InputError
from traces.__main__ import main
from traces.capture import bench
from traces.capture.bench import TINY, BenchShape, bench_text, random_model, run_bench
from traces.capture.decoding import Prompt


def test_the_bench_times_generation_and_every_part_of_a_capture(capsys):
    assert main(["bench-capture", "--tiny", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for part in ("plain generate", "recorded and checked", "store embeddings", "writing the file", "of the speed of"):
        assert part in shown


def test_a_capture_is_as_long_as_its_parts():
    result = run_bench(TINY, "cpu")
    whole, parts = result.seconds["capture"], [s for name, s in result.seconds.items() if name.startswith("  ")]
    assert len(whole) == TINY.repeats and len(parts) == 4
    assert all(sum(part[repeat] for part in parts) <= whole[repeat] for repeat in range(TINY.repeats))
    assert result.ratio > 0 and result.tokens == TINY.prompts * TINY.new_tokens


def test_a_capture_runs_the_tokens_of_plain_generation(monkeypatch):
    said, captured = [], []
    model, text, store = random_model(TINY, "cpu"), bench_text(TINY), bench.trace_of_domain
    monkeypatch.setattr(bench, "trace_of_domain", lambda rows, *more: captured.append(rows) or store(rows, *more))
    bench._capture(model, text, TINY, bench.Clock("cpu"))
    generate = model.generate
    model.generate = lambda *inputs, **named: said.extend(generate(*inputs, **named)[:, :-1].tolist())
    prompts = [list(map(int, row.prompt.split())) for row in (*text.profile, *text.eval)]
    bench._generate(model, [[Prompt(ids, [], 0) for ids in prompts]], TINY.new_tokens)
    longest, arrays = max(map(len, prompts)), captured[0].arrays
    for number, (ids, whole) in enumerate(zip(prompts, said, strict=True)):
        assert arrays["token"][arrays["sequence"] == number].tolist() == whole[longest - len(ids) :]


def test_the_default_model_has_thirteen_billion_weights():
    import torch

    with torch.device("meta"):
        model = random_model(BenchShape(), "meta")
    assert 13e9 < sum(weight.numel() for weight in model.parameters()) < 14e9


def test_a_device_that_is_not_there_is_one_line():
    with pytest.raises(InputError, match="the random model: cannot be made on device 'abacus'"):
        run_bench(TINY, "abacus")
