"""Can the published numbers come from one run whose speed the link limits?

At batch 1, the experts of a token that are not in GPU memory must cross the link. Let a token take M bytes of experts,
and the link move W bytes a second. A system that keeps nothing and never lets the link idle makes W / M tokens a second
(*streaming*). One that misses a share m of its look-ups cannot exceed W / (m M).
"""

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, number, percent, starred
from analysis.published import Point, domoe
from analysis.runs import scene_at
from sim.log import DECODE
from sim.machine.hardware import Hardware
from traces.models.known import resolve_model
from traces.models.spec import ModelSpec

FIGURES = ("Figure 4", "Figure 5")


def limits(point: Point, model: ModelSpec, machine: Hardware) -> Data:
    """What a published point says about the link, if only misses cross it.

    ``streaming``: tokens/s of copying every expert of every token, the link never idle. ``within_hits``: tokens/s if
    misses alone cross it. ``unexplained_ms``: of a token, not spent on misses. ``gbps_streaming``: what the link must
    move a second if nothing were resident.
    """
    bytes_a_token = sum(model.expert_bytes) * model.top_k
    link = machine.link_bytes_per_s
    found: Data = {
        "figure": point.figure,
        "model": point.model,
        "at": point.at,
        "published": point.tokens_per_s,
        "hit_ratio": point.hit_ratio,
        "worked_out": point.worked_out,
        "gib_per_token": bytes_a_token / 2**30,
        "streaming": link / bytes_a_token,
        "within_hits": None,
        "unexplained_ms": None,
        "gbps_streaming": None,
    }
    if point.tokens_per_s is not None:
        found["gbps_streaming"] = point.tokens_per_s * bytes_a_token / 1e9
    if point.tokens_per_s is not None and point.hit_ratio is not None and point.hit_ratio < 1:
        crossing = bytes_a_token * (1 - point.hit_ratio)
        found["within_hits"] = link / crossing
        found["unexplained_ms"] = 1e3 * (1 / point.tokens_per_s - crossing / link)
    return found


def measure(options: ExperimentOptions) -> Data:
    """Limits of all published points, and the bounds at this cache of each model that there are traces of."""
    machine = Hardware.load(options.hardware)
    paper = domoe()
    points = [
        limits(point, resolve_model(point.model), machine) for figure in FIGURES for point in paper.points(figure)
    ]
    bounds = []
    for model in options.models:
        for name, sources in model.workloads.items():
            here = scene_at(options.place(model, sources))
            decode = int((here.work.schedule.phase == DECODE).sum())
            bounds.append(
                {
                    "model": model.name,
                    "workload": name,
                    "compute_bound": decode * 1e9 / here.bound.decode_compute_ns,
                    "link_bound": decode * here.bound.bytes_per_s / max(1, here.bound.decode_link_bytes),
                }
            )
    return {
        "points": points,
        "bounds": bounds,
        "memory": [
            {
                "model": name,
                "experts_gib": resolve_model(name).all_expert_bytes / 2**30,
                "gpu_gib": machine.gpu_bytes / 2**30,
            }
            for name in dict.fromkeys(point.model for figure in FIGURES for point in paper.points(figure))
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
    notes = (
        f"Tokens/s and hit: published by DoMoE (* worked out from a factor that the paper gives). The link moves "
        f"{data['link_gbps']:.1f} GB/s ({data['link_source']}). Weights of 16 bits and batch 1 are assumed.",
        "Streaming: every expert of every token is copied over a link that never idles, and none is kept. There is no "
        "cache and no prediction. GB/s is what the link must move if nothing is resident.",
        "Within hits: the most tokens/s if a published hit is an expert in GPU memory, so that only misses cross the "
        "link. Unexplained: the time of a published token that these misses do not take. Below 1 x streaming, cache "
        "and prediction gained nothing.",
        *map(_slope, _pairs(data["points"])),
        *(
            f"All experts of {one['model']} take {one['experts_gib']:.1f} GiB of the {one['gpu_gib']:.1f} GiB that "
            f"{data['made']['hardware']} has. Nothing needs to be offloaded there, unless memory was capped; the paper "
            f"does not say so."
            for one in data["memory"]
            if one["experts_gib"] < one["gpu_gib"]
        ),
    )
    columns = ["model", "figure", "at", "tokens/s", "hit", "streaming", "GB/s", "within hits", "unexplained ms", "so"]
    title = "What the link allows of the published numbers"
    bounds = [[b["model"], b["workload"], number(b["compute_bound"]), number(b["link_bound"])] for b in data["bounds"]]
    return [
        Sheet(title, columns, rows, notes),
        Sheet(
            f"Simulated bounds, tokens/s: no policy is faster with a cache of {data['made']['cache']}",
            ["model", "workload", "compute", "link"],
            bounds,
        ),
    ]


def _pairs(points: list[Data]) -> list[tuple[Data, Data]]:
    """Of each model the points with the fewest and the most hits, where the paper gives both."""
    with_hits: dict[str, list[Data]] = {}
    for point in points:
        if point["hit_ratio"] is not None and point["published"] is not None:
            with_hits.setdefault(point["model"], []).append(point)
    ends = (sorted(found, key=lambda p: float(p["hit_ratio"])) for found in with_hits.values())
    return [(found[0], found[-1]) for found in ends if len(found) > 1]


def _slope(pair: tuple[Data, Data]) -> str:
    """What more hits should have saved, and what they did."""
    low, high = pair
    due = 1e3 * (high["hit_ratio"] - low["hit_ratio"]) / low["streaming"]
    saved = 1e3 * (1 / low["published"] - 1 / high["published"])
    return (
        f"{low['model']}: if hits rise from {percent(low['hit_ratio'])} to {percent(high['hit_ratio'])}, the link has "
        f"{due:.0f} ms a token less to do. The published time falls by {saved:.0f} ms."
    )


def _verdict(point: Data) -> str:
    published = point["published"]
    if published is None:
        return NOTHING
    if point["within_hits"] is not None and published > point["within_hits"]:
        return "impossible"
    return f"{published / point['streaming']:.2f} x streaming"


TITLE = "What the link allows of DoMoE's published numbers"
EXPERIMENT = Experiment(90, "domoe-limits", TITLE, __doc__, measure, sheets)
