"""What a design can say: every option of ``sim replay``, the policy's parameters, and single figures of a profile.

The options are read off `ReplayOptions`, so that one which runs get later is an axis at once.
"""

import types
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ground.errors import InputError
from ground.field_errors import expectation
from sim.machine.figures import Curve, Figure
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts
from sim.run.replay_options import ReplayOptions

PROFILES: dict[str, type[BaseModel]] = {"hardware": Hardware, "software": PredictionCosts}
"""Options that name a profile, single figures of which can be varied: ``hardware.link.gbps``."""
PARAMETER = "set."
"""What a parameter of the policy begins with: ``set.scope``."""
DEFAULT_POLICY = "lru"


@cache
def options() -> dict[str, Any]:
    """The options of a replay and the kind of value that each takes; ``trace`` is one path, ``mix`` are several."""
    hints = get_type_hints(ReplayOptions)
    named = {field.name: hints[field.name] for field in fields(ReplayOptions) if field.name not in ("_", "traces")}
    return {"trace": str, **named}


@cache
def figures(profile: str) -> tuple[str, ...]:
    """Dotted names of the figures and curves that a profile can have: ``link.gbps``."""
    return tuple(_figures(PROFILES[profile], ""))


def _figures(table: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for own, field in table.model_fields.items():
        name = field.alias or own
        kinds = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for kind in kinds:
            if issubclass(kind, Figure | Curve):
                found.append(f"{prefix}{name}")
            elif get_origin(field.annotation) is not list:
                found += _figures(kind, f"{prefix}{name}.")
    return found


def _kinds(hint: Any) -> list[Any]:
    """The classes that a type hint is made of."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    return [hint]


def fitted(name: str, value: Any) -> Any:
    """``value`` as the field ``name`` takes it: numbers as text where that is a text, one path where several may be.

    Raises InputError for no field, and for a value of another kind.
    """
    if name == "policy":
        return _text(name, value)
    if name.startswith(PARAMETER) and len(name) > len(PARAMETER):
        return value
    profile, _, figure = name.partition(".")
    if figure and profile in PROFILES:
        return _figure_value(name, profile, figure, value)
    if name not in options():
        known = ", ".join([*options(), "policy"])
        raise InputError(
            f"{name}: no such field; expected one of {known}, a parameter of the policy (set.NAME) or a figure of a "
            f"profile (hardware.link.gbps)"
        )
    return _option(name, value)


def _option(name: str, value: Any) -> Any:
    hint = options()[name]
    several = any(get_origin(kind) is tuple for kind in _kinds(hint))
    if several and isinstance(value, str | Path):
        value = (value,)
    try:
        found = TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
    except ValidationError as wrong:
        fault = wrong.errors()[0]
        raise InputError(f"{name}: {value!r:.80}; expected {expectation(fault)}") from None
    return tuple(map(str, found)) if several and found is not None else found


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}: {value!r:.80}; expected a text")
    return value


def _figure_value(name: str, profile: str, figure: str, value: Any) -> float | str:
    """A number, or ``x`` and the factor by which the profile's own is multiplied."""
    if figure not in figures(profile):
        raise InputError(f"{name}: no such figure; expected one of {', '.join(figures(profile))}")
    text = str(value).strip()
    try:
        number = float(text.removeprefix("x"))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 1e9:
        raise InputError(f"{name}: {value!r:.80}; expected a number, or a factor such as x1.5")
    return text if text.startswith("x") else number
