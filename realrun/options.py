"""What a person says to the commands of ``python -m realrun``: every option once, for all commands that have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from ground.errors import InputError
from ground.whole_number import WholeNumber
from sim.machine.prediction_costs import DEFAULT_SOFTWARE
from sim.run.cache_size import parse_capacity
from sim.run.scene import DEFAULT_CACHE, SceneOptions


def _named(kind: object, tokens: Sequence[Token]) -> Path:
    """A path as written; the name of nothing, which a shell makes of an unset variable, is not this folder."""
    if not tokens[0].value:
        raise ValueError("''; expected a name")
    return Path(tokens[0].value)


Several = Parameter(consume_multiple=True, negative=(), show_default=False)
Switch = Parameter(negative=())
Output = Annotated[Path, Parameter(converter=_named)]
Folder = Annotated[Output, Parameter(name=["--folder", "-o"], help="where the table, its data and the plot go")]
TracePath = Annotated[Path, Parameter(help="a trace, .npz")]
Device = Annotated[str, Parameter(help="where to run: cuda, cuda:1, or cpu (slow, to try things out)")]
PolicySettings = Annotated[tuple[str, ...], Several, Parameter(name=["--set"], help="policy parameters, key=value")]
JsonPath = Annotated[
    str | None,
    Parameter(name=["--json"], allow_leading_hyphen=True, help="write the report here, - is standard output"),
]
HostMemory = Annotated[
    str | None, Parameter(help="host memory that may be used, such as 120GiB; default: what the system says is free")
]


def host_bytes_of(text: str | None) -> int | None:
    """Bytes of host memory meant by ``120GiB``; None for no word. Raises InputError."""
    if text is None:
        return None
    try:
        return parse_capacity(text if text[-1:].isalpha() else f"{text}B", (1,), 1)
    except InputError:
        raise InputError(f"--host-memory {text!r}: expected bytes, such as 120GiB") from None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where a trace is run, and how much of it."""

    steps: Annotated[WholeNumber | None, Parameter(help="decode steps of each run; default: all")] = None
    check: Annotated[
        bool, Switch, Parameter(help="check the bytes of every expert before and after its kernels")
    ] = False
    device: Device = "cuda"
    scale: Annotated[WholeNumber, Parameter(help="divide the model's widths by this, to try things out")] = 1
    shared: Annotated[
        WholeNumber | None, Parameter(help="hold only so many experts, each standing for several others; default: all")
    ] = None
    host_memory: HostMemory = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayOptions(DeviceOptions, SceneOptions):
    """Options of ``replay``; the defaults are those of a run on this machine."""

    policy: Annotated[
        tuple[str, ...],
        Several,
        Parameter(
            show_default=" ".join,
            help="names of `python -m sim policies`, or module:Class; with parameters: name,key=value,...",
        ),
    ] = ("lru",)
    set_: PolicySettings = ()
    hardware: Annotated[str, Parameter(help="the profile that bounds and policies go by")] = "h200"
    software: Annotated[
        str, Parameter(help="where predictions run: fast, paper or a profile, .toml")
    ] = DEFAULT_SOFTWARE
    seed: Annotated[WholeNumber, Parameter(help="of random weights, and of policies that draw")] = 0
    json: JsonPath = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ValidateOptions(DeviceOptions):
    """Options of ``validate``: of scenes that differ in their cache size alone."""

    traces: Annotated[tuple[Path, ...], Parameter(parse=False)] = ()
    policies: Annotated[tuple[str, ...], Several, Parameter(help="policies to run: name or name,key=value,...")]
    cache: Annotated[
        tuple[str, ...], Several, Parameter(show_default=" ".join, help="cache sizes: 25%, 64 (slots), 16GiB")
    ] = (DEFAULT_CACHE,)
    folder: Folder
    hardware: Annotated[
        str | None, Parameter(help="the profile to simulate with; default: this machine is measured first")
    ] = None
    software: Annotated[
        str, Parameter(help="what predictions cost: a software profile, or measured: as --hardware has it")
    ] = "measured"
    model: Annotated[str | None, Parameter(help="the model whose dimensions are used; default: the trace's own")] = None
    profile: Annotated[
        tuple[str, ...] | None, Several, Parameter(help="traces whose profile split policies learn from")
    ] = None
    split: Annotated[str, Parameter(help="which sequences to replay: eval, profile or all")] = "eval"
    baseline: Annotated[bool, Parameter(help="also time accelerate's CPU offload and plain pageable copies")] = True
    quick: Annotated[bool, Switch, Parameter(help="measure this machine in less time")] = False
    seconds: Annotated[
        float, Parameter(help="decode time to measure of each pair; shorter runs are repeated, the fastest counts")
    ] = 2.0

    def scene(self, hardware: str, cache: str) -> SceneOptions:
        """The scene at one cache size, with a profile of this machine."""
        return SceneOptions(
            self.traces, model=self.model, hardware=hardware, software=self.software, cache=cache,
            profile=self.profile, split=self.split,
        )  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of ``generate``."""

    model: Annotated[str, Parameter(help="a checkpoint's folder, or its name on the Hugging Face hub")]
    prompt: Annotated[str, Parameter(help="the text that the model continues")]
    policy: Annotated[
        str, Parameter(help="a policy that is not told the future: name or name,key=value,...")
    ] = "lru"
    set_: PolicySettings = ()
    tokens: Annotated[WholeNumber, Parameter(help="how many tokens to generate at most")] = 32
    cache: Annotated[
        str, Parameter(help="GPU memory for experts: 64 (slots), 25%, 4000MiB, 16GiB")
    ] = DEFAULT_CACHE
    profile: Annotated[
        tuple[str, ...], Several, Parameter(help="traces whose profile split the policy learns from")
    ] = ()
    check: Annotated[
        bool, Switch, Parameter(help="check the bytes of every expert before and after it runs")
    ] = False
    compare: Annotated[
        bool, Switch, Parameter(help="first run the model with all experts on the GPU, which must fit, and compare")
    ] = False
    device: Device = "cuda"
    host_memory: HostMemory = None
    seed: Annotated[WholeNumber, Parameter(help="for policies that draw at random")] = 0
    json: JsonPath = None
