"""What a policy is: a class with a name, typed parameters and one method.

To add one, copy a file of this folder; nothing else is touched. A policy of another package registers itself under the
entry-point group ``moe_replay.policies``, or is named as ``module:Class``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, PredictionCosts
from sim.plan import Plan
from sim.view import View
from sim.workload import Workload
from traces.models.spec import ModelSpec
from traces.trace import Trace


class Parameters(BaseModel):
    """Base of a policy's parameters: unknown names, wrong types and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Setting:
    """What a policy knows before the run begins.

    Attributes:
        model: the model whose experts are offloaded.
        budget: bytes of GPU memory for experts and the policy's own tables.
        profile: traces of the profile split, from which it may learn.
        seed: for whatever it draws at random.
        hardware: the machine that it runs on.
        software: what its predictions cost there.
    """

    model: ModelSpec
    budget: int
    profile: Sequence[Trace]
    seed: int = 0
    hardware: Hardware = field(default_factory=lambda: Hardware.load(DEFAULT_HARDWARE))
    software: PredictionCosts = field(default_factory=lambda: PredictionCosts.load(DEFAULT_SOFTWARE))

    def search_ns(self, entries: int, width: int, queries: int = 1) -> int:
        """What one search among so many entries of so many numbers takes."""
        return self.software.search_ns(self.hardware, entries, width, queries)


class Policy(ABC):
    """One way of predicting, prefetching and evicting experts.

    Class attributes: ``name`` (as typed), ``summary`` (one line), ``takes`` (the class of its parameters), ``needs``
    (optional trace arrays that it reads), ``learns`` (it needs a profile split), ``clairvoyant`` (it may see the
    future, and so is a reference, not a system), ``foresight`` (how many routed layers of a step it is told ahead of
    their time: it stands for a model that was trained otherwise, and its summary says so), ``variants`` (parameters,
    as typed, that a comparison of everything shows beside the defaults), ``table_sizes`` (parameters that make its
    tables take less GPU memory), ``hosts`` (its plans run experts on the host), ``keeps_plan`` (its plans take long to
    make, so they are kept on disk, see ``sim.run.kept_plans``), ``ignores`` (fields of its setting that its plans do
    not depend on; they are hidden from it).
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    takes: ClassVar[type[Parameters]] = Parameters
    needs: ClassVar[frozenset[str]] = frozenset()
    learns: ClassVar[bool] = False
    clairvoyant: ClassVar[bool] = False
    foresight: ClassVar[int] = 0
    variants: ClassVar[tuple[str, ...]] = ()
    table_sizes: ClassVar[tuple[str, ...]] = ()
    hosts: ClassVar[bool] = False
    keeps_plan: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, setting: Setting, parameters: Parameters) -> None:
        self.setting = setting
        self.parameters = parameters

    @classmethod
    def view(cls, trace: Trace, work: Workload) -> View:
        """What a policy of this kind may see of a run: the class says it, where everybody can read it."""
        return View(trace, work, cls.clairvoyant, cls.foresight)

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """Decide for every step of ``view``, from what each moment knows."""
