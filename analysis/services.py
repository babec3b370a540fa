"""ExpertFlow's workloads: data sets whose sequences decode together, with so many slots a layer.

The paper's words are CS for slots a layer and BS for sequences that decode together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from analysis.jackknife import Place
from analysis.options import ExperimentOptions
from analysis.runs import Design
from analysis.workloads import MIXED, ModelTraces, Source, loaded
from sim.policies.named import NamedPolicy
from traces.predictor.accuracy import same_domain
from traces.trace import Trace

SLOTS = (4, 8, 16)
BATCHES = (4, 8, 16, 32)
DATA_SETS = 2
"""Of each model at most so many, the predictor's own first."""
PAPERS_DATA = {"translation": "WMT16", "summaries": "XSum", "instructions": "Alpaca", "math": "AIME2024"}
"""The paper's data sets, of which the domains of the traces are."""


@dataclass(frozen=True)
class Service:
    """One data set of one model, or some in turn where no trace of it carries predictions.

    ``sequences`` are those that are replayed, ``in_domain`` whether the predictor learnt from the same data set: None
    where there are no predictions.
    """

    model: ModelTraces
    data: str
    sources: tuple[Source, ...]
    layers: int
    experts: int
    sequences: int
    in_domain: bool | None

    @property
    def slots(self) -> tuple[int, ...]:
        """SLOTS that do not hold whole layers."""
        return tuple(slots for slots in SLOTS if slots < self.experts)

    @property
    def batches(self) -> tuple[int, ...]:
        """BATCHES of which two are full at first."""
        return tuple(batch for batch in BATCHES if 2 * batch <= self.sequences)

    @property
    def single_batches(self) -> tuple[int, ...]:
        """BATCHES of which one is full at first, but no second."""
        return tuple(batch for batch in BATCHES if batch <= self.sequences < 2 * batch)

    def to_json(self) -> dict[str, Any]:
        """Of which model and data set it is, and whether its predictions are of another."""
        return {"model": self.model.name, "data": self.data, "sequences": self.sequences, "in_domain": self.in_domain}

    def place(self, options: ExperimentOptions, slots: int, batch: int, **more: Any) -> Place:
        """Where it is served; ``more`` are other fields of the scene."""
        here = options.place(self.model, self.sources, cache=f"{slots}/layer")
        return Place.of(here, batch=batch, **more)


def services(options: ExperimentOptions, *, embedded: bool = False) -> list[Service]:
    """DATA_SETS data sets of each model, those with predictions first; with ``embedded`` of traces with embeddings.

    Raises InputError.
    """
    found = []
    for model in options.models:
        sources = [one for one in model.sources if not embedded or _trace(one).embeddings is not None]
        if not sources:
            continue
        predicted = [source for source in sources if _trace(source).predicted_experts is not None]
        told = [_service(model, ", ".join(source.domains), (source,)) for source in predicted]
        found += sorted(told, key=_place)[:DATA_SETS]
        if not predicted:
            found.append(_service(model, MIXED, _enough(sources)))
    return sorted(found, key=_place)


def own_services(options: ExperimentOptions) -> list[Service]:
    """Those of `services` that are the predictor's own data set, or have no predictions. Raises InputError."""
    return [one for one in services(options) if one.in_domain is not False]


def _enough(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The first traces that hold two batches of the largest size together, or all."""
    held = np.cumsum([int((_trace(source).split == "eval").sum()) for source in sources])
    return tuple(sources[: int(np.searchsorted(held, 2 * max(BATCHES))) + 1])


def _place(service: Service) -> tuple[object, ...]:
    """Predicted ones first, a family by its number of experts, the predictor's own data set first."""
    model = service.model.name
    family = model.rstrip("0123456789")
    return service.in_domain is None, family, service.experts, model, not service.in_domain, service.data


def _trace(source: Source) -> Trace:
    return loaded(source.path)


def _service(model: ModelTraces, data: str, sources: tuple[Source, ...]) -> Service:
    first = _trace(sources[0])
    sequences = sum(int((_trace(source).split == "eval").sum()) for source in sources)
    told = first.predicted_experts is not None
    return Service(
        model, data, sources, first.n_layers, first.n_experts, sequences, same_domain(first) if told else None
    )


@dataclass(frozen=True)
class Way:
    """A policy and what of the scene is its own: its memory, its order of steps, its link, its batch.

    ``times`` is by how much its batch is larger than that of the place.
    """

    policy: NamedPolicy
    scene: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1

    @staticmethod
    def of(policy: str, **scene: Any) -> "Way":
        """From ``name,key=value,...``."""
        return Way(NamedPolicy.of(policy), scene)


def designs(place: Place, ways: Mapping[str, Way]) -> dict[str, Design]:
    """The ways at one place, by name."""
    return {
        name: Design(replace(place, batch=place.batch * way.times, **way.scene), way.policy)
        for name, way in ways.items()
    }
