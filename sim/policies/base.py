"""What a policy is: a class with a name, typed parameters and one method.

To add one, copy a file of this folder; nothing else is touched. A policy of another package registers itself under the
entry-point group ``moe_replay.policies``, or is named as ``module:Class``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from inspect import isabstract, isclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, PredictionCosts
from sim.plan import Plan
from sim.view import View
from sim.workload import Workload
from traces.models.spec import ModelSpec
from traces.schema import OPTIONAL
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

    Class attributes: ``name`` (as typed), ``summary`` (one line), ``takes`` (the class of its parameters),
    ``needs`` (optional trace arrays that it reads), ``learns`` (it reads a profile split), ``self_taught`` (it runs
    without one too), ``clairvoyant`` (it may see the future, and so is a reference, not a system), ``foresight``
    (how many routed layers of a step it is told ahead of their time: it stands for a model that was trained
    otherwise, and its summary says so), ``variants`` (parameters, as typed, that a comparison of everything shows
    beside the defaults), ``table_sizes`` (parameters that make its tables take less GPU memory), ``hosts`` (its
    plans run experts on the host), ``keeps_plan`` (its plans take long to make, so they are kept on disk, see
    ``sim.run.kept_plans``), ``ignores`` (fields of its setting that its plans do not depend on; they are hidden
    from it).
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    takes: ClassVar[type[Parameters]] = Parameters
    needs: ClassVar[frozenset[str]] = frozenset()
    learns: ClassVar[bool] = False
    self_taught: ClassVar[bool] = False
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


def fault_of(value: Any) -> str | None:
    """What keeps ``value`` from being a policy class, in a line; None where nothing does.

    The classes of other packages are held to what `Policy` says of its class attributes.
    """
    if not (isclass(value) and issubclass(value, Policy)):
        return "is not a sim.policies.Policy"
    if isabstract(value):
        return f"has no method {', '.join(sorted(value.__abstractmethods__))}; expected that of a policy"
    if not (isclass(value.takes) and issubclass(value.takes, BaseModel)):
        return f"takes is {value.takes!r:.80}; expected a class of parameters (sim.policies.Parameters)"
    for attribute, (fits, expected) in _ATTRIBUTES.items():
        if not fits(given := getattr(value, attribute, None)):
            return f"{attribute} is {given!r:.80}; expected {expected}"
    if unknown := sorted(set(value.needs) - set(OPTIONAL)):
        return f"needs names {unknown[0]!r:.80}; expected optional arrays of a trace: {', '.join(OPTIONAL)}"
    return None


def _all_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(text, str) for text in values)


_TEXT = (lambda value: isinstance(value, str), "a text")
_SWITCH = (lambda value: isinstance(value, bool), "True or False")
_SET = (lambda value: isinstance(value, set | frozenset) and _all_texts(value), "a set of texts")
_TUPLE = (lambda value: isinstance(value, tuple | list) and _all_texts(value), "a tuple of texts")
_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: isinstance(value, str) and value.strip() != "", "a text that is not empty"),
    "summary": _TEXT, "needs": _SET, "learns": _SWITCH, "self_taught": _SWITCH, "clairvoyant": _SWITCH,
    "foresight": (lambda value: type(value) is int and value >= 0, "a whole number from 0"),
    "variants": _TUPLE, "table_sizes": _TUPLE, "hosts": _SWITCH, "keeps_plan": _SWITCH, "ignores": _SET,
}  # fmt: skip
"""Of each class attribute: whether a value fits, and how a person is told what does."""
