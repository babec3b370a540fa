"""A layer up to its route, as a run computes it: attention and router, of a token over its context and of a prompt.

A run launches a layer while the experts of the one before it still compute, so the time that counts is the device's
alone: it sleeps until the layers are launched.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from realrun.calibrate.loop_times import shrunk
from realrun.calibrate.machine import Machine
from realrun.calibrate.timing import Timing, Work
from realrun.device.open_device import open_device
from realrun.engine.layers import Layers, Step
from realrun.engine.loop import undisturbed
from traces.models.spec import ModelSpec

CONTEXTS = (64, 256, 1024, 2048, 4096, 8192)
PROMPTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class LayerTimes:
    """By cached tokens, of one row; and by rows, of a prompt."""

    decode: dict[int, Timing]
    prefill: dict[int, Timing]
    launched: dict[int, Timing]
    """Of a prompt whose layers follow each other as fast as they can be launched."""


Kind = tuple[int, str, int]
"""What a layer's times are charged by: hidden size, attention in words, experts."""


def kind(model: ModelSpec) -> Kind:
    """Of the routed layers of ``model``."""
    return model.hidden, model.attention.shape, model.experts


def charged(model: ModelSpec) -> bool:
    """Whether ``sim.machine.cost`` charges measured times for the layers of ``model``.

    That is for layers in bf16 that are all alike, without a window and without an encoder.
    """
    bf16, alike = model.in_bf16, not model.other_layers
    return bf16 and alike and not any(model.windows) and not model.cross_attention and not model.encoder_layers


def layers_of(models: Iterable[ModelSpec]) -> list[ModelSpec]:
    """One model for each distinct routed layer."""
    found: dict[Kind, ModelSpec] = {}
    for model in models:
        found.setdefault(kind(model), model)
    return list(found.values())


def in_bf16(model: ModelSpec) -> ModelSpec:
    """A model of the dimensions of ``model`` in bf16, its layers all alike: no windows, no encoder.

    For times of models that the simulator charges by formula.
    """
    return replace(
        model, expert_bytes=(2 * model.expert_parameters,) * model.routed_layers, windows=(0,) * model.layers,
        weight_bytes=2, embedding_bytes=2, encoder_layers=0, cross_attention=False, other_layers=(), stored=None,
    )  # fmt: skip


def layer_times(
    machine: Machine, model: ModelSpec, contexts: Iterable[int] = CONTEXTS, prompts: Iterable[int] = PROMPTS
) -> LayerTimes:
    """Times of one routed layer, answer fetched but not waited for, weights and keys not in any cache of the device."""
    count = min(8, 1 + machine.copies(model.attention.parameters * 2))
    few = replace(shrunk(model, count + 1), shared_ffn=0)
    # Layers hold themselves by their graphs: those of the model before go as the collector is stopped.
    with open_device(str(machine.device)) as device, device.running(), undisturbed():
        tokens, rows = {}, {}
        for context in contexts:
            layers = Layers(device, few, context, 1)
            tokens[context] = _launches(machine, layers, layers.decode_step(1, model.top_k), False)
        layers = Layers(device, few, 1, max(prompts := tuple(prompts)))
        for length in prompts:
            rows[length] = _launches(machine, layers, Step(few, length, model.top_k, device, prompt=True), True)
        times = LayerTimes(machine.times(tokens, asleep=True), machine.times(rows, asleep=True), machine.times(rows))
        device.synchronize()
    return times


def _launches(machine: Machine, layers: Layers, step: Step, prompt: bool) -> Work:
    """Every layer but the first, which looks tokens up instead of gathering what experts gave."""

    def launch(layer: int) -> None:
        layers.launch(step, layer, prompt)
        if not machine.cuda:  # whose stream is a thread that the host's clock does not see
            layers.device.synchronize()

    return [partial(launch, layer) for layer in range(1, layers.model.routed_layers)]
