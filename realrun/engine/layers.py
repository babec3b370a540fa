"""Everything of a model but its routed experts, at true size with random weights: what a replay computes around them.

For each routed layer: attention-sized work (as many weights and as many cached numbers as the model's attention
reads), the dense layers before it, a real router, whose answer the host fetches and waits for before the trace's route
takes its place, and shared experts. Then dense layers that follow the last routed one, and the LM head, whose token the
host waits for as well.

Decode steps have few rows and always the same shapes: on a GPU they are CUDA graphs, a launch a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from realrun.device.devices import Device, refuse_too_little
from realrun.device.torch_device import the_torch
from traces.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_HEAD = 128


@dataclass
class _Block:
    """Weights of one layer: projections in and out, cached keys and values, and an FFN or none."""

    into: "torch.Tensor"
    out: "torch.Tensor"
    keys: "torch.Tensor"
    values: "torch.Tensor"
    ffn: "tuple[torch.Tensor, torch.Tensor] | None" = None


class Step:
    """The tensors of steps of ``rows`` rows and ``top_k`` experts a row; a decode graph always uses the same ones.

    ``hidden`` and ``states`` (rows, H), ``outputs`` (rows * K + 1, H), one row a (row, expert) pair and a last one of
    zeros, and for each layer ``give`` (rows * K,): the pairs of each row.
    """

    def __init__(self, model: ModelSpec, rows: int, top_k: int, device: Device, prompt: bool = False) -> None:
        torch = the_torch()
        where: dict[str, Any] = {"dtype": torch.bfloat16, "device": device.torch_device}
        self.rows, self.top_k = rows, top_k
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device.torch_device)
        self.hidden = torch.zeros(rows, model.hidden, **where)
        self.states = torch.zeros(rows, model.hidden, **where)
        self.outputs = torch.zeros(rows * top_k + 1, model.hidden, **where)
        self.logits = torch.zeros(1 if prompt else rows, model.vocab, **where)
        self._plain = torch.arange(rows * top_k, device=device.torch_device).repeat(model.routed_layers, 1)
        self.give = self._plain.clone()
        self._is_plain = True
        self.ids = torch.zeros(rows, top_k, dtype=torch.int64, device=device.torch_device)
        self.answer = device.small(rows, top_k)
        self.token = device.small(rows)

    def choose(self, give: np.ndarray | None, device: Device) -> None:
        """Say which pairs each row gets, (L, rows * K); None is one after another."""
        if give is not None:
            device.compute.launch(self.give.copy_, the_torch().from_numpy(give))
        elif not self._is_plain:
            device.compute.launch(self.give.copy_, self._plain)
        self._is_plain = give is None


class Layers:
    """The resident part of ``model`` on ``device``.

    Args:
        context: tokens whose keys and values a decode step reads in each layer; the most that any step has.
        prompt: rows of the longest prefill.

    Raises InputError if it does not fit.
    """

    def __init__(self, device: Device, model: ModelSpec, context: int, prompt: int, seed: int = 0) -> None:
        torch = the_torch()
        self.device, self.model, self.context, self.prompt = device, model, max(1, context), prompt
        self._cached = max(self.context, prompt, 1)
        cached = self._cached * model.kv_bytes_per_token
        need = model.resident_bytes - model.parked_bytes + cached
        refuse_too_little(
            f"{device.memory} for {model.name} without its experts", need, device.free_bytes(), "use --scale N"
        )
        self._generator = torch.Generator(device.torch_device).manual_seed(seed)
        routed = set(model.moe_layers)
        self._blocks = [self._block(layer, layer not in routed) for layer in range(model.layers)]
        self._routers = [self._weights(model.experts, model.hidden) for _ in model.moe_layers]
        width = model.shared_ffn
        self._shared = [self._ffn(width) if width else None for _ in model.moe_layers]
        self._embedding = self._weights(model.vocab, model.hidden)
        self._lm_head = self._embedding if model.tied else self._weights(model.vocab, model.hidden)
        first = [-1, *model.moe_layers[:-1]]
        self._before = [list(range(a + 1, b)) for a, b in zip(first, model.moe_layers, strict=True)]
        self._after = list(range(model.moe_layers[-1] + 1, model.layers))
        self._graphs: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._steps: dict[tuple[int, int], Step] = {}

    # -- what a run launches -------------------------------------------------------------------------------------

    def decode_step(self, rows: int, top_k: int) -> Step:
        """The tensors of decode steps of so many rows, with a graph for each layer; made at the first call."""
        key = (rows, top_k)
        if key not in self._steps:
            step = self._steps[key] = Step(self.model, rows, top_k, self.device)
            parts = [self._part(step, layer) for layer in range(self.model.routed_layers)]
            work = [lambda part=part: part(self.context) for part in [*parts, self._head(step)]]
            self._graphs[key] = [self.device.graph(one) for one in work]
        return self._steps[key]

    def launch(self, step: Step, layer: int, prompt: bool) -> None:
        """Run what comes before the route of a layer is known (``layer`` = L: the head), and fetch the answer."""
        launch = self.device.compute.launch
        if prompt:
            part = self._head(step) if layer == self.model.routed_layers else self._part(step, layer)
            launch(part, step.rows)
        else:
            launch(self._graphs[step.rows, step.top_k][layer])
        here, there = (step.token, step.tokens) if layer == self.model.routed_layers else (step.answer, step.ids)
        launch(here.copy_, there, True)

    def launch_shared(self, step: Step, layer: int) -> None:
        """Run the shared experts of a layer, which need no slot."""
        shared = self._shared[layer]
        if shared is not None:
            self.device.compute.launch(self._add_shared, step, shared)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _part(self, step: Step, layer: int) -> Callable[[int], None]:
        model, torch = self.model, the_torch()

        def run(context: int) -> None:
            if layer == 0:
                torch.index_select(self._embedding, 0, step.tokens, out=step.hidden)
            else:
                self._gather(step, layer - 1)
            for dense in self._before[layer]:
                self._dense(step.hidden, dense, context)
            self._attend(step.hidden, self._blocks[model.moe_layers[layer]], context)
            step.states.copy_(_normed(step.hidden))
            scores = torch.nn.functional.linear(step.states, self._routers[layer])
            step.ids.copy_(scores.topk(step.top_k, dim=-1).indices)

        return run

    def _head(self, step: Step) -> Callable[[int], None]:
        torch = the_torch()

        def run(context: int) -> None:
            self._gather(step, self.model.routed_layers - 1)
            for dense in self._after:
                self._dense(step.hidden, dense, context)
            last = step.hidden[-1:] if step.rows == context else step.hidden  # of a prompt, the last row alone
            logits = torch.nn.functional.linear(_normed(last), self._lm_head)
            step.logits[: len(logits)].copy_(logits)
            step.tokens[: len(logits)].copy_(logits.argmax(dim=-1))

        return run

    def _gather(self, step: Step, layer: int) -> None:
        """Add the experts' outputs of a layer to each row, in the order of the pairs."""
        pairs = step.outputs.index_select(0, step.give[layer])
        step.hidden.add_(pairs.view(step.rows, step.top_k, -1).mean(1))

    def _dense(self, hidden: "torch.Tensor", layer: int, context: int) -> None:
        block = self._blocks[layer]
        self._attend(hidden, block, context)
        assert block.ffn is not None
        hidden.add_(feed_forward(_normed(hidden), *block.ffn))

    def _attend(self, hidden: "torch.Tensor", block: _Block, context: int) -> None:
        functional = the_torch().nn.functional
        inner = functional.linear(_normed(hidden), block.into)
        heads, _, width = block.keys.shape
        rows = len(hidden)
        query = inner[:, : heads * width].reshape(rows, heads, width).transpose(0, 1)
        keys, values = block.keys[:, :context], block.values[:, :context]
        read = functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=rows == context and rows > 1
        )
        inner[:, : heads * width] = read[0].transpose(0, 1).reshape(rows, -1)
        hidden.add_(functional.linear(inner, block.out))

    def _add_shared(self, step: Step, shared: "tuple[torch.Tensor, torch.Tensor]") -> None:
        step.hidden.add_(feed_forward(step.states, *shared))

    # -- weights -------------------------------------------------------------------------------------------------

    def _weights(self, *shape: int) -> "torch.Tensor":
        torch = the_torch()
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=self.device.torch_device)
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)

    def _ffn(self, width: int) -> "tuple[torch.Tensor, torch.Tensor]":
        hidden, into = self.model.hidden, width * (self.model.expert_matrices - 1)
        return self._weights(into, hidden), self._weights(hidden, width)

    def _block(self, layer: int, dense: bool) -> _Block:
        """A layer whose two projections have as many weights as its attention and whose cache is as wide."""
        model = self.model
        inner = max(1, model.attention_parameters(layer) // (2 * model.hidden))
        width = max(1, min(model.attention_of(layer).kv_width // 2, inner))
        each = next(size for size in range(min(_HEAD, width), 0, -1) if width % size == 0)
        return _Block(
            self._weights(inner, model.hidden),
            self._weights(model.hidden, inner),
            self._weights(width // each, self._cached, each),
            self._weights(width // each, self._cached, each),
            self._ffn(model.dense_ffn) if dense else None,
        )


def feed_forward(
    states: "torch.Tensor", into: "torch.Tensor", out: "torch.Tensor", target: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """An FFN over ``states`` (n, H), to ``target`` (n, H) if given: out (silu(gate states) * up states).

    Without a gate, where ``into`` (F, H) is not twice as wide as ``out`` (H, F) takes, it is out relu(up states).
    """
    torch = the_torch()
    inner = torch.mm(states, into.t())
    if into.shape[0] > out.shape[1]:
        gate, up = inner.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
    else:
        inner = torch.relu(inner)
    return torch.mm(inner, out.t(), out=target)


def _normed(hidden: "torch.Tensor") -> "torch.Tensor":
    return the_torch().nn.functional.rms_norm(hidden, hidden.shape[-1:])


def pairs_of(experts: np.ndarray, none: int) -> tuple[np.ndarray, np.ndarray]:
    """How the rows of a step and its (row, expert) pairs belong together: ``experts`` (rows, L, K), -1 for none.

    Returns ``take`` (L, rows * K), the row of each pair, pairs standing in rising order of expert and then of row, and
    ``give`` (L, rows * K), the pair of each row's k-th expert, ``none`` where it has none.
    """
    rows, layers, top_k = experts.shape
    flat = experts.transpose(1, 0, 2).reshape(layers, rows * top_k).astype(np.int64)
    order = np.argsort(np.where(flat >= 0, flat, np.iinfo(np.int64).max), axis=1, kind="stable")
    give = np.empty_like(order)
    np.put_along_axis(give, order, np.broadcast_to(np.arange(rows * top_k), order.shape), axis=1)
    return order // top_k, np.where(flat >= 0, give, none)
