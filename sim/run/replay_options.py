"""What a run is made of besides its policy, as the options of a command: those of a scene, and those of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.whole_number import WholeNumber
from sim.plan import Discipline
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report
from sim.run.cold import replay_cold
from sim.run.engines import Engine
from sim.run.observer import Observer
from sim.run.prepared import PreparedRun, prepare
from sim.run.scene import Scene, SceneOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayOptions(SceneOptions):
    """What a run is made of besides its policy: options that all replaying commands share."""

    mix: Annotated[
        tuple[Path, ...],
        Help("several traces of one model instead of one; their sequences take turns", show_default=False),
    ] = ()
    discipline: Annotated[
        Discipline | None, Help("in which order copies wait for the link; default: the policy's own")
    ] = None
    chunks: Annotated[
        WholeNumber | None, Help("into how many pieces a copy is cut; default: the policy's own, or as real runs do")
    ] = None
    engine: Annotated[Engine, Help("what executes the run; all give the same result, auto is fastest")] = "auto"
    cold: Annotated[bool, Help("begin each sequence with an empty cache, as published replays do")] = False

    def of(self, trace: Path | None, outputs: dict[str, Path | str | None]) -> "ReplayOptions":
        """These options for one trace, or for those of --mix.

        Raises InputError for both or neither, and for an output that is one of the files read.
        """
        if (trace is None) == (not self.mix):
            given = "neither is there" if trace is None else f"both are there, {trace} and {len(self.mix)} to mix"
            raise InputError(f"expected a trace or --mix with several; {given}")
        options = replace(self, traces=self.mix if trace is None else (trace,))
        keep_apart(options.files, outputs)
        return options

    def replay(
        self, here: Scene, policy: NamedPolicy, progress: Callable[[int], None] = lambda steps: None,
        observer: Observer | None = None,
    ) -> Report:  # fmt: skip
        """Run one policy; there is no ``observer`` of cold runs. Raises InputError."""
        if self.cold:
            return replay_cold(
                here, policy.name, policy.values, discipline=self.discipline, chunks=self.chunks, engine=self.engine,
                progress=progress,
            )  # fmt: skip
        return self.prepare(here, policy).simulate(engine=self.engine, observer=observer, progress=progress)

    def prepare(self, here: Scene, policy: NamedPolicy) -> PreparedRun:
        """Have one policy plan, for a run that is not cold. Raises InputError."""
        return prepare(here, policy.name, policy.values, discipline=self.discipline, chunks=self.chunks)
