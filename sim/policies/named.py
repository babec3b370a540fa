"""A policy as people name it: its name with the parameters that are not to be the default."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ground.errors import InputError
from sim.policies import Policy, parameters_of, policy_class


@dataclass(frozen=True)
class NamedPolicy:
    """The policy ``name`` with parameters ``values``; ``label`` is what messages and tables call it."""

    label: str
    name: str
    values: dict[str, object] = field(default_factory=dict)

    @staticmethod
    def of(label: str, option: str = "--policy", settings: Sequence[str] | None = None) -> "NamedPolicy":
        """From ``name,key=value,...`` or ``module:Class,...``, as typed after ``option``.

        Where ``settings`` are given, which are more ``key=value``, ``option`` is where those were typed. Raises
        InputError for what is no policy or parameter.
        """
        name, *own = label.split(",")
        policy_class(name)
        where = f"{option} {name}:" if settings is None else option
        values = _values_of([*own, *(settings or ())], where)
        parameters_of(name, dict(values))
        return NamedPolicy(label, name, values)

    @property
    def kind(self) -> type[Policy]:
        """Its class. Raises InputError for no policy."""
        return policy_class(self.name)


def _values_of(settings: Sequence[str], where: str) -> dict[str, object]:
    """``key=value`` pairs, ``where`` on the command line; a value is read as JSON where it is JSON, else as text."""
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"{where} {setting!r}: expected key=value")
        if key in values:
            raise InputError(f"{where} {setting!r}: {key} is given twice; expected one value")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
        except RecursionError:
            raise InputError(f"{where} {key}: nested too deep; expected a value of fewer brackets") from None
    return values
