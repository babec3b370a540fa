"""What an experiment is: a measurement that gives plain data, and how that data is shown.

Data and presentation are apart, so that a table or a figure can be made again from a file that was kept.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.pages.sheets import Sheet
from analysis.runs import Place
from analysis.workloads import Source, Suite, suites
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.run.scene import DEFAULT_CACHE, code_version

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMPLIED = "implied"
"""A software profile of this package's own: as slow as DoMoE's figures imply (implied.toml)."""

Data = dict[str, Any]
"""What an experiment measured, as JSON has it."""


@dataclass(frozen=True)
class Setup:
    """What all experiments are run with; see ``python -m analysis table --help``."""

    traces: Sequence[str | Path] | None = None
    hardware: str = DEFAULT_HARDWARE
    cache: str = DEFAULT_CACHE
    software: tuple[str, ...] = ("paper", "fast", IMPLIED)
    seed: int = 0
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    entries: tuple[int, ...] = ()
    """Table sizes, for experiments that vary them."""

    @cached_property
    def suites(self) -> list[Suite]:
        """The models and their workloads. Raises InputError."""
        return suites(self.traces)

    def place(
        self, suite: Suite, sources: Sequence[Source], software: str = "fast", *, cache: str | None = None
    ) -> Place:
        """Where a workload of a suite is replayed; ``cache`` is another size than the setup's."""
        if software == IMPLIED:
            software = str(resources.files("analysis") / f"{IMPLIED}.toml")
        traces = tuple(source.path for source in sources)
        return Place(traces, suite.profile, self.hardware, software, cache or self.cache, seed=self.seed)

    def made(self, sources: Sequence[Source]) -> Data:
        """Where data comes from: code, machine, traces by name and hash."""
        return {
            "code": code_version(),
            "clock": "simulated",
            "hardware": Path(self.hardware).stem,
            "cache": self.cache,
            "seed": self.seed,
            "traces": [source.to_json() for source in sources],
        }


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    name: str
    title: str
    measure: Callable[[Setup], Data]
    sheets: Callable[[Data], list[Sheet]]
    draw: "Callable[[Data, Figure], None] | None" = None
    """Draws the data on an empty figure, and says how large that is."""
