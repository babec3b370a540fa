"""A layer up to its route, as a run computes it: attention and router, of a token over its context and of a prompt."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from realrun.device import open_device
from realrun.layers import Layers, Step
from realrun.measure.loop import shrunk
from realrun.measure.machine import Machine, Timing
from sim.model import ModelSpec

CONTEXTS = (64, 256, 1024, 2048, 4096, 8192)
PROMPTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class LayerTimes:
    """By cached tokens, of one row; and by rows, of a prompt."""

    decode: dict[int, Timing]
    prefill: dict[int, Timing]


def layers_of(models: Iterable[ModelSpec]) -> list[ModelSpec]:
    """One model for each distinct routed layer; those that ``sim.cost`` takes the formula for are left out."""
    found: dict[tuple[object, ...], ModelSpec] = {}
    for model in models:
        bf16 = model.weight_bytes == 2 == model.embedding_bytes
        if bf16 and not any(model.windows) and not model.cross_attention and not model.encoder_layers:
            found.setdefault((model.hidden, model.attention.shape, model.experts), model)
    return list(found.values())


def layer_times(
    machine: Machine, model: ModelSpec, contexts: Iterable[int] = CONTEXTS, prompts: Iterable[int] = PROMPTS
) -> LayerTimes:
    """Times of one routed layer, answer fetched but not waited for, weights and keys not in any cache of the device."""
    count = min(8, 1 + machine.copies(model.attention.parameters * 2))
    few = replace(shrunk(model, count + 1), shared_ffn=0)
    decode, prefill = {}, {}
    with open_device(str(machine.device)) as device, device.running():
        for context in contexts:
            layers = Layers(device, few, context, 1)
            decode[context] = _time(machine, layers, layers.decode_step(1, model.top_k), False)
        layers = Layers(device, few, 1, max(prompts := tuple(prompts)))
        for rows in prompts:
            prefill[rows] = _time(machine, layers, Step(few, rows, model.top_k, device, prompt=True), True)
        device.synchronize()
    return LayerTimes(decode, prefill)


def _time(machine: Machine, layers: Layers, step: Step, prompt: bool) -> Timing:
    """Of every layer but the first, which looks tokens up instead of gathering what experts gave."""

    def launch(layer: int) -> None:
        layers.launch(step, layer, prompt)
        if not machine.cuda:  # whose stream is a thread that the host's clock does not see
            layers.device.synchronize()

    return machine.time(*(partial(launch, layer) for layer in range(1, layers.model.routed_layers)))
