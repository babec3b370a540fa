"""All experiments by name."""

from analysis.experiment import Experiment
from analysis.experiments import anomalies, predictors, real_routes
from analysis.experiments import domoe_ablation as ablation
from analysis.experiments import domoe_adaptive as adaptive
from analysis.experiments import domoe_cache_size as cache_size
from analysis.experiments import domoe_limits as limits
from analysis.experiments import domoe_matching as matching
from analysis.experiments import domoe_neighbours as neighbours
from analysis.experiments import domoe_overall as overall
from analysis.experiments import domoe_similarity as similarity
from analysis.experiments import domoe_table_size as table_size
from ground.errors import InputError

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
