"""Offloading policies, found by name: a file each, but for those that differ in their eviction rule alone (recency.py).

Names come from three places: the modules of this package, the entry-point group ``moe_replay.policies`` of installed
packages, and ``module:Class`` for one that is only importable.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isclass
from pkgutil import iter_modules
from typing import cast

from pydantic import ValidationError

from ground.errors import InputError
from ground.field_errors import expectation
from ground.foreign_code import errors_name
from sim.policies.base import Parameters, Policy, Setting, fault_of

__all__ = ["Parameters", "Policy", "Setting", "make_policy", "parameters_of", "policy_class", "policy_classes"]

GROUP = "moe_replay.policies"


@cache
def policy_classes() -> dict[str, type[Policy]]:
    """All policies by name: those of this package, then those that installed packages register.

    An entry point that does not name a Policy, or takes a name that is taken, is left out with a warning.
    """
    found: dict[str, type[Policy]] = {}
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isclass(value) and value.__module__ == module.name and fault_of(value) is None:
                kind = cast(type[Policy], value)
                found[kind.name] = kind
    for point in entry_points(group=GROUP):
        try:
            value = _imported(point.value, f"entry point {point.name!r}")
            if found.setdefault(value.name, value) is not value:
                taken = found[value.name]
                raise InputError(
                    f"entry point {point.name!r} ({point.value}): the policy name {value.name!r} is taken by "
                    f"{taken.__module__}:{taken.__qualname__}"
                )
        except InputError as broken:
            print(f"warning: left out: {broken}", file=sys.stderr)
    return dict(sorted(found.items()))


def policy_class(name: str) -> type[Policy]:
    """The policy called ``name``, or ``module:Class``. Raises InputError that lists the names."""
    if ":" in name:
        return _imported(name, f"policy {name!r}")
    try:
        return policy_classes()[name]
    except KeyError:
        raise InputError(
            f"policy {name!r} is unknown; expected one of {', '.join(policy_classes())}, or module:Class"
        ) from None


def make_policy(name: str, setting: Setting, values: dict[str, object] | None = None) -> Policy:
    """Build the policy ``name`` with parameters ``values``. Raises InputError naming a wrong parameter."""
    kind, parameters = policy_class(name), parameters_of(name, values)
    with errors_name(f"policy {kind.name}"):
        made = kind(setting, parameters)
    if not (hasattr(made, "setting") and hasattr(made, "parameters")):
        raise InputError(f"policy {kind.name}: __init__ sets no setting and parameters; expected it to call Policy's")
    return made


def parameters_of(name: str, values: dict[str, object] | None = None) -> Parameters:
    """The parameters of policy ``name``: ``values``, the others by default. Raises InputError naming a wrong one."""
    kind = policy_class(name)
    try:
        with errors_name(f"policy {kind.name}: parameters", ours=(ValidationError,)):
            return kind.takes.model_validate(values or {})
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = ", ".join(kind.takes.model_fields) or "none"
        raise InputError(
            f"policy {kind.name}: parameter {where} = {first['input']!r}; expected {expectation(first)} "
            f"(parameters: {known})"
        ) from None


def _imported(path: str, what: str) -> type[Policy]:
    module, _, name = path.partition(":")
    with errors_name(f"{what}: cannot import {path!r}"):
        value = getattr(import_module(module), name)
    with errors_name(what):
        fault = fault_of(value)
    if fault:
        raise InputError(f"{what if path in what else f'{what}: {path!r}'}: {fault}")
    return cast(type[Policy], value)
