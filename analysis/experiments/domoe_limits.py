"""Can the published numbers come from one run whose speed the link limits?

At batch 1, the experts of a token that are not in GPU memory must cross the link. Let a token take M bytes of experts,
and the link move W bytes a second. A system that keeps nothing and never lets the link idle makes W / M tokens a second
(*streaming*). One that misses a share m of its look-ups cannot exceed W / (m M).
"""

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, notes, number, percent, starred
from analysis.published import Point, domoe
from analysis.runs import scene_at
from sim.machine.hardware import Hardware
from traces.models.known import resolve_model
from traces.models.spec import ModelSpec
from traces.schema import DECODE

FIGURES = ("Figure 4", "Figure 5")


def limits(point: Point, model: ModelSpec, machine: Hardware) -> Data:
    """What a published point says about the link, if only misses cross it.

    ``streaming``: tokens/s of copying every expert of every token, the link never idle. ``within_hits``: tokens/s if
    misses alone cross it. ``unexplained_ms``: of a token, not spent on misses. ``gbps_streaming``: what the link must
    move a second if nothing were resident.
    """
    bytes_a_token = sum(model.expert_bytes) * model.top_k
    link = machine.link_bytes_per_s
    published, hits = point.tokens_per_s, point.hit_ratio
    crossing = None if published is None or hits is None or hits == 1 else bytes_a_token * (1 - hits)
    return {
        "figure": point.figure,
        "model": point.model,
        "at": point.at,
        "published": published,
        "hit_ratio": hits,
        "worked_out": point.worked_out,
        "gib_per_token": bytes_a_token / 2**30,
        "streaming": link / bytes_a_token,
        "within_hits": crossing and link / crossing,
        "unexplained_ms": crossing and published and 1e3 * (1 / published - crossing / link),
        "gbps_streaming": published and published * bytes_a_token / 1e9,
    }


def measure(options: ExperimentOptions) -> Data:
    """Limits of all published points, and the bounds at this cache of each model that there are traces of."""
    machine = Hardware.load(options.machine)
    gpu_gib = machine.gpu_bytes / 2**30
    published = [point for figure in FIGURES for point in domoe().points(figure)]
    bounds = []
    for model in options.models:
        for name, sources in model.workloads.items():
            here = scene_at(options.place(model, sources))
            decode = int((here.work.schedule.phase == DECODE).sum())
            compute = decode * 1e9 / here.bound.decode_compute_ns
            link = decode * here.bound.bytes_per_s / max(1, here.bound.decode_link_bytes)
            bounds.append({"model": model.name, "workload": name, "compute_bound": compute, "link_bound": link})
    return {
        "points": [limits(point, resolve_model(point.model), machine) for point in published],
        "bounds": bounds,
        "memory": [
            {"model": name, "experts_gib": resolve_model(name).all_expert_bytes / 2**30, "gpu_gib": gpu_gib}
            for name in dict.fromkeys(point.model for point in published)
        ],
        "link_gbps": machine.link_bytes_per_s / 1e9,
        "link_source": machine.link_source,
        "made": options.made(),
    }


def sheets(data: Data) -> list[Sheet]:
    """Published points against what the link gives, then the bounds of the traces at hand."""
    rows = [
        [p["model"], p["figure"], p["at"], starred(p["published"], p["worked_out"]), percent(p["hit_ratio"]),
         number(p["streaming"]), number(p["gbps_streaming"], 1), number(p["within_hits"]),
         number(p["unexplained_ms"], 0), _verdict(p)]
        for p in data["points"]
    ]  # fmt: skip
    below = notes("limits", **data)
    for low, high in _pairs(data["points"]):
        due = 1e3 * (high["hit_ratio"] - low["hit_ratio"]) / low["streaming"]
        saved = 1e3 * (1 / low["published"] - 1 / high["published"])
        hits = {"low": percent(low["hit_ratio"]), "high": percent(high["hit_ratio"])}
        below += notes("limits-slope", model=low["model"], due=due, saved=saved, **hits)
    for memory in data["memory"]:
        if memory["experts_gib"] < memory["gpu_gib"]:
            below += notes("limits-memory", hardware=data["made"]["hardware"], **memory)
    columns = ["model", "figure", "at", "tokens/s", "hit", "streaming", "GB/s", "within hits", "unexplained ms", "so"]
    title = "What the link allows of the published numbers"
    bounds = [[b["model"], b["workload"], number(b["compute_bound"]), number(b["link_bound"])] for b in data["bounds"]]
    most = f"Simulated bounds, tokens/s: no policy is faster with a cache of {data['made']['cache']}"
    return [
        Sheet(title, columns, rows, below),
        Sheet(most, ["model", "workload", "compute", "link"], bounds),
    ]


def _pairs(points: list[Data]) -> list[tuple[Data, Data]]:
    """Of each model the points with the fewest and the most hits, where the paper gives both."""
    with_hits: dict[str, list[Data]] = {}
    for point in points:
        if point["hit_ratio"] is not None and point["published"] is not None:
            with_hits.setdefault(point["model"], []).append(point)
    ends = (sorted(found, key=lambda p: float(p["hit_ratio"])) for found in with_hits.values())
    return [(found[0], found[-1]) for found in ends if len(found) > 1]


def _verdict(point: Data) -> str:
    published = point["published"]
    if published is None:
        return NOTHING
    if point["within_hits"] is not None and published > point["within_hits"]:
        return "impossible"
    return f"{published / point['streaming']:.2f} x streaming"


TITLE = "What the link allows of DoMoE's published numbers"
EXPERIMENT = Experiment(90, "domoe-limits", TITLE, __doc__, measure, sheets)
