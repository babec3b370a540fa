"""How much GPU memory does ExpertFlow take, and how much does the whole model?

Counted from the released models' sizes in 16 bits: what is no expert and so always on the GPU, a cache of so many slots
a layer (in an encoder-decoder model of both stacks), the path predictor, and the keys and values of a batch of 16. The
paper's form has two pairs of batches in flight and keeps the keys and values of all four.

*Fits* is how many slots a layer the published number leaves room for.
"""

from analysis.experiment import Data, Experiment
from analysis.expertflow import PIPELINE, made
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, notes, number
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.runs import scene_at
from analysis.services import SLOTS, Service, services
from sim.schedules.kv_cache import cache_bytes
from sim.schedules.pipeline import PATH_WEIGHTS
from traces.models.known import resolve_model

BATCH = 16
ALL, CACHED = "all in GPU", "ExpertFlow"
"""What the paper's figure compares."""


def measure(options: ExperimentOptions) -> Data:
    """Bytes of every model, of the first of its data sets."""
    firsts = {one.model.name: one for one in reversed(services(options))}
    return {"models": [_of(one, options) for one in reversed(firsts.values())], "made": made(options)}


def _of(service: Service, options: ExperimentOptions) -> Data:
    place = service.place(options, 1, min(BATCH, *service.batches[-1:]))
    here = scene_at(place)
    whole = resolve_model({**here.trace.meta["model"], "part": None}, None)
    paired = scene_at(service.place(options, 64, place.batch, regroup="none", pipeline=PIPELINE))
    return {
        "model": service.model.name,
        "data": service.data,
        "batch": place.batch,
        "resident_bytes": whole.resident_bytes,
        "expert_bytes": whole.all_expert_bytes,
        "slot_bytes": sum(whole.expert_bytes),
        "predictor_bytes": 2 * PATH_WEIGHTS,
        "kv_bytes": cache_bytes(here.trace, here.work.schedule, here.model),
        "kv_bytes_in_flight": cache_bytes(paired.trace, paired.work.schedule, paired.model),
    }


def _published(model: str, at: str) -> float | None:
    return next((p.gb for p in expertflow().points("memory", model) if p.at == at), None)


def sheets(data: Data) -> list[Sheet]:
    """Published beside counted, and what the counted ones are made of."""
    rows, parts = [], []
    for one in data["models"]:
        model, fixed = one["model"], one["resident_bytes"] + one["predictor_bytes"] + one["kv_bytes_in_flight"]
        whole = one["resident_bytes"] + one["expert_bytes"] + one["kv_bytes"]
        said = _published(model, CACHED)
        fits = None if said is None else (said * 1e9 - fixed) / one["slot_bytes"]
        cached = [fixed + min(slots * one["slot_bytes"], one["expert_bytes"]) for slots in SLOTS]
        rows.append(
            [model, number(_published(model, ALL)), _gb(whole), number(said), *map(_gb, cached), number(fits, 1)]
        )
        names = ("resident_bytes", "expert_bytes", "slot_bytes", "predictor_bytes", "kv_bytes", "kv_bytes_in_flight")
        parts.append([model, *(_gb(one[name], 3) for name in names)])
    columns = ["model", f"{ALL}, published", "here", f"{CACHED}, published", *(f"{n} slots" for n in SLOTS), "fits"]
    made_of = [
        "model",
        "no experts",
        "all experts",
        "a slot a layer",
        "predictor",
        "keys, values",
        "of four batches",
    ]
    return [
        Sheet("GPU memory in GB", columns, rows, notes("expertflow-memory")),
        Sheet("What it is made of, in GB", made_of, parts),
    ]


def _gb(size: float, digits: int = 2) -> str:
    return number(size / 1e9, digits)


TITLE = "GPU memory beside all experts on the GPU"
EXPERIMENT = Experiment(210, "expertflow-memory", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
