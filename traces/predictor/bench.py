"""How long a path predictor takes: a prompt at once, and one more token of each sequence of a batch."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from ground.errors import InputError
from traces.capture.positions import cache_name
from traces.predictor.network import PathPredictor, StoredPredictor


class SteppingPredictor:
    """A predictor that runs beside generation: the prompts once, then one more token of each, with a KV cache.

    ``step`` (B,) tokens gives the probabilities (B, L, E) of that token's experts, as the whole pass does.
    """

    def __init__(self, net: PathPredictor, prompt: torch.Tensor, prompt_valid: torch.Tensor) -> None:
        self._net, self._valid = net, prompt_valid.long()
        self._states = net.stacks.encoder(input_ids=prompt, attention_mask=self._valid).last_hidden_state
        config = net.stacks.config
        cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        self._kept = {cache_name(net.stacks.decoder): cache}

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        output = self._net.stacks.decoder(
            input_ids=tokens.unsqueeze(1), encoder_hidden_states=self._states, encoder_attention_mask=self._valid,
            use_cache=True, **self._kept,
        )  # fmt: skip
        return self._net.told(output.last_hidden_state)[:, 0].sigmoid()


def measure(
    stored: StoredPredictor, batches: Sequence[int], prompt_tokens: int = 64, tokens: int = 32, repeats: int = 20
) -> list[dict[str, Any]]:
    """Median microseconds for each batch size: ``prefill_us`` of whole prompts, ``step_us`` of one token of each.

    A prefill encodes prompts of ``prompt_tokens`` and predicts all their tokens; a step follows ``tokens`` others.
    The predictor's outputs are waited for. ``graph_us`` is a step as one CUDA graph, whose kernels need no launching
    one by one; None without a GPU. Raises InputError for a number below 1.
    """
    for name, values in {"prompt_tokens": [prompt_tokens], "repeats": [repeats], "batch": batches}.items():
        if min(values) < 1:
            raise InputError(f"{name} is {min(values)}; expected at least 1")
    net = stored.net
    device = next(net.parameters()).device
    found = []
    with torch.inference_mode():
        for batch in batches:
            prompt = torch.randint(net.shape.vocabulary, (batch, prompt_tokens), device=device)
            valid = torch.ones_like(prompt, dtype=torch.bool)

            def prefill(prompt: torch.Tensor = prompt, valid: torch.Tensor = valid) -> torch.Tensor:
                return net(prompt, valid, prompt).sigmoid()

            running = SteppingPredictor(net, prompt, valid)
            for _ in range(tokens):
                running.step(prompt[:, 0])
            found.append(
                {
                    "batch": batch,
                    "prefill_us": _median_us(prefill, device, repeats),
                    "step_us": _median_us(lambda: running.step(prompt[:, 0]), device, repeats),  # noqa: B023
                    "graph_us": _graph_us(running, prompt[:, 0].clone(), repeats),
                }
            )
    return found


def _graph_us(running: SteppingPredictor, tokens: torch.Tensor, repeats: int) -> float | None:
    """Median microseconds of a step as a CUDA graph: it repeats one token, after as many others."""
    if tokens.device.type != "cuda":
        return None
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        running.step(tokens)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            running.step(tokens)
    return _median_us(graph.replay, tokens.device, repeats)


def _median_us(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median microseconds of ``work``, what the device still has to do included, after two runs to warm up."""
    times = []
    for turn in range(repeats + 2):
        _wait(device)
        started = time.perf_counter_ns()
        work()
        _wait(device)
        if turn >= 2:
            times.append((time.perf_counter_ns() - started) / 1e3)
    return round(median(times), 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(stored: StoredPredictor) -> str:
    """What the predictor runs on, in words."""
    device = next(stored.net.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
