"""A machine, as far as a replay needs it: GPU memory and arithmetic, the host-to-device link, software overheads.

A profile is a TOML file; those in ``sim/machine/profiles`` are built in. Every figure says where it comes from.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ground.errors import InputError
from sim.machine.copy_time import CopyTime
from sim.machine.figures import Checked, Curve, Figure, Number, Perhaps, Profile, builtin_names, positive, profile_text
from sim.machine.loop import builtin_loops, default_loop, load_loop
from sim.machine.loop_overheads import LoopFigures, LoopOverheads

DEFAULT_HARDWARE = "l40"
_BUILT_IN = "sim.machine.profiles"
_KINDS = {"eager": "eager", "CUDA graphs": "graphs"}
"""How a loop is named, by the kind that it says it is."""


def _reading(figure: Figure) -> Figure:
    # As the parameters of policies have it; it keeps the time of an expert within what a plan may say.
    if figure.value < 1e-3:
        raise ValueError("0.001 or more")
    return figure


def _fraction(figure: Figure) -> Figure:
    if not 0.01 <= figure.value <= 1:
        raise ValueError("a fraction from 0.01 to 1")
    return figure


class Gpu(Checked):
    """The GPU itself."""

    memory_gb: Number
    """Memory in decimal GB (10^9 bytes), as data sheets have it."""
    bandwidth_gbps: Number
    """Peak memory bandwidth in GB/s."""
    bandwidth_fraction: Number
    """Share of the peak bandwidth that a kernel which only reads weights reaches, 0.01 to 1."""
    tflops: Number
    """Peak arithmetic in TFLOP/s: dense bf16 with fp32 accumulation."""
    tflops_fraction: Number
    """Share of the peak arithmetic that a large matrix product reaches, 0.01 to 1."""

    _above_zero = field_validator("memory_gb", "bandwidth_gbps", "tflops")(positive)
    _shares = field_validator("bandwidth_fraction", "tflops_fraction")(_fraction)


class Link(Checked):
    """The host-to-device link: a measured curve ``h2d``, or a latency and a bandwidth."""

    name: str = Field(min_length=1)
    """What the link is called, such as PCIe 4 x16."""
    h2d: Curve | None = None
    """Nanoseconds of one copy from pinned host memory to the device, alone, by its bytes."""
    queued: Curve | None = None
    """The same of one of many copies in a row: one that waits behind another has no start-up of its own."""
    d2h: Curve | None = None
    """Nanoseconds of one copy from the device to pinned host memory. For information."""
    pageable: Curve | None = None
    """Nanoseconds of one copy from host memory that is not pinned to the device. For information."""
    latency_us: Perhaps = None
    """Microseconds that every copy takes whatever its size, where there is no curve."""
    gbps: Perhaps = None
    """Bandwidth from pinned host memory to the device in GB/s, where there is no curve."""

    @field_validator("gbps")
    @classmethod
    def _above_zero(cls, figure: Figure | None) -> Figure | None:
        return figure if figure is None else positive(figure)

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        plain = self.latency_us is not None and self.gbps is not None
        if plain == (self.h2d is not None) or (self.latency_us is None) != (self.gbps is None):
            raise ValueError("either h2d points or both latency_us and gbps")
        return self


class Ffn(Curve):
    """One FFN in bf16, measured: ``points`` are ``[rows, nanoseconds]``. It holds for all FFNs of these dimensions."""

    hidden: int = Field(ge=1)
    """The model's hidden size."""
    width: int = Field(ge=1)
    """The FFN's inner size."""
    matrices: int = Field(ge=2, le=3)
    """How many weight matrices it has: 3 with a gate, 2 without."""
    waited: Curve | None = None
    """The same of an expert of several rows that is waited for. It is launched while it is copied, so that launching is
    not in its time."""


class LayerCurves(Checked):
    """Attention and router of one layer in bf16, measured without waiting for the router's answer."""

    hidden: int = Field(ge=1)
    """The model's hidden size."""
    attention: str = Field(min_length=1)
    """The shape of the attention in words, as ``python -m sim models NAME`` shows it."""
    experts: int = Field(ge=1)
    """How many experts the router chooses from."""
    decode: Curve
    """Nanoseconds of one row by the tokens that are cached."""
    prefill: Curve
    """Nanoseconds of a prompt by its rows."""


class Layer(LoopFigures, LayerCurves):
    """The same with the loop's figures of this layer's own model; where one is left out, ``software`` has it."""


class HostCompute(Checked):
    """How fast the host computes experts."""

    host_gbps: Number
    """GB/s of experts' weights while nothing crosses the link, one row each."""
    shared_gbps: Number
    """GB/s of experts' weights while others are copied, which reads host memory too."""
    floor_us: Perhaps = None
    """Microseconds that an expert takes beside reading its weights."""
    call_us: Perhaps = None
    """Microseconds that a call's experts take together beside that, rows there and back included."""
    cores: int | None = Field(None, ge=1, le=4096)
    """How many cores compute an expert together."""
    core_gweights: dict[str, Number] = Field({})
    """10^9 weights a second that one core unpacks and multiplies with a row, by the weights' format."""

    _fast_enough = field_validator("host_gbps", "shared_gbps")(_reading)

    @field_validator("core_gweights")
    @classmethod
    def _unpacking(cls, rates: dict[str, Figure]) -> dict[str, Figure]:
        return {form: _reading(rate) for form, rate in rates.items()}


class Lookups(Checked):
    """What predictors cost at one place: a fixed time, and a rate for what is read or computed."""

    element_bytes: int = Field(ge=1, le=8)
    """Bytes of one number of a table, a query or a net: 2 for bf16, 4 for float32."""
    search_us: Number
    """Microseconds that one search takes beside reading the entries: launches, choosing the nearest."""
    iteration_us: Number
    """Microseconds that one iteration of clustering takes beside its arithmetic."""
    network_us: Number
    """Microseconds that one forward pass of a net takes beside reading its weights."""
    path_us: Number = Figure(
        value=800, source="assumed: as of the built-in profile fast, a CUDA graph on an NVIDIA H200"
    )
    """Microseconds that one pass of a path predictor takes, a token of each sequence, beside reading its weights."""
    gbps: Perhaps = None
    """GB/s at which tables and nets are read. Left out, it is what the GPU's memory reaches."""
    gflops: Perhaps = None
    """GFLOP/s of matrix products. Left out, it is what the GPU reaches."""


class Measured(Checked):
    """The look-ups of a measured machine, where tables lie on the GPU and where they lie on the host."""

    gpu: Lookups
    """Where tables lie in the GPU's memory."""
    host: Lookups
    """Where they lie on the host."""


class Hardware(Profile):
    """One machine. Times are whole nanoseconds, sizes bytes.

    A measured machine may bring more: times of whole blocks, which then take the place of the formula of
    ``sim.machine.cost``, what predictors cost, and how fast the host computes experts.
    """

    name: str = Field(min_length=1)
    """What reports call the machine."""
    description: str = ""
    """The machine in a few words."""
    gpu: Gpu
    """The GPU itself."""
    link: Link
    """The host-to-device link."""
    software: LoopOverheads
    """What the loop that drives the card adds to what the hardware needs; by default the one that ``--loop`` names."""
    eager: LoopOverheads | None = None
    """The same of kernels launched one by one, where that was measured too."""
    ffn: list[Ffn] = Field([])
    """Measured times of whole FFNs."""
    layer: list[Layer] = Field([])
    """Measured times of whole layers up to the route."""
    host: HostCompute | None = None
    """How fast the host computes experts."""
    lookups: Measured | None = None
    """What predictors cost here, for ``--software measured`` and ``measured-host``."""
    calibrated_on: list[str] = Field([])
    """The traces, by their sha256, on which figures of it were fitted. What is simulated there is no test of it."""
    details: dict[str, Any] = Field({})
    """Whatever else was measured, for a person. Nothing reads it."""

    @model_validator(mode="before")
    @classmethod
    def _driven(cls, fields: Any) -> Any:
        return {"software": default_loop(), **fields} if isinstance(fields, dict) else fields

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Hardware":
        """A built-in profile by name, or a profile from a TOML file.

        Raises InputError (one line: file, field, value, what is expected) for an unknown name or a file that is not a
        valid profile, OSError if a file cannot be read.
        """
        return cls.parse(hardware_text(name_or_path), str(name_or_path))

    def driven_by(self, loop: str) -> Self:
        """The same card with another loop: ``eager``, ``graphs``, ``measured`` (its own, if it was), or a TOML file.

        What this card itself was measured with is taken before what was measured elsewhere. Times of whole blocks are
        those of the loop that they were measured with, and go with it. Raises InputError for a loop that is not
        there, OSError if a file cannot be read.
        """
        name, own = loop.lower(), self.software
        if name == "measured" and not own.measured:
            raise InputError(
                f"loop {loop!r}: that of {self.name} was not measured; expected a profile of realrun calibrate, or "
                f"--loop {', '.join(builtin_loops())} or a file"
            )
        if name == "measured" or (own.measured and name == _KINDS.get(own.kind)):
            return self
        other = self.eager if name == "eager" else None
        return self.changed(software=other or load_loop(loop), ffn=[], layer=[])

    def without_loop(self) -> Self:
        """The card alone: launching and waiting take no time, and no whole block was timed."""
        none = dict.fromkeys(("operation_us", "expert_floor_us", "layer_floor_us", "route_wait_us"), 0)
        loop = LoopOverheads.model_validate({"kind": "none", "waits_for_route": False, **none})
        return self.changed(software=loop, ffn=[], layer=[])

    def changed(self, **fields: Any) -> Self:
        """The same machine with other values of some fields, which are valid ones."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_construct(**(own | fields))

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
    def _h2d(self) -> "CopyTime":
        if self.link.h2d is not None:
            return CopyTime.measured(self.link.h2d)
        assert self.link.latency_us is not None and self.link.gbps is not None
        return CopyTime.plain(self.link.latency_us.value, self.link.gbps.value)

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
    def _queued(self) -> "CopyTime | None":
        return None if self.link.queued is None else CopyTime.measured(self.link.queued)

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


def builtin_hardware() -> tuple[str, ...]:
    """Names of the profiles that are built in."""
    return builtin_names(_BUILT_IN)


def hardware_text(name_or_path: str | Path) -> bytes:
    """The TOML of a built-in profile by name, or of a file. Raises InputError for an unknown name, OSError."""
    return profile_text(_BUILT_IN, "hardware", name_or_path)
