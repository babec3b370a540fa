"""The profile's tables of FFNs and of layers."""

from collections.abc import Iterable, Sequence
from functools import partial

from realrun.calibrate.ffn_times import FfnTimes, UsedFfn, ffn_times, ffns
from realrun.calibrate.layer_times import LayerTimes, charged, in_bf16, kind, layer_times, layers_of
from realrun.calibrate.machine import Machine
from realrun.calibrate.parts import Parts
from realrun.calibrate.profile_text import Table, curve, spread
from realrun.calibrate.thoroughness import Thoroughness
from realrun.calibrate.timing import Timing
from realrun.engine.portions import AT_ONCE
from traces.models.spec import ModelSpec


class Blocks:
    """FFNs and layers as a run computes them, and FFNs as plain products for comparison."""

    def __init__(self, machine: Machine, thorough: Thoroughness, source: str) -> None:
        self.machine, self.thorough, self.source = machine, thorough, source
        self.least_ffn: list[Timing] = []
        self.least_layer: list[Timing] = []
        self.eager_ffn: list[Timing] = []
        self.eager_layer: list[Timing] = []
        self.details: dict[str, Table] = {"ffn_us": {}, "layer_us": {}}

    def ffns(self, found: Sequence[UsedFfn]) -> list[Table]:
        """The profile's ``ffn``."""
        times = ffn_times(self.machine, found, self.thorough.rows)
        return [self._ffn(used, times[used.ffn]) for used in found]

    def _ffn(self, used: UsedFfn, times: FfnTimes) -> Table:
        ffn = used.ffn
        self.least_ffn.append(times.charged[min(times.charged)])
        self.eager_ffn += times.others.get("eager", {}).values()
        ways = {"times": times.charged, **({"waited": times.waited} if times.waited else {}), **times.others}
        self.details["ffn_us"][f"{ffn.hidden} x {ffn.width}"] = {name: spread(way) for name, way in ways.items()}
        sizes = {"hidden": ffn.hidden, "width": ffn.width, "matrices": ffn.matrices}
        how = {
            "routed": f"routed experts as a run computes them, {used.model.top_k} at once at one row, "
            f"{AT_ONCE} one after the other at more",
            "shared": "shared experts as a run computes them, launched beforehand",
            "dense": "dense ones as a run computes them",
        }
        table: Table = sizes | curve(times.charged, f"{how[used.use]}, not cached; {self.source}")
        if len(times.waited) > 1:
            table["waited"] = curve(times.waited, f"one routed expert, launched beforehand, not cached; {self.source}")
        return table

    def layer(self, model: ModelSpec) -> Table:
        """One entry of the profile's ``layer``."""
        times = layer_times(self.machine, model, self.thorough.contexts, self.thorough.prompts)
        self.least_layer.append(min(times.decode.values(), key=lambda t: t.ns))
        self.eager_layer.append(times.launched[min(times.launched)])
        hidden, shape, experts = kind(model)
        self.details["layer_us"][f"{hidden}, {shape}, {experts}"] = _layer_spreads(times)
        sizes = {"hidden": hidden, "attention": shape, "experts": experts}
        source = f"a CUDA graph of one row, a prompt's kernels, launched beforehand, not cached; {self.source}"
        return sizes | {"decode": curve(times.decode, source), "prefill": curve(times.prefill, source)}


def _layer_spreads(times: LayerTimes) -> Table:
    return {
        "decode": spread(times.decode),
        "prefill": spread(times.prefill),
        "prefill_launched": spread(times.launched),
    }


def ffn_tables(parts: Parts, blocks: Blocks, models: Iterable[ModelSpec]) -> list[Table]:
    """The profile's ``ffn``; if all of them together do not fit, one after the other."""
    found = ffns(models)
    together = parts.try_to("FFNs", partial(blocks.ffns, found))
    if together is not None:
        return together
    alone = [parts.try_to(f"FFN {used.ffn.hidden} x {used.ffn.width}", partial(blocks.ffns, [used])) for used in found]
    return [table for tables in alone for table in tables or []]


def layer_tables(parts: Parts, blocks: Blocks, models: Iterable[ModelSpec]) -> list[Table]:
    """The profile's ``layer``."""
    every = layers_of(filter(charged, models))
    tables = [parts.try_to(f"layer {_of(model)}", partial(blocks.layer, model)) for model in every]
    return [table for table in tables if table is not None]


def not_charged(parts: Parts, models: Iterable[ModelSpec], thorough: Thoroughness) -> Table:
    """Times, in bf16, of the dimensions of models that the simulator has its formula for; for a person.

    Their experts are not stored in bf16, or their layers have windows or an encoder, or other weights.
    """
    models = list(models)
    known_ffns, known_layers = {used.ffn for used in ffns(models)}, {kind(model) for model in models if charged(model)}
    ffn_us, layer_us = Table(), Table()
    for used in ffns(map(in_bf16, models)):
        if used.ffn not in known_ffns:
            what = f"{used.ffn.hidden} x {used.ffn.width}, {used.use}, {used.model.name}"
            taken = parts.try_to(f"FFN {what} as bf16", partial(ffn_times, parts.machine, [used], thorough.rows))
            if taken is not None:
                ffn_us[what] = spread(taken[used.ffn].charged)
    for model in layers_of(map(in_bf16, models)):
        if kind(model) not in known_layers:
            what = f"{_of(model)}, {model.name}"
            some = thorough.contexts[::2], thorough.prompts[::2]
            times = parts.try_to(f"layer {what} as bf16", partial(layer_times, parts.machine, model, *some))
            if times is not None:
                layer_us[what] = _layer_spreads(times)
    return {"ffn_us": ffn_us, "layer_us": layer_us}


def _of(model: ModelSpec) -> str:
    return ", ".join(map(str, kind(model)))
