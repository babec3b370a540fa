"""Speeds that strangers published, and how each of their machines is put together here.

The rows, with what their sources state, are in ``strangers.toml``. At batch 1 every token takes K experts a layer, and
where whole layers live on the host or the card, it does not matter which. Such rows, and those where the card keeps
some experts of each layer, run routes that are drawn at random; a cache of experts runs a bundled trace.
"""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from sim.machine.assembly import Assembly
from sim.machine.figures import Checked, Figure
from sim.machine.hardware import Hardware
from sim.machine.hosts import host_kinds
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report
from sim.run.prepared import prepare
from sim.run.scene import LoadedTraces, Scene, SceneOptions, bundled_traces, scene_of
from traces.models.known import resolve_model
from traces.models.spec import ModelSpec
from traces.schema import DECODE, PREFILL
from traces.trace import Trace, validate

UBATCH = 512
"""Rows of a prompt that llama.cpp runs at once, by default."""
DECODED = 32
"""Tokens that a made-up sequence decodes."""


class Row(Checked):
    """One published speed: what its source states, and how it is simulated."""

    name: str
    """What tables call it."""
    source: str
    """Where it was published."""
    states: str
    """What the source says of machine, engine and setting."""
    unknown: str
    """What it does not say."""
    model: str
    """A built-in model."""
    quant: str
    """Its precision, as ``--quant`` has it."""
    kv: str = "bf16"
    """That of keys and values."""
    hardware: str
    """The card."""
    backend: str = "CUDA"
    """What the engine drives it with; nothing here hangs on that."""
    loop: str = "graphs"
    """How kernels are launched."""
    host: str | None = None
    """The host, where it computes experts."""
    cpu_layers: int | None = Field(None, ge=1)
    """Routed layers whose experts the host computes."""
    gpu_experts: int | None = Field(None, ge=1)
    """Experts of each layer that the card keeps, the host computing the others."""
    slots: int | None = Field(None, ge=1)
    """Experts of each layer in an LRU cache, the others being copied when they are asked for."""
    context: int = Field(256, ge=2)
    """Tokens whose keys and values a token reads."""
    measured: float = Field(gt=0)
    """Tokens/s that the source measured."""
    prompt: float | None = Field(None, gt=0)
    """Tokens/s of a prompt of ``prompt_tokens`` tokens."""
    prompt_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_place(self) -> "Row":
        if sum(one is not None for one in (self.cpu_layers, self.gpu_experts, self.slots)) > 1:
            raise ValueError("one of cpu_layers, gpu_experts and slots")
        if (self.prompt is None) != (self.prompt_tokens is None):
            raise ValueError("prompt and prompt_tokens together")
        return self

    @property
    def resident(self) -> bool:
        """Whether all experts are on the card."""
        return self.cpu_layers is self.gpu_experts is self.slots is None

    @property
    def on_llama_host(self) -> bool:
        """Whether llama.cpp, or ik_llama.cpp, computes experts on the host."""
        return self.cpu_layers is not None

    @property
    def spec(self) -> ModelSpec:
        """The model as released."""
        return resolve_model(self.model)

    @property
    def policy(self) -> NamedPolicy:
        """What decides where experts are computed, as the engine does."""
        if self.cpu_layers is not None:
            return NamedPolicy(self.name, "n-cpu-moe", {"layers": self.cpu_layers})
        if self.gpu_experts is not None:
            return NamedPolicy(self.name, "kt", {"place": "uniform"})
        if self.slots is not None:
            return NamedPolicy(self.name, "lru", {"scope": "layer"})
        return NamedPolicy(self.name, "all-in-gpu")

    @property
    def cache(self) -> str:
        """Room for the experts that the card keeps."""
        spec = self.spec
        if self.cpu_layers is not None:
            return f"{1 + (spec.routed_layers - self.cpu_layers) * spec.experts}"  # one slot for what is copied
        if self.gpu_experts is not None:
            return f"{1 + spec.routed_layers * self.gpu_experts}"
        return "100%" if self.slots is None else f"{self.slots}/layer"

    @property
    def machine(self) -> Hardware:
        """The machine that its source states."""
        return self.driven_by(self.loop)

    def driven_by(self, loop: str) -> Hardware:
        """The same with another loop."""
        return Assembly(self.hardware, loop, None, self.host).load()

    def simulated(self, machine: Hardware | None = None) -> float:
        """Tokens/s of decode, by default on its own machine. Raises InputError."""
        return self._report(machine, self.context).tokens_per_s or 0.0

    def simulated_prompt(self) -> float | None:
        """Tokens/s of a prompt of ``prompt_tokens``, if the source measured one. Raises InputError.

        The prompt is the second of two, since as the first runs, experts are still brought to the card. llama.cpp runs
        it in parts.
        """
        if self.prompt_tokens is None:
            return None
        parts = None if self.gpu_experts is not None else UBATCH
        first, both = (self._report(None, self.prompt_tokens, count, parts).ttft_ms.mean or 0.0 for count in (1, 2))
        return 1e3 * self.prompt_tokens / (2 * both - first)

    def _report(self, machine: Hardware | None, prompt: int, sequences: int = 1, ubatch: int | None = None) -> Report:
        policy = self.policy
        return prepare(self._scene(machine, prompt, sequences, ubatch), policy.name, policy.values).simulate()

    def _scene(self, machine: Hardware | None, prompt: int, sequences: int, ubatch: int | None) -> Scene:
        given: dict[str, Any] = {"model": self.model, "quant": self.quant, "kv": self.kv, "cache": self.cache}
        given["ubatch"] = ubatch
        machine = machine or self.machine
        if self.slots is not None:
            return scene_of(SceneOptions((trace_of(self.model),), **given), hardware=machine)
        trace = made_up(self.spec, prompt, sequences)
        loaded = LoadedTraces(trace, trace, (trace,), ())
        return scene_of(SceneOptions(("made up",), **given), load=lambda *_: loaded, hardware=machine)


def trace_of(model: str) -> Path:
    """The first bundled trace of a model."""
    return next(path for path in bundled_traces() if Trace.load_meta(path)["model"]["name"] == model)


def made_up(model: ModelSpec, prompt: int, sequences: int = 1) -> Trace:
    """Sequences of ``prompt`` tokens, which go round all experts, and `DECODED` more, which draw them at random.

    So what the card keeps is there when a prompt ends.
    """
    length, rng = prompt + DECODED, np.random.default_rng(0)
    experts = np.empty((length, model.routed_layers, model.top_k), np.int16)
    experts[:prompt] = (np.arange(prompt * model.top_k) % model.experts).reshape(prompt, 1, model.top_k)
    experts[prompt:] = rng.random((DECODED, model.routed_layers, model.experts)).argsort(2)[:, :, : model.top_k]
    place = np.tile(np.arange(length, dtype=np.int32), sequences)
    trace = Trace(
        meta={
            "schema": 1,
            "model": {"name": model.name, "experts": model.experts, "top_k": model.top_k},
            "captured": {"what": "made up: routes at random"},
        },
        layers=np.array(model.moe_layers, np.int32),
        experts=np.tile(experts, (sequences, 1, 1)),
        token=np.full(len(place), -1, np.int32),
        sequence=np.repeat(np.arange(sequences, dtype=np.int32), length),
        position=place,
        phase=np.where(place < prompt, PREFILL, DECODE).astype(np.uint8),
        domain=np.full(sequences, "made up"),
        split=np.full(sequences, "eval"),
        sequence_id=np.array([f"s{number}" for number in range(sequences)]),
    )
    validate(trace)
    return trace


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("analysis").joinpath("strangers.toml").read_text("utf-8"))


@cache
def rows() -> tuple[Row, ...]:
    """Published speeds that are simulated."""
    return tuple(Row.model_validate(row) for row in _table()["row"])


def left_out() -> list[dict[str, str]]:
    """Published speeds that are not: ``source``, ``what`` and ``why``."""
    return list(_table()["left_out"])


FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "host's memory": ("host", ("host_gbps", "shared_gbps")),
    "host's cores": ("host", ("core_gweights",)),
    "card's memory": ("gpu", ("bandwidth_gbps",)),
    "loop": (
        "software",
        ("operation_us", "expert_floor_us", "layer_floor_us", "route_wait_us", "launch_us", "awaited_extra_us"),
    ),
    "link": ("link", ("gbps",)),
}
"""Figures of a machine by what tables call them: a table of its profile, and those of its fields that belong to it."""
_MOST = 16.0


def multiplied(machine: Hardware, figure: str, by: float) -> Hardware:
    """``machine`` with a figure of `FIGURES` so many times as large."""
    table, names = FIGURES[figure]
    part = getattr(machine, table)
    values = {name: _times(value, by) for name in names if (value := getattr(part, name)) is not None}
    return machine.changed(**{table: part.model_copy(update=values)})


def _times(value: Any, by: float) -> Any:
    if isinstance(value, dict):
        return {key: _times(one, by) for key, one in value.items()}
    return value.model_copy(update={"value": value.value * by})


def explaining(row: Row) -> dict[str, float]:
    """By how much each single figure must be multiplied for the measured speed, where a factor up to 16 does it."""
    names = [name for name in FIGURES if row.host is not None or not name.startswith("host")]
    names = [name for name in names if name != "link" or row.slots is not None]
    found = {name: _factor(row, name) for name in names}
    return {name: by for name, by in found.items() if by is not None}


def _factor(row: Row, figure: str) -> float | None:
    """The factor, to 1 %, with which the row is as fast as it was measured; None beyond 16 or a 16th."""
    machine = row.machine

    def faster(by: float) -> float:
        return row.simulated(multiplied(machine, figure, math.exp(by))) - row.measured

    ends = -math.log(_MOST), math.log(_MOST)
    low, high = map(faster, ends)
    if low * high > 0:
        return None
    begin, end = ends if low < high else ends[::-1]  # the speed rises from begin to end
    while abs(end - begin) > 0.01:
        middle = (begin + end) / 2
        begin, end = (begin, middle) if faster(middle) > 0 else (middle, end)
    return math.exp((begin + end) / 2)


def lacking_us(row: Row, speed: float) -> float:
    """Microseconds of a measured token that a simulated one of ``speed`` lacks, a layer.

    Layers are those whose experts the host computes or, where there are none, all routed ones.
    """
    layers = row.cpu_layers or row.spec.routed_layers
    return 1e6 * (1 / row.measured - 1 / speed) / layers


@cache
def kernels_share() -> float:
    """The share of a host's peak bandwidth that llama.cpp's kernels reach, the median of machines without a GPU."""
    return median(one["gb"] * one["tokens_per_s"] / one["peak_gbps"] for one in _table()["cpu_only"])


def with_kernels(row: Row, machine: Hardware) -> Hardware:
    """``machine`` with that share in the place of its host's own."""
    own = max((name for name in host_kinds() if row.host and row.host.startswith(name)), key=len)
    return multiplied(machine, "host's memory", kernels_share() / host_kinds()[own].share.value)


def with_round_trips(machine: Hardware) -> Hardware:
    """``machine`` if going to the host and back takes what others measured, instead of two copies of a row."""
    table = _table()["round_trip"]
    assert machine.host is not None
    call = Figure(value=table["us"], source=table["source"])
    return machine.changed(host=machine.host.model_copy(update={"call_us": call}))
