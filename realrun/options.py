"""What a person says to the commands of ``python -m realrun``: every option once, for all commands that have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from ground.command_line import Help
from ground.errors import InputError
from ground.whole_number import WholeNumber
from realrun.validate.draw import BOUNDS
from sim.machine.prediction_costs import DEFAULT_SOFTWARE
from sim.run.cache_size import parse_capacity
from sim.run.scene import DEFAULT_CACHE, CacheSize, SceneOptions, Split


def _named(kind: object, tokens: Sequence[Token]) -> Path:
    """A path as written; the name of nothing, which a shell makes of an unset variable, is not this folder."""
    if not tokens[0].value:
        raise ValueError("''; expected a name")
    return Path(tokens[0].value)


Output = Annotated[Path, Parameter(converter=_named)]
Folder = Annotated[Output, Help("where the table, its data and the plot go", "--folder", "-o")]
TracePath = Annotated[Path, Help("a trace, .npz")]
MoreTraces = Annotated[Path, Help("more of the same model")]
Device = Annotated[str, Help("where to run: cuda, cuda:1, or cpu (slow, to try things out)")]
Check = Annotated[bool, Help("check the bytes of every expert before and after its kernels")]
PolicySettings = Annotated[tuple[str, ...], Help("policy parameters, key=value", show_default=False)]
JsonPath = Annotated[str | None, Help("write the report here, - is standard output", allow_leading_hyphen=True)]
LEARNED = Help("traces to learn from (their profile split)")
HostMemory = Annotated[
    str | None, Help("host memory that may be used, such as 120GiB; default: what the system says is free")
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

    steps: Annotated[WholeNumber | None, Help("decode steps of each run; default: all")] = None
    check: Check = False
    device: Device = "cuda"
    scale: Annotated[WholeNumber, Help("divide the model's widths by this, to try things out")] = 1
    shared: Annotated[
        WholeNumber | None, Help("hold only so many experts, each standing for several others; default: all")
    ] = None
    host_memory: HostMemory = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayOptions(DeviceOptions, SceneOptions):
    """Options of ``replay``; the defaults are those of a run on this machine."""

    policy: Annotated[
        tuple[str, ...],
        Help(
            "names of `python -m sim policies`, or module:Class; with parameters: name,key=value,...",
            show_default=" ".join,
        ),
    ] = ("lru",)
    set_: PolicySettings = ()
    hardware: Annotated[str, Help("the profile that bounds and policies go by")] = "h200"
    software: Annotated[str, Help("where predictions run: fast, paper or a profile, .toml")] = DEFAULT_SOFTWARE
    seed: Annotated[WholeNumber, Help("of random weights, and of policies that draw")] = 0
    json: JsonPath = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ValidateOptions(DeviceOptions):
    """Options of ``validate``: of scenes that differ in their trace and cache size alone."""

    traces: Annotated[tuple[Path, ...], Parameter(parse=False)] = ()
    policies: Annotated[
        tuple[str, ...], Help("policies to run: name or name,key=value,...; all is every one", show_default=False)
    ]
    cache: Annotated[
        tuple[str, ...] | None,
        Help(
            "cache sizes: 25%, 64 (slots), 16GiB; with --draw the least and the most; default: "
            f"{DEFAULT_CACHE}, with --draw {' '.join(BOUNDS)}",
            show_default=False,
        ),
    ] = None
    draw: Annotated[
        WholeNumber | None,
        Help("run so many pairs of a policy, a cache size and a trace, drawn at random; default: all that are named"),
    ] = None
    seed: Annotated[WholeNumber, Help("of what is drawn, and of the order of runs")] = 0
    repeat: Annotated[
        WholeNumber | None,
        Help("run each pair so often, all pairs in turn, and show the spread; default: see --seconds; with --draw 3"),
    ] = None
    folder: Folder
    hardware: Annotated[
        str | None, Help("the profile to simulate with; default: this machine is measured first")
    ] = None
    software: Annotated[
        str, Help("what predictions cost: a software profile, or measured: as --hardware has it")
    ] = "measured"
    model: Annotated[str | None, Help("the model whose dimensions are used; default: the trace's own")] = None
    profile: Annotated[tuple[str, ...] | None, LEARNED] = None
    split: Split = "eval"
    batch: Annotated[WholeNumber, Help("sequences that decode together")] = 1
    baseline: Annotated[
        bool, Help("also time accelerate's CPU offload and plain pageable copies", negative="--no-baseline")
    ] = True
    quick: Annotated[bool, Help("measure this machine in less time")] = False
    seconds: Annotated[
        float,
        Help("without --repeat: decode time to measure of each pair; shorter runs are repeated, the fastest counts"),
    ] = 2.0

    def scene(self, trace: Path, hardware: str, cache: str) -> SceneOptions:
        """The scene of one trace at one cache size, with a profile of this machine."""
        return SceneOptions(
            (trace,), model=self.model, hardware=hardware, software=self.software, cache=cache,
            profile=self.profile, split=self.split, batch=self.batch,
        )  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of ``generate``."""

    model: Annotated[str, Help("a checkpoint's folder, or its name on the Hugging Face hub")]
    prompt: Annotated[str, Help("the text that the model continues")]
    policy: Annotated[str, Help("a policy that is not told the future: name or name,key=value,...")] = "lru"
    set_: PolicySettings = ()
    tokens: Annotated[WholeNumber, Help("how many tokens to generate at most")] = 32
    cache: CacheSize = DEFAULT_CACHE
    profile: Annotated[tuple[str, ...], LEARNED, Parameter(show_default=False)] = ()
    check: Check = False
    compare: Annotated[
        bool, Help("first run the model with all experts on the GPU, which must fit, and compare")
    ] = False
    device: Device = "cuda"
    host_memory: HostMemory = None
    seed: Annotated[WholeNumber, Help("for policies that draw at random")] = 0
    json: JsonPath = None
