"""A machine, as far as a replay needs it: GPU memory and arithmetic, the host-to-device link, software overheads.

A profile is a TOML file; those in ``sim/machine/profiles`` are built in. Every figure says where it comes from.
"""

import bisect
import itertools
import math
import tomllib
from fractions import Fraction
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from ground.errors import InputError
from ground.field_errors import expectation

DEFAULT_HARDWARE = "l40"

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(BaseModel):
    """One number with its origin."""

    model_config = STRICT

    value: float = Field(ge=0, le=1e9)
    source: str = Field(min_length=1)
    measured: bool = False
    """True only for what was measured for this project; other people's measurements are named in ``source``."""


def _bare_number(value: object) -> object:
    """A bare number in a person's own profile needs no further words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": value, "source": "as given in the profile"}
    return value


def _positive(figure: Figure) -> Figure:
    # The least keeps every simulated time within 64 bits of nanoseconds.
    if figure.value < 1e-6:
        raise ValueError("above 0 (at least 1e-6)")
    return figure


def _reading(figure: Figure) -> Figure:
    # As the parameters of policies have it; it keeps the time of an expert within what a plan may say.
    if figure.value < 1e-3:
        raise ValueError("0.001 or more")
    return figure


def _fraction(figure: Figure) -> Figure:
    if not 0.01 <= figure.value <= 1:
        raise ValueError("a fraction from 0.01 to 1")
    return figure


from_number = BeforeValidator(_bare_number)


class _Checked(BaseModel):
    model_config = STRICT


class Gpu(_Checked):
    """The GPU itself."""

    memory_gb: Annotated[Figure, from_number]
    """Memory in decimal GB, as data sheets have it."""
    bandwidth_gbps: Annotated[Figure, from_number]
    """Peak memory bandwidth, GB/s."""
    bandwidth_fraction: Annotated[Figure, from_number]
    """Share of it that a kernel which only reads weights reaches."""
    tflops: Annotated[Figure, from_number]
    """Peak dense bf16 TFLOP/s with fp32 accumulation."""
    tflops_fraction: Annotated[Figure, from_number]
    """Share of it that a large matrix product reaches."""

    _above_zero = field_validator("memory_gb", "bandwidth_gbps", "tflops")(_positive)
    _shares = field_validator("bandwidth_fraction", "tflops_fraction")(_fraction)


class Curve(_Checked):
    """Time of one copy over its size, measured."""

    points: list[list[int]] = Field(min_length=2)
    """``[bytes, nanoseconds]``, both ascending."""
    source: str = Field(min_length=1)
    measured: bool = False

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: list[list[int]]) -> list[list[int]]:
        before = [0, 0]
        for point in points:
            ascending = len(point) == 2 and point[0] > before[0] and point[1] > before[1]
            if not ascending or max(point) > 10**15:
                raise ValueError(
                    f"pairs of [bytes or rows, ns], both ascending, above 0 and at most 1e15 (wrong at {point})"
                )
            before = point
        return points


class Link(_Checked):
    """The host-to-device link: a measured curve ``h2d``, or a latency and a bandwidth.

    ``queued`` is the time of one of many copies in a row: one that waits behind another has no start-up of its own.
    ``d2h`` and ``pageable`` (host to device from memory that is not pinned) are for information: a policy that writes
    evicted experts back uses ``d2h``.
    """

    name: str = Field(min_length=1)
    h2d: Curve | None = None
    queued: Curve | None = None
    d2h: Curve | None = None
    pageable: Curve | None = None
    latency_us: Annotated[Figure | None, from_number] = None
    gbps: Annotated[Figure | None, from_number] = None

    @field_validator("gbps")
    @classmethod
    def _above_zero(cls, figure: Figure | None) -> Figure | None:
        return figure if figure is None else _positive(figure)

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        plain = self.latency_us is not None and self.gbps is not None
        if plain == (self.h2d is not None) or (self.latency_us is None) != (self.gbps is None):
            raise ValueError("either h2d points or both latency_us and gbps")
        return self


class Software(_Checked):
    """What the software adds to what the hardware needs. All times in microseconds, on the GPU's timeline."""

    kind: str = Field(min_length=1)
    """In a word, e.g. ``eager``: one kernel launched after the other from Python."""
    operation_us: Annotated[Figure, from_number]
    """Added to the roofline time of each block (an expert's FFN, a layer's attention with router, the LM head)."""
    expert_floor_us: Annotated[Figure, from_number]
    """The least that one FFN takes, however few its bytes: its launches."""
    layer_floor_us: Annotated[Figure, from_number]
    """The least that attention and router of one layer take: their launches and the loop's work for that layer."""
    route_wait_us: Annotated[Figure, from_number]
    """What it costs a routed layer that the host waits for the router's answer."""
    waits_for_route: bool
    """Whether it waits: any policy that fetches what the router asks for must."""
    launch_us: Annotated[Figure | None, from_number] = None
    """What passes, once a route is known, before experts that are there begin. Those that are waited for are launched
    while their copies run. None where `route_wait_us` holds it."""
    alone_us: Annotated[Figure | None, from_number] = None
    """How much longer an expert that is waited for takes than one of those that are there, which run together."""
    copying_us: Annotated[Figure | None, from_number] = None
    """How much longer a routed layer takes if a copy is under way as its attention begins: the two share the GPU's
    memory, and the host what it hands out."""
    handover_us: Annotated[Figure | None, from_number] = None
    """How much longer an expert's copy takes in a run than a copy of its size by itself: the host hands it over while
    it does other things, and the computing stream has to see that it is there."""


class Ffn(Curve):
    """One FFN in bf16, measured: ``points`` are ``[rows, nanoseconds]``. It holds for all FFNs of these dimensions.

    ``waited`` is the same of experts of several rows that are waited for: they are launched while they are copied, so
    that launching is not in their time.
    """

    hidden: int = Field(ge=1)
    width: int = Field(ge=1)
    matrices: int = Field(ge=2, le=3)
    waited: Curve | None = None


class Layer(_Checked):
    """Attention and router of one layer in bf16, measured without waiting for the router's answer."""

    hidden: int = Field(ge=1)
    attention: str = Field(min_length=1)
    """The shape in words, as ``Attention.shape`` of a model has it."""
    experts: int = Field(ge=1)
    """Outputs of the router."""
    decode: Curve
    """``[cached tokens, nanoseconds]`` of one row."""
    prefill: Curve
    """``[rows, nanoseconds]`` of a prompt."""
    route_wait_us: Annotated[Figure | None, from_number] = None
    launch_us: Annotated[Figure | None, from_number] = None
    alone_us: Annotated[Figure | None, from_number] = None
    copying_us: Annotated[Figure | None, from_number] = None
    handover_us: Annotated[Figure | None, from_number] = None
    """All five as in `Software`, of this layer's own model."""


class HostCompute(_Checked):
    """What the host computes experts at, in bf16 and one row each: 10^9 bytes of their weights a second."""

    host_gbps: Annotated[Figure, from_number]
    """While nothing crosses the link."""
    shared_gbps: Annotated[Figure, from_number]
    """While experts are copied, which reads host memory too."""

    _fast_enough = field_validator("host_gbps", "shared_gbps")(_reading)


class Lookups(_Checked):
    """What predictors cost at one place: a fixed time, and a rate for what is read or computed."""

    element_bytes: int = Field(ge=1, le=8)
    """Bytes of one number of a table, a query or a net: 2 for bf16, 4 for float32."""
    search_us: Annotated[Figure, from_number]
    """What one search takes beside reading the entries: launches, choosing the nearest."""
    iteration_us: Annotated[Figure, from_number]
    """What one iteration of clustering takes beside its arithmetic."""
    network_us: Annotated[Figure, from_number]
    """What one forward pass of a net takes beside reading its weights."""
    gbps: Annotated[Figure | None, from_number] = None
    """GB/s at which tables and nets are read; None for the GPU's memory as the hardware profile has it."""
    gflops: Annotated[Figure | None, from_number] = None
    """GFLOP/s of matrix products; None for the GPU's as the hardware profile has it."""


class Measured(_Checked):
    """The look-ups of a measured machine, where tables lie on the GPU and where they lie on the host."""

    gpu: Lookups
    host: Lookups


class Hardware(_Checked):
    """One machine. Times are whole nanoseconds, sizes bytes.

    A measured machine may bring more: times of whole blocks, which then take the place of the formula of ``sim.machine.cost``,
    what predictors cost (``--software measured``), how fast the host computes experts, and under ``details`` whatever
    else was measured, for a person.
    """

    name: str = Field(min_length=1)
    description: str = ""
    gpu: Gpu
    link: Link
    software: Software
    ffn: list[Ffn] = []
    layer: list[Layer] = []
    host: HostCompute | None = None
    lookups: Measured | None = None
    details: dict[str, Any] = {}

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Hardware":
        """A built-in profile by name, or a profile from a TOML file.

        Raises InputError (one line: file, field, value, what is expected) for an unknown name or a file that is not a
        valid profile, OSError if a file cannot be read.
        """
        name = str(name_or_path)
        if name.lower() in builtin_hardware():
            source = resources.files("sim.machine.profiles").joinpath(f"{name.lower()}.toml")
            return cls.parse(source.read_bytes(), name)
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.is_file():
            known = ", ".join(builtin_hardware())
            raise InputError(f"hardware {name!r} is unknown; expected a .toml profile or one of {known}")
        return cls.parse(path.read_bytes(), name)

    @classmethod
    def parse(cls, text: bytes | str, name: str) -> "Hardware":
        """A profile from TOML text; ``name`` begins the error."""
        try:
            decoded = text.decode("utf-8") if isinstance(text, bytes) else text
            fields = tomllib.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: not valid TOML: {error}") from error
        return cls.from_dict(fields, name)

    @classmethod
    def from_dict(cls, fields: dict[str, Any], name: str = "hardware") -> "Hardware":
        """A profile from the tables of its TOML file; ``name`` begins the error."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise InputError(f"{name}: {first_fault(error)}") from error

    @property
    def gpu_bytes(self) -> int:
        """GPU memory."""
        return int(self.gpu.memory_gb.value * 1e9)

    @property
    def memory_bytes_per_s(self) -> float:
        """GPU memory bandwidth that is reached."""
        return self.gpu.bandwidth_gbps.value * self.gpu.bandwidth_fraction.value * 1e9

    @property
    def flops_per_s(self) -> float:
        """Arithmetic that is reached."""
        return self.gpu.tflops.value * self.gpu.tflops_fraction.value * 1e12

    @cached_property
    def _h2d(self) -> "_CopyTime":
        if self.link.h2d is not None:
            return _CopyTime.measured(self.link.h2d)
        assert self.link.latency_us is not None and self.link.gbps is not None
        return _CopyTime.plain(self.link.latency_us.value, self.link.gbps.value)

    def copy_ns(self, size: int) -> int:
        """Time of one pinned host-to-device copy of ``size`` bytes on an idle link, latency included, rounded up.

        On a measured curve: linear between two points; below the first, down to `link_latency_ns` at 0 bytes; above
        the last, on at the bandwidth of the last two. Otherwise latency + size / bandwidth. More bytes never take
        less time. Raises ValueError for a negative size.
        """
        return self._h2d(size)

    def startup_ns(self, size: int) -> int:
        """The part of `copy_ns` that a copy which follows another at once is spared, where that was measured.

        Otherwise what does not scale with the size, which then every copy pays.
        """
        if self._queued is None:
            return self.link_latency_ns
        return max(0, self.copy_ns(size) - self._queued(size))

    @cached_property
    def _queued(self) -> "_CopyTime | None":
        return None if self.link.queued is None else _CopyTime.measured(self.link.queued)

    @cached_property
    def link_latency_ns(self) -> int:
        """The part of every copy that does not scale with its size."""
        return self._h2d(0)

    @cached_property
    def link_bytes_per_s(self) -> float:
        """The largest bandwidth that any copy, however large, can reach: ``size / copy_ns(size)`` is never above it.

        Nor is that of a copy among others in a row.
        """
        alone = self._h2d.peak_bytes_per_s
        return alone if self._queued is None else max(alone, self._queued.peak_bytes_per_s)

    @property
    def link_source(self) -> str:
        """Where the link's speed is from, in a word: measured for this project, by others, or assumed."""
        if self.link_measured:
            return "measured"
        figure = self.link.h2d or self.link.gbps
        return figure.source.split(":")[0] if figure else ""

    @property
    def link_measured(self) -> bool:
        """Whether the link was measured for this project."""
        figure = self.link.h2d or self.link.gbps
        return figure is not None and figure.measured


class _CopyTime:
    """Time over size as straight pieces, in exact rationals, so that rounding never breaks monotony."""

    def __init__(self, points: list[tuple[int, Fraction]], last_slope: Fraction) -> None:
        self.sizes = [size for size, _ in points]
        self.times = [time for _, time in points]
        steps = itertools.pairwise(points)
        self.slopes = [(t1 - t0) / (b1 - b0) for (b0, t0), (b1, t1) in steps] + [last_slope]

    @classmethod
    def plain(cls, latency_us: float, gbps: float) -> "_CopyTime":
        """Latency and bandwidth; decimal fractions are taken as they are written."""
        return cls([(0, Fraction(math.ceil(Fraction(str(latency_us)) * 1000)))], 1 / Fraction(str(gbps)))

    @classmethod
    def measured(cls, curve: Curve) -> "_CopyTime":
        """The curve, continued to 0 bytes at its first slope and beyond its end at its last."""
        points = [(size, Fraction(time)) for size, time in curve.points]
        (b0, t0), (b1, t1) = points[0], points[1]
        start = max(Fraction(0), t0 - b0 * (t1 - t0) / (b1 - b0))
        (b2, t2), (b3, t3) = points[-2], points[-1]
        return cls([(0, start), *points], (t3 - t2) / (b3 - b2))

    def __call__(self, size: int) -> int:
        size = int(size)
        if size < 0:
            raise ValueError(f"size is {size}; expected 0 bytes or more")
        piece = bisect.bisect_right(self.sizes, size) - 1
        return math.ceil(self.times[piece] + (size - self.sizes[piece]) * self.slopes[piece])

    @property
    def peak_bytes_per_s(self) -> float:
        """Size over time rises or falls along each piece, so its maximum is at a point or in the limit."""
        at_points = [size / time for size, time in zip(self.sizes, self.times, strict=True) if size]
        exact = max([*at_points, 1 / self.slopes[-1]]) * 10**9
        rounded = float(exact)
        return rounded if rounded >= exact else math.nextafter(rounded, math.inf)


def builtin_hardware() -> tuple[str, ...]:
    """Names of the profiles that are built in."""
    files = resources.files("sim.machine.profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def first_fault(error: ValidationError) -> str:
    """The first complaint as one line: field, value, what would be right."""
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    expected = _table(fault["ctx"]["class_name"]) if fault["type"] == "model_type" else expectation(fault)
    if fault["type"] == "missing":
        return f"{field} is missing; expected {expected}"
    found = fault["input"]
    found = found.get("value", found) if isinstance(found, dict) else found  # a figure in full
    found = str(found).lower() if isinstance(found, bool) else repr(found)  # as TOML writes it
    whole = isinstance(fault["input"], dict) and "value" not in fault["input"] and fault["type"] == "value_error"
    return f"{field}{'' if whole else f' is {found}'}; expected {expected}"


def _table(kind: str) -> str:
    """What is expected where a table of the class ``kind`` stands."""
    if kind == Figure.__name__:
        return "a number, with a decimal point, or a table of value and source"
    fields = {model.__name__: model.model_fields for model in (*_Checked.__subclasses__(), *Curve.__subclasses__())}
    needed = [name for name, field in fields.get(kind, {}).items() if field.is_required()]
    return f"a table with {', '.join(needed)}" if needed else "a table"
