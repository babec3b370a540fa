"""What predicting costs on a machine: where a predictor's arithmetic runs, and how fast its software does it.

A profile is a TOML file; those in this folder are built in. ``fast`` searches tables on the GPU, ``paper`` on the host,
as systems do that copy the query back and search with a CPU library. Four operations are charged:

* a similarity search: every entry is read once, for one query or several;
* clustering the embeddings of a prompt: each iteration is a search of all rows among the centres and a mean;
* a forward pass of a predictor net: its weights are read once;
* loading a table to where it is searched.

The first three take the formula of every block in ``sim.machine.cost``, a fixed time plus the longer of bytes over
bandwidth and FLOPs over arithmetic. Where a profile names neither, bandwidth and arithmetic are what the GPU reaches.
"""

import math
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ground.errors import InputError
from sim.machine.figures import Figure, Number, Profile, builtin_names, profile_text
from sim.machine.hardware import Hardware, Lookups

_BUILT_IN = "sim.machine.software"
DEFAULT_SOFTWARE = "fast"
MEASURED: dict[str, Literal["host", "gpu"]] = {"measured": "gpu", "measured-host": "host"}

_REGROUPED = "fitted to 0.08 to 0.89 ms of 8 to 64 tokens, `python -m sim bench --regroup` on one core of an AMD EPYC"


class PredictionCosts(Lookups, Profile):
    """One way of running predictors: what each operation costs, and where. All results are whole ns, rounded up."""

    name: str = Field(min_length=1)
    """What reports call it."""
    description: str = ""
    """The way of predicting in a few words."""
    regroup_us: Number = Figure(value=90, source=_REGROUPED, measured=True)
    """Microseconds that splitting the tokens of two batches takes (``sim.schedules.grouping``), whatever their size."""
    regroup_ns: Number = Figure(value=7.5, source=_REGROUPED, measured=True)
    """Nanoseconds that it takes more for each token and expert of all layers."""
    where: Literal["host", "gpu"]
    """Where tables lie and are searched; on the host they take no GPU memory."""

    @model_validator(mode="after")
    def _host_has_its_own(self) -> Self:
        for name in ("gbps", "gflops"):
            figure = getattr(self, name)
            if figure is None and self.where == "host":
                raise ValueError(f"{name}, which a host has of its own")
            if figure is not None and figure.value < 1e-6:
                raise ValueError(f"{name} above 0 (at least 1e-6)")
        return self

    @classmethod
    def load(cls, name_or_path: str | Path, hardware: Hardware | None = None) -> "PredictionCosts":
        """A built-in profile by name, one from a TOML file, or what was measured on ``hardware``.

        The latter are called ``measured`` and ``measured-host``. Raises InputError (one line: file, field, value, what
        is expected), OSError if a file cannot be read.
        """
        name = str(name_or_path)
        if name.lower() in MEASURED:
            return cls._measured(name.lower(), hardware)
        return cls.parse(software_text(name_or_path), name)

    @classmethod
    def _measured(cls, name: str, hardware: Hardware | None) -> "PredictionCosts":
        if hardware is None or hardware.lookups is None:
            whose = "no machine" if hardware is None else hardware.name
            raise InputError(
                f"software {name!r}: {whose} has no measured look-ups; expected a machine calibrated by realrun, "
                f"or --software {' or '.join(builtin_software())}"
            )
        where = MEASURED[name]
        costs: Lookups = getattr(hardware.lookups, where)
        return cls(name=name, description=f"as measured on {hardware.name}", where=where, **dict(costs))

    def search_ns(self, hardware: Hardware, entries: int, dims: int, queries: int = 1) -> int:
        """One search of ``queries`` at once among ``entries`` vectors of ``dims``; 0 without entries or queries.

        On the host the step first waits for the GPU and copies the queries back.
        """
        if not entries or not queries:
            return 0
        wait = self._fetch_ns(hardware, queries * dims)
        return _whole(wait + self._block(hardware, self.search_us, entries * dims, 2 * entries * dims * queries))

    def cluster_ns(self, hardware: Hardware, rows: int, dims: int, centres: int, iterations: int) -> int:
        """K-means (Lloyd) of ``rows`` embeddings: each iteration reads them and compares each with every centre."""
        if not rows or not centres:
            return 0
        flops = 2 * rows * dims * (centres + 1)
        once = self._block(hardware, self.iteration_us, rows * dims, flops)
        return _whole(self._fetch_ns(hardware, rows * dims) + iterations * once)

    def network_ns(self, hardware: Hardware, parameters: int, rows: int = 1) -> int:
        """A forward pass of ``rows`` through a net of so many weights; 0 for a net without any."""
        if not parameters or not rows:
            return 0
        return self._pass_ns(hardware, self.network_us, parameters, rows)

    def path_ns(self, hardware: Hardware, parameters: int, rows: int) -> int:
        """The same of a path predictor, a T5 that launches many times as much."""
        return self._pass_ns(hardware, self.path_us, parameters, rows) if parameters and rows else 0

    def _pass_ns(self, hardware: Hardware, fixed: Figure, parameters: int, rows: int) -> int:
        wait = hardware.software.route_wait_us.value * 1e3 if self.where == "host" else 0.0
        return _whole(wait + self._block(hardware, fixed, parameters, 2 * parameters * rows))

    def regroup_time_ns(self, tokens: int, experts: int) -> int:
        """Splitting so many tokens of two batches by their routes over so many experts of all layers, on the host."""
        return _whole(self.regroup_us.value * 1e3 + self.regroup_ns.value * tokens * experts)

    def load_ns(self, hardware: Hardware, size: int) -> int:
        """Copying a table of ``size`` bytes to where it is searched: over the idle link, or nothing on the host."""
        return hardware.copy_ns(size) if self.where == "gpu" and size else 0

    def table_bytes(self, numbers: int) -> int:
        """GPU memory that a table of so many numbers takes: none on the host."""
        return numbers * self.element_bytes if self.where == "gpu" else 0

    def _fetch_ns(self, hardware: Hardware, numbers: int) -> float:
        """The host's wait for the GPU and the copy of what it asks with; the link is taken to be as fast both ways."""
        if self.where == "gpu":
            return 0.0
        return hardware.software.route_wait_us.value * 1e3 + hardware.copy_ns(numbers * self.element_bytes)

    def _block(self, hardware: Hardware, fixed: Figure, numbers: int, flops: int) -> float:
        """Nanoseconds: fixed + max(bytes / bandwidth, FLOPs / arithmetic)."""
        bandwidth = hardware.memory_bytes_per_s if self.gbps is None else self.gbps.value * 1e9
        arithmetic = hardware.flops_per_s if self.gflops is None else self.gflops.value * 1e9
        return fixed.value * 1e3 + 1e9 * max(numbers * self.element_bytes / bandwidth, flops / arithmetic)


def builtin_software() -> tuple[str, ...]:
    """Names of the profiles that are built in."""
    return builtin_names(_BUILT_IN)


def software_text(name_or_path: str | Path) -> bytes:
    """The TOML of a built-in profile by name, or of a file. Raises InputError for an unknown name, OSError."""
    return profile_text(_BUILT_IN, "software", name_or_path)


def _whole(nanoseconds: float) -> int:
    return math.ceil(round(nanoseconds, 3))
