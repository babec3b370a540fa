"""What real engines offer: placements of experts, the policy that stands for each, and how it is asked for."""

import re
import tomllib
from functools import cache
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from sim.machine.figures import Figure
from sim.policies.named import NamedPolicy
from traces.models.spec import ModelSpec

_GGUF = re.compile(r"i?q\d|tq\d|mxfp4_moe")
_RELEASED: dict[float, str] = {16: "bf16", 8: "fp8"}
"""What models of so many bits a weight were released in."""


class Placement(BaseModel):
    """One way in which an engine serves a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    policy: str
    """``name,key=value,...``"""
    command: str
    """As typed, with what is filled in in braces."""
    routing: bool = False
    """Whether its speed hangs on which experts tokens take."""
    whole: bool = False
    """Whether all experts must fit the card."""
    newer: bool = False
    """Whether only recent builds of the engine have its options."""
    note: str = ""
    """What a person should know of it."""

    def named(self) -> NamedPolicy:
        """The policy with its parameters."""
        return NamedPolicy.of(self.policy)


class Engine(BaseModel):
    """One engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    formats: tuple[str, ...]
    """Precisions that it reads; ``gguf`` stands for all types of GGUF files."""
    methods: dict[str, str] = {}
    """What its kernels for each of ``formats`` are called, where its commands name them as ``{method}``."""
    source: str
    """Where its options are documented."""
    note: str = ""
    """What a person should know of it."""
    host_share: Figure | None = None
    """Share of the peak of the host's memory that its kernels reach."""
    host_call_us: Figure | None = None
    """What it takes to go to the host and back, a layer."""
    placements: tuple[Placement, ...] = Field(alias="placement")

    def reads(self, form: str | None) -> bool:
        """Whether it reads experts of this precision; None is what the model was released in."""
        return form is None or _kind(form) in self.formats or form in self.formats

    def method(self, form: str | None, model: ModelSpec) -> str:
        """What kernels for experts of this precision are called; empty where none has them or none is named."""
        released = _RELEASED.get(8 * max(model.expert_bytes) / model.expert_parameters, "")
        return self.methods.get(released if form is None else _kind(form), "")


def _kind(form: str) -> str:
    return "gguf" if _GGUF.match(form) else form


@cache
def engines() -> tuple[Engine, ...]:
    """The engines that are known."""
    text = resources.files("sim.advise").joinpath("engines.toml").read_text("utf-8")
    return tuple(Engine.model_validate(table) for table in tomllib.loads(text)["engine"])
