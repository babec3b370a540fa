"""All experiments by name, one file each: a module of this package that holds an ``EXPERIMENT`` is found by itself."""

from importlib import import_module
from pkgutil import iter_modules

from analysis.experiment import Experiment
from ground.errors import InputError

_modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
EXPERIMENTS: dict[str, Experiment] = {
    one.name: one for one in sorted((module.EXPERIMENT for module in _modules), key=lambda one: (one.place, one.name))
}


def experiment(name: str) -> Experiment:
    """The experiment called ``name``. Raises InputError that lists the names."""
    try:
        return EXPERIMENTS[name]
    except KeyError:
        raise InputError(f"experiment {name!r} is unknown; expected one of {', '.join(EXPERIMENTS)}") from None
