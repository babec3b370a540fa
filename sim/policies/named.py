"""A policy as people name it: its name with the parameters that are not to be the default."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ground.errors import InputError
from ground.pairs import pairs
from sim.policies import Policy, parameters_of, policy_class, policy_classes


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
        given = pairs([*own, *(settings or ())], where)
        values = {key: _value(text, f"{where} {key}") for key, text in given.items()}
        parameters_of(name, dict(values))
        return NamedPolicy(label, name, values)

    @property
    def kind(self) -> type[Policy]:
        """Its class. Raises InputError for no policy."""
        return policy_class(self.name)


def every_policy() -> list[str]:
    """The name of every policy, and the variants of it that are worth a row of their own."""
    kinds = policy_classes().items()
    return [entry for name, kind in kinds for entry in (name, *(f"{name},{variant}" for variant in kind.variants))]


def _value(text: str, where: str) -> object:
    """A parameter's value, typed at ``where``: read as JSON where it is JSON, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise InputError(f"{where}: nested too deep; expected a value of fewer brackets") from None
