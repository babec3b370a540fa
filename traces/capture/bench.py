"""What capturing costs beside plain generation: the same prompts by transformers' own ``generate`` and by a capture.

The model is an OLMoE with random weights, made where it runs, so that nothing is downloaded. Prompts are token ids.
A capture is all that comes after loading: forward passes, what is recorded and checked, embeddings, the trace and its
file. Both are run in turn, once to warm up and then as often as asked for; the median counts.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from ground.foreign_code import errors_name
from traces.capture.capture import settled_basis, trace_of_domain
from traces.capture.corpora import DomainText, TextRow
from traces.capture.decoding import Decoding, Prompt, passes
from traces.capture.domain_run import Amount, DomainRun
from traces.capture.prompts import Offered, batches
from traces.capture.recorder import recorders
from traces.embeddings import check_size

_PROFILE = 0.7
_PLAIN, _PASSES, _WHOLE = "plain generate", "passes of a capture, nothing recorded", "capture"
_GREEDY = Decoding(mode="greedy")


@dataclass(frozen=True)
class BenchShape:
    """A random OLMoE and what is generated with it; the default has 13.6 billion parameters."""

    layers: int = 32
    hidden: int = 2048
    intermediate: int = 1024
    experts: int = 64
    top_k: int = 8
    vocabulary: int = 50304
    prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 64
    batch: int = 32
    embedding: tuple[int, int] = (64, 3)
    repeats: int = 3


TINY = BenchShape(4, 32, 16, 8, 2, 100, 6, 8, 6, 4, (8, 3), 2)
"""Runs in seconds on a CPU, where its times say little."""


@dataclass(frozen=True)
class BenchResult:
    """Seconds of each part, in the order in which they were run, a number a repeat."""

    parameters: int
    device: str
    tokens: int
    seconds: Mapping[str, Sequence[float]]

    @property
    def ratio(self) -> float:
        """Speed of a capture as a share of plain generation's."""
        return median(self.seconds[_PLAIN]) / median(self.seconds[_WHOLE])


class TokenIds:
    """A tokenizer of text that is token ids already, with a space between them."""

    pad_token_id = eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """The ids of a text."""
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return " ".join(map(str, ids))


def random_model(shape: BenchShape, device: str) -> Any:
    """An OLMoE of this shape on ``device`` that ends no sequence; bfloat16, or float32 on a CPU."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=max(1, shape.hidden // 128),
        num_key_value_heads=max(1, shape.hidden // 128), num_experts=shape.experts, num_experts_per_tok=shape.top_k,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    dtype, before = torch.float32 if device == "cpu" else torch.bfloat16, torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = OlmoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def bench_text(shape: BenchShape) -> DomainText:
    """Random prompts of half to all of ``prompt_tokens``, 70 % of them of the profile split."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(shape.prompts):
        length = int(rng.integers(max(1, shape.prompt_tokens // 2), shape.prompt_tokens + 1))
        ids = rng.integers(0, shape.vocabulary, length).tolist()
        rows.append(TextRow("random", "random token ids", "none", " ".join(map(str, ids)), ""))
    profile = round(_PROFILE * len(rows))
    return DomainText("random", train=[], profile=rows[:profile], eval=rows[profile:], about="random token ids")


def run_bench(shape: BenchShape, device: str = "auto") -> BenchResult:
    """Measure plain generation and a capture of ``shape`` on ``device``.

    Raises InputError for a device that is not there and an embedding that the hidden size does not allow.
    """
    import torch

    check_size(*shape.embedding, shape.hidden)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with errors_name("the random model", f"cannot be made on device {device!r}", "fewer --layers may help"):
        model = random_model(shape, device)
    text, times = bench_text(shape), [Clock(device) for _ in range(1 + shape.repeats)]
    sides = [(split, getattr(text, split)) for split in ("profile", "eval")]
    offered = [given for split, rows in sides for given in Offered(rows, TokenIds(), "plain", split, sys.maxsize)]
    together = [[one.prompt for one in batch] for batch in batches(offered, shape.batch, sys.maxsize, shape.new_tokens)]
    for clock in times:
        with clock(_PLAIN):
            _generate(model, together, shape.new_tokens)
        with clock(_PASSES), torch.inference_mode():
            for prompts in together:
                for _ in passes(model, prompts, shape.new_tokens, _GREEDY, 0, set()):
                    pass
        with clock(_WHOLE):
            _capture(model, text, shape, clock)
    seconds = {part: [clock.seconds[part] for clock in times[1:]] for part in times[0].seconds}
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    parameters = sum(weight.numel() for weight in model.parameters())
    return BenchResult(parameters, name, shape.prompts * shape.new_tokens, seconds)


class Clock:
    """Seconds of named parts of a run, what a device still has to do included."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what is inside."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[part] = time.perf_counter() - start

    def _wait(self) -> None:
        import torch

        if self._device.startswith("cuda"):
            torch.cuda.synchronize()


def _generate(model: Any, together: Sequence[Sequence[Prompt]], new_tokens: int) -> None:
    """Greedy generation by transformers itself."""
    import torch

    for prompts in together:
        longest = max(len(prompt.ids) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts], device=model.device)
        counts = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in prompts])
        model.generate(
            ids, attention_mask=counts.to(model.device), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )


def _capture(model: Any, text: DomainText, shape: BenchShape, clock: Clock) -> None:
    """A whole capture, part by part."""
    amount = Amount(None, None, 1, shape.prompt_tokens, shape.new_tokens, shape.batch, 2**20)
    with ExitStack() as stack:
        found = {part: stack.enter_context(one) for part, one in recorders(model).items()}
        with clock("  forward passes, recorded and checked"):
            rows = DomainRun(found, TokenIds(), amount, _GREEDY, "plain").domain(text)[""]
        with clock("  choosing how to store embeddings"):
            basis, about = settled_basis([rows], shape.embedding, None, 0)
        with clock("  storing embeddings, the trace"):
            model_meta = {"name": "random-olmoe", "config": {"model_type": "olmoe"}}
            trace = trace_of_domain(rows, {"schema": 1, "model": model_meta}, basis, about)
        with clock("  checking and writing the file"), tempfile.TemporaryDirectory() as folder:
            trace.save(Path(folder) / "trace.npz")


def bench_view(result: BenchResult) -> Group:
    """The measurement as a table."""
    about = f"{result.parameters / 1e9:.2f} billion parameters, {result.device}, {result.tokens:,} new tokens"
    table = Table(title=f"capturing beside generation ({about})", title_justify="left")
    for column in ("", "seconds", "least", "most"):
        table.add_column(column, justify="right" if column else "left")
    for part, seconds in result.seconds.items():
        table.add_row(part, *(f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))))
    return Group(table, f"a capture runs at {result.ratio:.2f} of the speed of plain generation")
