"""The options that all experiments share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from cyclopts import Parameter

from analysis.paper import Paper
from analysis.workloads import ModelTraces, Source, by_model
from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.whole_number import WholeNumber
from sim.machine.hardware import DEFAULT_HARDWARE, Hardware, builtin_hardware
from sim.run.scene import DEFAULT_CACHE, CacheSize, SceneOptions, bundled_traces, code_version

IMPLIED = "implied"
"""A profile of this package's own (implied.toml): predictions as slow as DoMoE's figures imply."""


@Parameter(name="*")
@dataclass(frozen=True)
class ExperimentOptions:
    """What an experiment is run with: traces, machine, memory, cost of predictions, seed, processes."""

    traces: Annotated[
        Sequence[Path] | None,
        Help("traces, or folders of them, to run on and to learn from; default: bundled ones of the paper's models"),
    ] = None
    hardware: Annotated[str | None, Help("the machine: a built-in name or a profile, .toml; default: the paper's")] = (
        None
    )
    cache: CacheSize = DEFAULT_CACHE
    software: Annotated[
        tuple[str, ...],
        Help(
            "what predictions cost, several to compare: paper, fast, implied or a profile, .toml; default: these",
            show_default=False,
        ),
    ] = ("paper", "fast", IMPLIED)
    seed: Annotated[WholeNumber, Help("of the bootstrap, and for policies that draw at random")] = 0
    entries: Annotated[
        tuple[WholeNumber, ...], Help("table sizes of domoe-table-size; default: 100 to 3000", show_default=False)
    ] = ()
    workers: Annotated[
        WholeNumber | None, Help("processes; the result is the same for any number; default: one a core")
    ] = None

    def __post_init__(self) -> None:
        """Refuse a number of processes below 1, and lists that are given and empty. Raises InputError."""
        if self.workers is not None and self.workers < 1:
            raise InputError(f"--workers {self.workers}; expected at least 1")
        for name in ("traces", "software"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise InputError(f"--{name}: expected at least one")
        object.__setattr__(self, "software", tuple(dict.fromkeys(self.software)))  # one named twice is run once

    def keep_apart(self, outputs: dict[str, Path | str | None], more: Sequence[Any] = (), **folders: Any) -> None:
        """Refuse outputs that are one of the files read here, or of ``more``. Raises InputError."""
        keep_apart([*(self.traces or bundled_traces()), self.machine, *self.software, *more], outputs, **folders)

    def of(self, paper: Paper) -> Self:
        """The same, with the paper's traces and machine where none are named."""
        return replace(self, traces=self.traces or paper.traces, hardware=self.hardware or paper.hardware)

    @property
    def machine(self) -> str:
        """The machine's name or file."""
        return self.hardware or DEFAULT_HARDWARE

    @cached_property
    def _loop(self) -> str | None:
        """The papers' systems launch kernels one by one: so do cards that were not measured, which have no loop."""
        own = self.machine not in builtin_hardware() or Hardware.load(self.machine).eager is not None
        return None if own else "eager"

    @cached_property
    def models(self) -> list[ModelTraces]:
        """The models and their workloads. Raises InputError."""
        return by_model(self.traces)

    @property
    def processes(self) -> int:
        """How many processes share the work."""
        return self.workers or os.cpu_count() or 1

    def place(
        self, model: ModelTraces, sources: Sequence[Source], software: str = "fast", *, cache: str | None = None
    ) -> SceneOptions:
        """Where a workload of a model is replayed; ``cache`` is another size than that of the options."""
        if software == IMPLIED:
            software = str(resources.files("analysis") / f"{IMPLIED}.toml")
        traces = tuple(source.path for source in sources)
        return SceneOptions(
            traces, hardware=self.machine, loop=self._loop, software=software, cache=cache or self.cache,
            profile=model.profile, seed=self.seed,
        )  # fmt: skip

    def made(self, models: Sequence[ModelTraces] | None = None) -> dict[str, Any]:
        """Where data comes from: code, machine, and the traces of ``models`` (default: all) by name and hash."""
        return {
            "code": code_version(),
            "clock": "simulated",
            "hardware": Path(self.machine).stem,
            "cache": self.cache,
            "seed": self.seed,
            "traces": [source.to_json() for model in models or self.models for source in model.sources],
        }
