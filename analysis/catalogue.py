"""All experiments by name."""

from analysis import anomalies, predictors, real_routes
from analysis.domoe import ablation, adaptive, cache_size, limits, matching, neighbours, overall, similarity, table_size
from analysis.experiment import Experiment
from traces.errors import InputError

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        overall,
        cache_size,
        ablation,
        adaptive,
        table_size,
        neighbours,
        similarity,
        matching,
        limits,
        predictors,
        anomalies,
        real_routes,
    )
}


def experiment(name: str) -> Experiment:
    """The experiment called ``name``. Raises InputError that lists the names."""
    try:
        return EXPERIMENTS[name]
    except KeyError:
        raise InputError(f"experiment {name!r} is unknown; expected one of {', '.join(EXPERIMENTS)}") from None
