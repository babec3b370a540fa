"""What an experiment is: a measurement that gives plain data, and how that data is shown.

Data and presentation are apart, so that a table or a figure can be made again from a file that was kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure
from analysis.pages.sheets import Sheet
from analysis.paper import DOMOE, Paper
from ground.errors import InputError

Data = dict[str, Any]
"""What an experiment measured, as JSON has it."""


@dataclass(frozen=True)
class ReportInputs:
    """What a report is made from: the options of all its parts, and traces that only some parts run on."""

    options: ExperimentOptions
    other_seed: Sequence[Path] | None = None
    large: Sequence[Path] | None = None
    routes: Sequence[Path] | None = None
    trainings: Sequence[Path] | None = None


@dataclass(frozen=True)
class Part:
    """One run of an experiment on its page in a report, with data of its own."""

    suffix: str = ""
    """What the name of its data has behind the experiment's."""
    heading: str = ""
    """Where there are several: what tells this one from the others; by default its cache size."""
    about: str = ""
    """What is different about it, in a sentence or two."""
    cache: str | None = None
    """Another cache size than that of the report's options."""
    traces: str | None = None
    """The field of ReportInputs that names the traces to run on; without them the part keeps the data it has."""
    else_all: bool = False
    """Without those traces it runs on all others."""

    @property
    def needs(self) -> str | None:
        """The option of the command line without which it is not measured again."""
        return None if self.traces is None or self.else_all else f"--{self.traces.replace('_', '-')}"

    def options(self, inputs: ReportInputs) -> ExperimentOptions | None:
        """What it is run with; None if its traces were not given. Raises InputError for a list of none."""
        options = inputs.options if self.cache is None else replace(inputs.options, cache=self.cache)
        given = getattr(inputs, self.traces) if self.traces else None
        if self.traces and given is not None and not given:
            raise InputError(f"--{self.traces.replace('_', '-')}: expected at least one")
        if given:
            return replace(options, traces=given)
        return None if self.needs else options


HALF = Part(
    "-half", cache="50%", about="Room for half of all experts, which an L40 has for Mixtral-8x7B and Phi-3.5-MoE."
)
"""A part at twice the usual cache."""


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the field."""

    place: int
    """Where it stands among all experiments: by rising number, in steps of ten so that another fits between."""
    name: str
    title: str
    about: str
    """What it asks and how, in plain words: the text of its module."""
    measure: Callable[[ExperimentOptions], Data]
    sheets: Callable[[Data], list[Sheet]]
    draw: Callable[[Data, Figure], None] | None = None
    """Draws the data on an empty figure, and says how large that is; a legend of all labels is put below."""
    parts: Sequence[Part] = (Part(),)
    """Its runs in a report."""
    paper: Paper = DOMOE
    """In whose report it stands."""

    def measured(self, options: ExperimentOptions) -> Data:
        """What it measures with these options, by default on its paper's traces and machine. Raises InputError."""
        return self.measure(options.of(self.paper))

    @property
    def parts_by_key(self) -> dict[str, Part]:
        """Its runs in a report by the name of the data of each."""
        return {f"{self.name}{part.suffix}": part for part in self.parts}
