"""How much of the gap between LRU and Belady's MIN does eviction that knows the path close?

All fetch on demand, one sequence after another, each at the same bytes, from a cold cache. *Gap* is hits less those of
LRU, over those of MIN less LRU's: 0 is LRU, 1 is MIN, which knows the future. Rivals are causal caches; *nothing* is
pathwise without a profile, *other* with that of another task. Published routes are split by sequence; of gpt-oss-20b
some are drawn. A pool a layer is left out where it has no more slots than a call takes.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis import bootstrap
from analysis.bootstrap import ratio
from analysis.experiment import Data, Experiment, Part
from analysis.experiments.real_routes import files_of, kept_trace
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number, percent
from analysis.runs import Design, Replayed, run
from analysis.workloads import by_model
from ground.cache_folder import cache_folder
from ground.errors import InputError
from sim.policies.named import NamedPolicy
from sim.run.scene import SceneOptions, bundled_traces
from traces.schema import DECODE
from traces.trace import Trace

CACHES = (5, 10, 25, 50)
"""Per cent of all experts."""
CARDS = ("l40", "rtx-4090", "h200")
RIVALS = ("decayed-lfu", "perfect-lfu", "lfru", "least-stale", "layer-lru")
QUEUES = ("arc", "s3-fifo", "w-tinylfu")
"""Rules that the compiled engine lacks: at 25 % in one pool alone."""
OURS, NOTHING_KNOWN, OTHER = "pathwise", "pathwise,start=nothing", "pathwise, other"
MOST = {"eval": 1300, "profile": 6000}
"""Rows of a trace that are kept, about: whole sequences, drawn."""
BUNDLED = ("mixtral_law", "phi_law", "qwen15_law", "qwen3_law", "deepseek_math")
COPY = 0.9
"""A row copies the profile if it shares more than so many of its experts with one row of it."""


def measure(options: ExperimentOptions) -> Data:
    """Every rule on every trace at every size. Raises InputError if there are no published routes."""
    bootstrap.check()
    places = [*_published(files_of(options.traces)), *_bundled()]
    jobs = [(place, job) for place in places for job in _jobs(place)]
    outcomes = iter(run([design for _, (_, _, design) in jobs], options.processes, "eviction"))
    found: dict[tuple[str, str], dict[str, Replayed]] = {}
    for place, (where, name, _) in jobs:
        found.setdefault((place["name"], where), {})[name] = next(outcomes)
    return {
        "traces": [_told(place) for place in places],
        "cells": [
            {"trace": trace, "where": where, **_cell(ran, options.seed)} for (trace, where), ran in found.items()
        ],
        "made": _made(options, places),
    }


def _made(options: ExperimentOptions, places: Sequence[Data]) -> Data:
    """Where data comes from; cache sizes are its own, and so are the other machines."""
    made = options.made(by_model([Path(place["path"]) for place in places]))
    return {key: value for key, value in made.items() if key != "cache"} | {"hardware": CARDS[0]}


# -- traces ----------------------------------------------------------------------------------------------------------


def _published(files: Sequence[Path]) -> list[Data]:
    kept = [(file.stem, _cut(kept_trace(file))) for file in files]
    of: dict[str, list[str]] = {}
    for _, path in kept:
        trace = Trace.load(path)
        if (trace.split == "profile").any():
            of.setdefault(str(trace.meta["model"]["name"]), []).append(str(path))
    places = []
    for name, path in kept:
        same = of.get(str(Trace.load(path).meta["model"]["name"]), [])
        others = [other for other in same if other != str(path)]
        places.append({"name": name, "path": str(path), "learns": str(path) in same, "others": others[:1]})
    return places


def _bundled() -> list[Data]:
    found = {path.stem: str(path) for path in bundled_traces()}
    return [{"name": name, "path": found[name], "learns": True, "others": []} for name in BUNDLED if name in found]


def _cut(path: Path) -> Path:
    """The trace, or one of so many rows of its sequences, drawn."""
    trace = Trace.load(path)
    rows = np.diff(trace.offsets)
    order = np.random.default_rng(0).permutation(trace.n_sequences)
    keep = np.zeros(trace.n_sequences, bool)
    for split, most in MOST.items():
        mine = order[trace.split[order] == split]
        keep[mine[np.cumsum(rows[mine]) - rows[mine] < most]] = True
    if keep.all():
        return path
    folder = cache_folder("routes")
    if folder is None:
        raise InputError(f"{path}: a part is kept, which needs the cache folder (MOE_REPLAY_CACHE)")
    name = hashlib.sha256(f"{trace.sha256} {sorted(MOST.items())}".encode()).hexdigest()[:16]
    target = folder / name / path.name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        trace.keep(keep).save(target)
    return target


def _told(place: Data) -> Data:
    trace = Trace.load(place["path"])
    chosen, profile = trace.select("eval"), trace.select("profile") if place["learns"] else None
    return {
        "trace": place["name"],
        "model": trace.meta["model"]["name"],
        "sequences": chosen.n_sequences,
        "tokens": int((chosen.phase == DECODE).sum()),
        "profile_tokens": 0 if profile is None else profile.n_rows,
        "copies": None if profile is None else round(_copies(chosen, profile), 3),
    }


def _copies(chosen: Trace, profile: Trace) -> float:
    """The share of decoded rows that copy a row of the profile."""
    rows, known = (_one_hot(one) for one in (chosen, profile))
    rows = rows[chosen.phase == DECODE]
    most = np.concatenate([(part @ known.T).max(axis=1) for part in np.array_split(rows, max(1, len(rows) // 512))])
    return float((most > COPY * np.maximum(1, rows.sum(axis=1))).mean())


def _one_hot(trace: Trace) -> np.ndarray:
    """Which experts each row takes (T, L * E) float32."""
    taken = np.zeros((trace.n_rows, trace.n_layers, trace.n_experts + 1), np.float32)
    np.put_along_axis(taken, trace.experts.astype(np.int64), 1, axis=2)  # -1 is the last column
    return taken[:, :, :-1].reshape(trace.n_rows, -1)


# -- runs ------------------------------------------------------------------------------------------------------------


def _jobs(place: Data) -> list[tuple[str, str, Design]]:
    """Where (pool, size, card), the name of a rule, and its replay."""
    trace = Trace.load(place["path"])
    jobs = []
    for scope in ("global", "layer"):
        for size in CACHES:
            slots = trace.n_layers * trace.n_experts * size // 100
            if slots <= trace.top_k or (scope == "layer" and slots // trace.n_layers <= trace.top_k):
                continue
            for card in CARDS if (scope, size) == ("global", 25) else CARDS[:1]:
                scene = SceneOptions(
                    (place["path"],), hardware=card, cache=f"{size}%",
                    profile=(place["path"],) if place["learns"] else None,
                )  # fmt: skip
                where = f"{scope} {size} {card}"
                names = ["lru", "min", OURS, *(RIVALS if card == CARDS[0] else ())]
                names += QUEUES if where == "global 25 l40" else ()
                names += (NOTHING_KNOWN,) if place["learns"] and card == CARDS[0] else ()
                jobs += [(where, name, _design(scene, name, scope)) for name in names]
                if place["others"] and card == CARDS[0]:
                    other = replace(scene, profile=tuple(place["others"]))
                    jobs.append((where, OTHER, _design(other, OURS, scope)))
    return jobs


def _design(scene: SceneOptions, name: str, scope: str) -> Design:
    learns = scene.profile is not None
    label = name if learns or name != OURS else NOTHING_KNOWN
    return Design(scene, NamedPolicy.of(f"{label},scope={scope}"))


def _cell(ran: dict[str, Replayed], seed: int) -> Data:
    lru, least = ran["lru"], ran["min"]
    return {
        "tokens_per_s": {name: float(f"{one.tokens_per_s:.5g}") for name, one in ran.items()},
        "hits": {name: round(one.shares.hits.sum() / one.shares.lookups.sum(), 4) for name, one in ran.items()},
        "gap": {
            name: gap(one.shares.hits, lru.shares.hits, least.shares.hits, seed)
            for name, one in ran.items()
            if name not in ("lru", "min")
        },
    }


def gap(hits: np.ndarray, lru: np.ndarray, least: np.ndarray, seed: int = 0) -> Data:
    """The share of the gap from LRU's hits to MIN's, all (S,), with a 95 % interval over sequences where S > 1.

    Sequences are drawn with replacement, those of all three together.
    """
    each = np.ones(len(hits))
    return ratio((hits - lru, each), (least - lru, each), seed).to_json()


# -- tables ----------------------------------------------------------------------------------------------------------


def sheets(data: Data) -> list[Sheet]:
    """Means first, then every trace with intervals, then rivals, speeds and the traces themselves."""
    return [_means(data), *(_gaps(data, scope) for scope in ("global", "layer")), _rivals(data), _speeds(data),
            _traces(data)]  # fmt: skip


def _split(cell: Data) -> tuple[str, int, str]:
    scope, size, card = cell["where"].split()
    return scope, int(size), card


def _real(data: Data) -> list[str]:
    """Published traces with a profile: those of the aims."""
    return [one["trace"] for one in data["traces"] if one["profile_tokens"] and one["trace"] not in BUNDLED]


def _means(data: Data) -> Sheet:
    rows = []
    groups = {"published, with a profile": _real(data), "bundled": list(BUNDLED)}
    for title, traces in groups.items():
        for scope in ("global", "layer"):
            cells = [c for c in data["cells"] if c["trace"] in traces and _split(c)[::2] == (scope, CARDS[0])]
            for sizes in ((10, 25, 50), *((size,) for size in CACHES)):
                here = [c for c in cells if _split(c)[1] in sizes]
                if not here:
                    continue
                cells_of = [_mean([c["gap"].get(name) for c in here]) for name in (OURS, NOTHING_KNOWN, OTHER, *RIVALS)]
                rows.append([title, POOLS[scope], ", ".join(f"{size} %" for size in sizes), *cells_of])
    columns = ["traces", "pool", "cache", "pathwise", "nothing", "other", *RIVALS]
    return Sheet("Share of the gap between LRU and MIN, means over traces", columns, rows, notes("pathwise-means"))


POOLS = {"global": "one", "layer": "a layer"}


def _mean(gaps: Sequence[Data | None]) -> str:
    values = [one["value"] for one in gaps if one is not None and one["value"] is not None]
    return number(float(np.mean(values)), 3) if values else NOTHING


def _gaps(data: Data, scope: str) -> Sheet:
    rows = []
    for cell in data["cells"]:
        pool, size, card = _split(cell)
        if (pool, card) == (scope, CARDS[0]):
            hits = [percent(cell["hits"][name]) for name in ("lru", OURS, "min")]
            gaps = [_interval(cell["gap"].get(name)) for name in (OURS, NOTHING_KNOWN, OTHER)]
            rows.append([cell["trace"], f"{size} %", *hits, *gaps])
    columns = ["trace", "cache", "hits, LRU", "pathwise", "MIN", "gap, pathwise", "nothing", "other"]
    return Sheet(f"Hits and gap, {'one pool' if scope == 'global' else 'a pool a layer'}", columns, rows)


def _interval(one: Data | None) -> str:
    return interval(one, digits=2) if one else NOTHING


def _rivals(data: Data) -> Sheet:
    names = [OURS, *RIVALS, *QUEUES]
    rows = [
        [cell["trace"], *(_interval(cell["gap"].get(name)) for name in names)]
        for cell in data["cells"] if cell["where"] == "global 25 l40"
    ]  # fmt: skip
    return Sheet("Share of the gap at 25 %, one pool: rivals", ["trace", *names], rows, notes("pathwise-rivals"))


def _speeds(data: Data) -> Sheet:
    rows = []
    for cell in data["cells"]:
        scope, size, card = _split(cell)
        if (scope, size) == ("global", 25):
            speed = cell["tokens_per_s"]
            rows.append([cell["trace"], card, *(number(speed[name]) for name in ("lru", OURS, "min")),
                         number(speed[OURS] / speed["lru"], 3)])  # fmt: skip
    columns = ["trace", "card", "tokens/s, LRU", "pathwise", "MIN", "pathwise / LRU"]
    return Sheet("Tokens/s at 25 %, one pool, reckoning charged", columns, rows, notes("pathwise-speeds"))


def _traces(data: Data) -> Sheet:
    rows = [
        [one["trace"], one["model"], str(one["sequences"]), f"{one['tokens']:,}", f"{one['profile_tokens']:,}",
         percent(one["copies"])]
        for one in data["traces"]
    ]  # fmt: skip
    columns = ["trace", "model", "sequences", "tokens", "of the profile", "copies"]
    return Sheet("Traces", columns, rows, notes("pathwise-traces"))


EXPERIMENT = Experiment(
    130, "pathwise", "Eviction that knows the path", __doc__, measure, sheets, parts=[Part(traces="routes")]
)
