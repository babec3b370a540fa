"""Does the domain idea hold for real models? Routes that others published are replayed under every policy that can run.

These records hold no embeddings, so DoMoE itself cannot run on them. What they allow is a domain's popularity: the
experts that its profile tokens took most. The table of the own domain is compared with another's, with one of all
domains pooled, and with the experts that the previous token took, which cost nothing to know.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis import bootstrap
from analysis.bootstrap import ratio
from analysis.experiment import Data, Experiment, Part
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, notes, number, percent, run_cells
from analysis.runs import Design, Replayed, run, scene_at
from analysis.workloads import ModelTraces, by_model, loaded
from ground.cache_folder import cache_folder
from ground.errors import InputError
from sim.policies import policy_classes
from sim.policies.named import NamedPolicy
from sim.predictors.popularity import counts_by_domain
from sim.run.scene import SceneOptions, lacking
from traces.arrays import read_arrays
from traces.convert.kinds import convert_file
from traces.schema import DECODE
from traces.trace import Trace

VARIABLE = "MOE_REPLAY_ROUTES"
"""Environment variable that names a folder of published routes."""
RIVALS = ("other", "pooled", "previous token")
"""What the table of the own domain is compared with."""


def measure(options: ExperimentOptions) -> Data:
    """Every policy and the domain tables on every model's routes. Raises InputError if there are none."""
    bootstrap.check()
    found = by_model([kept_trace(path) for path in files_of(options.traces)])
    cells = [
        (model.name, name, *_able(replace(options.place(model, sources), profile=_profile(model))))
        for model in found
        for name, sources in model.workloads.items()
    ]
    outcomes = iter(run([design for _, _, able, _ in cells for design in able], options.processes, "published routes"))
    return {
        "replays": [
            {"model": model, "workload": name, **_replayed([next(outcomes) for _ in able]), "refused": refused}
            for model, name, able, refused in cells
        ],
        "tables": [entry for model in found if (entry := tables(model, options.seed))],
        "made": options.made(found),
    }


def files_of(given: Sequence[str | Path] | None) -> list[Path]:
    """The files of published routes. Raises InputError if there are none."""
    folders = [Path(path) for path in given] if given is not None else [Path(os.environ.get(VARIABLE, ""))]
    if given is None and VARIABLE not in os.environ:
        raise InputError(f"no published routes: name files or a folder with --traces, or in the variable {VARIABLE}")
    files = [file for path in folders for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"{', '.join(map(str, folders))}: no .npz files; expected published routes")
    return files


def kept_trace(path: Path) -> Path:
    """A trace as it is; a record that ``traces convert`` reads, converted once and kept."""
    if "meta" in read_arrays(path)[0]:
        return path
    folder = cache_folder("routes")
    if folder is None:
        raise InputError(f"{path}: is converted first, which needs the cache folder (MOE_REPLAY_CACHE)")
    name = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    target = folder / name / path.name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        trace = convert_file(path, target)
        # Records of one model number their sequences alike; together they need names of their own.
        names = np.array([f"{path.stem}:{one}" for one in trace.sequence_id.tolist()])
        Trace(**{f: getattr(trace, f) for f in trace.__dataclass_fields__} | {"sequence_id": names}).save(target)
    return target


def _profile(model: ModelTraces) -> tuple[str, ...] | None:
    """The files that have a profile split, to learn from."""
    return tuple(s.path for s in model.sources if (loaded(s.path).split == "profile").any()) or None


def _able(place: SceneOptions) -> tuple[list[Design], list[Data]]:
    """A replay of every policy and variant that can run on these traces, and why each other policy cannot."""
    here = scene_at(place)
    able: list[Design] = []
    refused: list[Data] = []
    for name, kind in policy_classes().items():
        reason = lacking(here, kind)
        if reason:
            # The path is the machine's own; what is lacking is what counts.
            named = reason.replace(f"the trace {here.trace.source}", "the trace")
            refused.append({"policy": name, "reason": named.replace(here.trace.source, "the trace")})
            continue
        able.append(Design(place, NamedPolicy(name, name)))
        for variant in kind.variants:
            values = dict(pair.split("=", 1) for pair in variant.split(","))
            able.append(Design(place, NamedPolicy(f"{name},{variant}", name, {**values})))
    return able, refused


def _replayed(outcomes: Sequence[Replayed]) -> Data:
    first = outcomes[0].report
    bounds = next((o.report.bounds for o in outcomes if o.report.bounds["link_tokens_per_s"]), first.bounds)
    return {
        "sequences": len(outcomes[0].shares.tokens),
        "tokens": first.decode.tokens,
        "compute_bound": bounds["compute_tokens_per_s"],
        "link_bound": bounds["link_tokens_per_s"],
        "runs": [outcome.to_json() for outcome in sorted(outcomes, key=lambda outcome: -outcome.tokens_per_s)],
    }


def tables(model: ModelTraces, seed: int = 0) -> Data | None:
    """Recall of the evaluation tokens' experts by popularity tables and by the previous token; None with one domain.

    A table names the K experts of each layer that its profile rows took most. ``other`` is the mean over the tables of
    all other domains. Intervals are over sequences.
    """
    whole = Trace.concat([loaded(source.path) for source in model.sources])
    domains = sorted(
        set(whole.domain[whole.split == "profile"].tolist()) & set(whole.domain[whole.split == "eval"].tolist())
    )
    if len(domains) < 2:
        return None
    profile = counts_by_domain([whole.select("profile", domains)])
    named = {domain: _top(whole, profile[domain]) for domain in domains}
    pooled = _top(whole, np.sum([*profile.values()], axis=0))
    rows = np.flatnonzero(
        (whole.phase == DECODE) & (whole.row_split("eval")) & np.isin(whole.domain, domains)[whole.sequence]
    )
    domain_of = whole.domain[whole.sequence[rows]]
    taken = whole.experts[rows]
    found = {"own": np.zeros(len(rows)), "other": np.zeros(len(rows)), "pooled": _found(taken, pooled)}
    for domain, table in named.items():
        right = _found(taken, table)
        found["own"] += np.where(domain_of == domain, right, 0)
        found["other"] += np.where(domain_of != domain, right, 0) / (len(domains) - 1)
    has_previous = ~np.isin(rows, whole.offsets)[:, None, None]
    found["previous token"] = _found(taken, np.where(has_previous, whole.experts[rows - 1], -1))
    _, whose = np.unique(whole.sequence[rows], return_inverse=True)
    used = np.bincount(whose, weights=(taken >= 0).sum(axis=(1, 2)))
    rate = {name: (np.bincount(whose, weights=right), used) for name, right in found.items()}
    return {
        "model": model.name,
        "domains": len(domains),
        "tokens": len(rows),
        "chance": round(whole.top_k / whole.n_experts, 4),
        "recall": {name: round(float(above.sum() / below.sum()), 4) for name, (above, below) in rate.items()},
        "own_over": {name: ratio(rate["own"], rate[name], seed).to_json() for name in RIVALS},
    }


def _top(trace: Trace, counts: np.ndarray) -> np.ndarray:
    """(1, L, K): the experts that were counted most, from (L * E,), smaller numbers first among equals."""
    order = np.argsort(-counts.reshape(trace.n_layers, trace.n_experts), axis=1, kind="stable")
    return order[None, :, : trace.top_k]


def _found(taken: np.ndarray, named: np.ndarray) -> np.ndarray:
    """(rows,) how many of each row's experts (rows, L, K) are among those named for it, or for all rows (1, L, K)."""
    named = np.broadcast_to(named, taken.shape)
    right = np.zeros(len(taken))
    for start in range(0, len(taken), 4096):
        now, said = taken[start : start + 4096], named[start : start + 4096]
        right[start : start + 4096] = ((now[..., None] == said[:, :, None]).any(axis=3) & (now >= 0)).sum(axis=(1, 2))
    return right


def sheets(data: Data) -> list[Sheet]:
    """Domain tables first, then every policy on every trace."""
    rows = []
    for entry in data["tables"]:
        recall, over = entry["recall"], entry["own_over"]
        rows.append(
            [entry["model"], str(entry["domains"]), f"{entry['tokens']:,}", percent(entry["chance"]),
             *(percent(recall[name]) for name in ("own", "pooled", "other", "previous token")),
             *(interval(over[name]) for name in RIVALS)]
        )  # fmt: skip
    columns = ["model", "domains", "tokens", "chance", "own table", "pooled", "another's", "previous token",
               "own / another's", "own / pooled", "own / previous token"]  # fmt: skip
    result = [Sheet("Domain tables on published routes of real models", columns, rows, notes("routes"))]
    return result + [_replay_sheet(entry) for entry in data["replays"]]


def _replay_sheet(entry: Data) -> Sheet:
    shown = ["tokens/s", "hit", "late", "miss", "GiB/token", "wasted", "predict ms/token", "efficiency"]
    rows = [[_name(r), *run_cells(r, shown)] for r in entry["runs"]]
    below = notes("routes-replay", compute=number(entry["compute_bound"]), link=number(entry["link_bound"]))
    below += [f"Left out: {r['policy']}: {r['reason']}." for r in entry["refused"]]
    title = f"{entry['model']}, {entry['workload']}: {entry['sequences']} sequences, {entry['tokens']:,} tokens"
    return Sheet(title, ["policy", *shown], rows, below, detail=True)


def _name(entry: Data) -> str:
    given = ", ".join(f"{key}={value}" for key, value in entry["set"].items())
    return f"{entry['policy']} ({given})" if given else str(entry["policy"])


EXPERIMENT = Experiment(
    120, "real-routes", "Published routes of real models", __doc__, measure, sheets, parts=[Part(traces="routes")]
)
