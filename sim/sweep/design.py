"""One design: a value for each field that a sweep sets. The other fields are as `sim replay` has them by default."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import to_jsonable_python

from ground.errors import InputError
from sim.machine.assembly import Assembly
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import MEASURED, PredictionCosts
from sim.policies import parameters_of, policy_class
from sim.policies.named import NamedPolicy
from sim.run.replay_options import ReplayOptions
from sim.sweep.fields import DEFAULT_POLICY, PARAMETER

_Profile = TypeVar("_Profile")
_Name = TypeVar("_Name")
Changes = tuple[tuple[str, float | str], ...]
"""Figures of a profile by dotted name, and what they are instead: a number, or ``x`` and a factor."""


@dataclass(frozen=True)
class Design:
    """The fields that are set, in the order of the sweep file; values as `sim.sweep.fields.fitted` gives them."""

    fields: Mapping[str, Any]

    @property
    def options(self) -> ReplayOptions:
        """The options of its replay. Raises InputError."""
        given = {name: value for name, value in self.fields.items() if "." not in name and name != "policy"}
        trace = given.pop("trace", None)
        if (trace is None) == (not given.get("mix")):
            raise InputError("a design takes a trace, or a mix of several; expected one of the two")
        traces = given["mix"] if trace is None else (trace,)
        return ReplayOptions(traces=tuple(traces), **given)

    @property
    def policy(self) -> NamedPolicy:
        """Its policy with the parameters that are set. Raises InputError."""
        named = NamedPolicy.of(self.fields.get("policy", DEFAULT_POLICY), "policy")
        values = {name.removeprefix(PARAMETER): v for name, v in self.fields.items() if name.startswith(PARAMETER)}
        if twice := values.keys() & named.values.keys():
            raise InputError(f"policy {named.label}: {min(twice)} is set by {PARAMETER}{min(twice)} too; expected one")
        values = named.values | values
        parameters_of(named.name, dict(values))
        return NamedPolicy(named.label, named.name, values)

    def changes(self, profile: str) -> Changes:
        """The figures of a profile (``hardware``, ``software``) that are set by themselves."""
        prefix = f"{profile}."
        return tuple((name.removeprefix(prefix), v) for name, v in self.fields.items() if name.startswith(prefix))

    @property
    def learns(self) -> bool:
        """Whether its policy reads profile splits. Raises InputError for no policy."""
        return policy_class(self.policy.name).learns


def hardware_of(machine: Assembly, changes: Changes) -> Hardware:
    """A machine, some figures of which are others. Raises InputError, and OSError if a file cannot be read."""
    return _hardware(machine, changes, machine_state(machine))


def software_of(name: str, changes: Changes, machine: Assembly, machine_changes: Changes) -> PredictionCosts:
    """The same of what predictions cost on a machine."""
    return _software(name, changes, machine, machine_changes, (file_state(name), machine_state(machine)))


def machine_state(machine: Assembly) -> tuple[tuple[int, ...], ...]:
    """What changes when one of its files does."""
    return tuple(map(file_state, machine.files))


def file_state(name: str | Path) -> tuple[int, ...]:
    """What changes when a file does; nothing for a name that is no file. What is kept of a file is kept under this."""
    path = Path(name)
    if not path.is_file():
        return ()
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


@lru_cache(maxsize=256)
def _hardware(machine: Assembly, changes: Changes, state: object) -> Hardware:
    plain, name = _profile(Assembly.load, machine, state), machine.hardware
    if not changes:
        return plain
    return Hardware.from_dict(_changed(plain.model_dump(by_alias=True, exclude_none=True), changes, name), name)


@lru_cache(maxsize=256)
def _software(
    name: str, changes: Changes, machine: Assembly, machine_changes: Changes, states: object
) -> PredictionCosts:
    if name.lower() in MEASURED:
        plain = PredictionCosts.load(name, hardware_of(machine, machine_changes))
    else:
        plain = _profile(PredictionCosts.load, name, states)
    if not changes:
        return plain
    return PredictionCosts.from_dict(_changed(plain.model_dump(exclude_none=True), changes, name), name)


@lru_cache(maxsize=64)
def _profile(load: Callable[[_Name], _Profile], name: _Name, state: object) -> _Profile:
    return load(name)


def _changed(profile: dict[str, Any], changes: Changes, name: str) -> dict[str, Any]:
    """The tables of a profile with other figures. ``x`` of a curve multiplies its times."""
    for figure, value in changes:
        *tables, last = figure.split(".")
        table = profile
        for part in tables:
            table = table.setdefault(part, {})
        if isinstance(value, float):
            if "points" in table.get(last, {}):
                raise InputError(f"{name}: {figure} is a curve of times; expected a factor for it, such as x1.5")
            table[last] = {"value": value, "source": "set by the sweep"}
            continue
        if last not in table:
            raise InputError(f"{name}: {figure} is not there to be multiplied; expected a number for it")
        factor = float(value.removeprefix("x"))
        own = dict(table[last])
        if "points" in own:
            own["points"] = [[size, max(1, round(ns * factor))] for size, ns in own["points"]]
        else:
            own["value"] = own["value"] * factor
        table[last] = own | {"source": f"{own['source']}; times {factor:g} by the sweep", "measured": False}
    changed = ", ".join(f"{figure} {value:g}" if isinstance(value, float) else f"{figure} {value}"
                        for figure, value in changes)  # fmt: skip
    return profile | {"name": f"{profile['name']} with {changed}"}


def plain(value: Any) -> Any:
    """A value of a field as JSON has it."""
    return to_jsonable_python(value)
