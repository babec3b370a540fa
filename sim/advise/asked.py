"""What a person asks: a model in a precision, a machine, and the context that memory is kept for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from ground.command_line import Help
from ground.errors import InputError
from ground.whole_number import WholeNumber
from sim.advise.engines import Engine
from sim.advise.routing import SEQUENCES, nearest, routing
from sim.machine.assembly import Assembly
from sim.machine.figures import Figure
from sim.machine.hardware import Hardware
from sim.machine.hosts import host_of
from sim.run.charged_model import in_precision
from sim.run.memory import RESERVE
from sim.run.scene import LoadedTraces, Quantisation, Scene, SceneOptions, bundled_traces, scene_of
from traces.models.known import model_spec
from traces.models.spec import ModelSpec

HOST = "ddr5-5600x2"
"""What is taken where a person names no host and the profile has none."""


def _tokens(kind: object, tokens: Sequence[Token]) -> int:
    match = re.fullmatch(r"(\d{1,9})(k?)", tokens[0].value.strip().lower())
    if not match or int(match[1]) < 1:
        raise ValueError(f"{tokens[0].value!r}; expected tokens, such as 16384 or 16k")
    return int(match[1]) * (1024 if match[2] else 1)


def _bytes(kind: object, tokens: Sequence[Token]) -> int:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([mgt]i?b)", tokens[0].value.strip().lower(), re.ASCII)
    if not match or not float(match[1]):
        raise ValueError(f"{tokens[0].value!r}; expected bytes with a unit, such as 64GiB")
    return int(float(match[1]) * (1024 if "i" in match[2] else 1000) ** (2 + "mgt".index(match[2][0])))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question; the option of the command is named as its field."""

    model: Annotated[str, Help("a built-in name, a config.json, a .gguf, or the index of .safetensors")]
    quant: Quantisation = None
    hardware: Annotated[str, Help("the card: a built-in name or a profile, .toml")]
    host: Annotated[
        str | None,
        Help(f"memory and channels, ddr4-3200x2:16 (16 cores), or a file; default: the profile's own, else {HOST}"),
    ] = None
    host_memory: Annotated[
        int | None,
        Help(
            "the host's memory, such as 64GiB; experts there must fit it beside 4 GiB; default: unknown, not checked",
            show_default=False,
        ),
        Parameter(converter=_bytes),
    ] = None
    link: Annotated[str | None, Help("the card's link, such as pcie4x8; default: the profile's own")] = None
    loop: Annotated[
        str | None, Help("what drives the card; default: graphs, as engines do, unless the card was measured")
    ] = None
    context: Annotated[int, Help("tokens that memory is kept for, such as 16k"), Parameter(converter=_tokens)] = 8192
    kv: Annotated[str, Help("the format of cached keys and values: bf16, q8_0, q4_0, ...")] = "bf16"
    reserve: Annotated[str | None, Help(f"memory that stays free; default: {RESERVE}")] = None
    trace: Annotated[Path | None, Help("your own routing, .npz; default: the nearest that comes with this")] = None
    sequences: Annotated[WholeNumber, Help("how many of its sequences are replayed")] = SEQUENCES

    def __post_init__(self) -> None:
        """Raise InputError for no sequence."""
        if self.sequences < 1:
            raise InputError(f"--sequences {self.sequences}; expected at least 1")

    @property
    def files(self) -> list[str | Path | None]:
        """All that may be read."""
        return [self.model, self.hardware, self.host, self.loop, self.trace]

    @property
    def form(self) -> str | None:
        """The precision of experts; ``gguf`` of a GGUF file, which says it itself; None: as the model was released."""
        if self.quant is not None:
            return self.quant.strip().lower()
        return "gguf" if self.model.endswith(".gguf") else None

    @property
    def machine(self) -> Assembly:
        """The machine, with a host and a loop where the profile has none of its own."""
        card = Hardware.load(self.hardware)
        host = self.host or (None if card.host else HOST)
        loop = self.loop or (None if card.eager else "graphs")
        return Assembly(self.hardware, loop, self.link, host)

    @property
    def titled(self) -> str:
        """The machine's name without its loop, which a person seldom names."""
        return self.machine._replace(loop=self.loop).load().name


@dataclass(frozen=True)
class Routing:
    """Whose routes are replayed."""

    loaded: LoadedTraces
    path: Path
    words: str
    own: bool
    """It is the person's."""


def routed(asked: Asked) -> Routing:
    """The routes that an answer goes by. Raises InputError."""
    model = _model(asked)
    path = asked.trace or nearest(model)
    loaded, words = routing(path, model, asked.sequences)
    return Routing(loaded, path, words, path.resolve() not in {one.resolve() for one in bundled_traces()})


def _model(asked: Asked) -> ModelSpec:
    model = model_spec(asked.model)
    if model.encoder_layers:
        raise InputError(f"--model {asked.model}: has an encoder; expected a decoder alone, which the engines serve")
    return in_precision(model, asked.quant, asked.kv)


def served_by(engine: Engine, asked: Asked, machine: Hardware) -> Hardware:
    """The machine as an engine uses it: what its kernels reach of the host's memory, and what going there takes."""
    host, name = machine.host, asked.machine.host
    if host is None or engine.host_call_us is None:
        return machine
    if name is not None and not name.endswith(".toml"):
        told = host_of(name, machine.link_bytes_per_s, engine.host_share)
        slower = told.host_gbps.value / host_of(name, machine.link_bytes_per_s).host_gbps.value
        rates = {field: getattr(host, field) for field in ("host_gbps", "shared_gbps")}
        source = told.host_gbps.source
        update = {field: Figure(value=rate.value * slower, source=source) for field, rate in rates.items()}
        host = host.model_copy(update=update)
    return machine.changed(host=host.model_copy(update={"call_us": host.call_us or engine.host_call_us}))


def scene(asked: Asked, routes: Routing, hardware: Hardware | None = None) -> Scene:
    """The scene that the placements are tried in. Raises InputError, with what would fit where nothing does."""
    options: dict[str, Any] = {"quant": asked.quant, "kv": asked.kv, "context": asked.context, "reserve": asked.reserve}
    machine = asked.machine
    wanted = SceneOptions(
        (str(routes.path),), model=asked.model, hardware=machine.hardware, loop=machine.loop, link=machine.link,
        host=machine.host, cache="auto", **options,
    )  # fmt: skip
    try:
        here = scene_of(wanted, load=lambda *_: routes.loaded, hardware=hardware)
    except InputError as wrong:  # nobody here typed --cache
        told = str(wrong)
        raise InputError(told.replace("--cache auto:", f"--context {asked.context}:", 1)) from None
    return replace(here, notes=())
