"""All experiments by name."""

from analysis.domoe import neighbours, similarity
from analysis.experiment import Experiment
from traces.errors import InputError

EXPERIMENTS: dict[str, Experiment] = {module.EXPERIMENT.name: module.EXPERIMENT for module in (neighbours, similarity)}


def experiment(name: str) -> Experiment:
    """The experiment called ``name``. Raises InputError that lists the names."""
    try:
        return EXPERIMENTS[name]
    except KeyError:
        raise InputError(f"experiment {name!r} is unknown; expected one of {', '.join(EXPERIMENTS)}") from None
