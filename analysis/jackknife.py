"""Intervals for runs whose sequences decode together: the same replays again, of random parts of the sequences.

In a batch a step's time belongs to all of its sequences, and what one of them needs another may have brought. So no
sequence has a share of its own that could be drawn alone, as ``analysis.bootstrap`` does at batch 1. Instead each run
is repeated on three quarters of its sequences, drawn without replacement and in an order of their own, so that other
sequences meet in a batch. A ratio of two runs is taken on each part, both on the same one. This is the delete-d
jackknife (J. Shao, C. F. J. Wu, "A General Theory for Jackknife Variance Estimation", 1989): with d of n sequences
left out, the variance of a mean of n is ``(n - d) / d`` times that among the parts' means. The interval is
``value * exp(+-t s)``, with s the standard deviation that follows for the logarithm of the ratio, and t Student's of as
many degrees of freedom as there are parts but one. No sequence is in
a batch twice, as it would be if sequences were drawn with replacement: then the copies would share all their experts.

A part begins with a cold cache as the whole does, and ends with batches that are no longer full. Both weigh more in
it. Where that moves a ratio, its interval is wider than it should be.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from analysis.altered import prepared
from analysis.bootstrap import Ratio
from analysis.runs import Design, shown, spread
from sim.compiled.availability import SHORT, available
from sim.report.metrics import Report
from sim.run.engines import Engine
from sim.run.scene import LoadedTraces, Scene, SceneOptions, load_traces, scene_of
from sim.run.terms import TooSmallError
from traces.trace import Trace

DRAWS = 5
KEPT = 0.75
"""Of the sequences, in each draw."""
_WIDE = 2.776 * float(np.sqrt(KEPT / (1 - KEPT)))
"""Standard deviations among DRAWS draws that half a 95 % interval is."""

METRICS: dict[str, Callable[[Report], float | None]] = {
    "throughput": lambda report: report.tokens_per_s,
    "hit ratio": lambda report: report.decode.hit_ratio,
    "hit or late": lambda report: None if report.decode.miss_ratio is None else 1 - report.decode.miss_ratio,
}
"""What runs are compared by, all of decode."""
Measures = dict[str, float | None]


@dataclass(frozen=True)
class Outcome:
    """One design's report of all sequences, and METRICS of each draw."""

    design: Design
    report: Report
    draws: tuple[Measures, ...]

    def to_json(self) -> dict[str, Any]:
        """What tables and figures show of the run of all sequences."""
        return shown(self.design, self.report)


@dataclass(frozen=True)
class Place(SceneOptions):
    """A scene whose predictions may be an oracle's: ``foreseen`` is the share of a token's experts that it names."""

    foreseen: float | None = None

    @staticmethod
    def of(options: SceneOptions, **more: Any) -> "Place":
        """The same scene, with other fields as ``more`` says."""
        return Place(**{field.name: getattr(options, field.name) for field in fields(options)} | more)


Bout = Mapping[str, Design]
"""Designs by name that replay the same sequences."""


def compared(metric: str, one: Outcome | None, other: Outcome | None) -> Ratio:
    """One of METRICS of ``one`` over that of ``other``, with its interval; no value where there is none."""
    if one is None or other is None:
        return Ratio(None)
    above, below = METRICS[metric](one.report), METRICS[metric](other.report)
    if not above or not below:
        return Ratio(None)
    pairs = [(a[metric], b[metric]) for a, b in zip(one.draws, other.draws, strict=False)]  # either may run once alone
    logs = [float(np.log(a / b)) for a, b in pairs if a and b]
    if len(logs) < max(2, len(one.draws)):
        return Ratio(above / below)
    width = float(np.exp(_WIDE * np.std(logs, ddof=1)))
    return Ratio(above / below, above / below / width, above / below * width)


def level(metric: str, one: Outcome) -> dict[str, float | None]:
    """One of METRICS of a design, and half the width of its interval."""
    values = [draw[metric] for draw in one.draws]
    known = [value for value in values if value is not None]
    half = _WIDE * float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
    value = METRICS[metric](one.report)
    return {"value": None if value is None else round(value, 4), "plus_minus": round(half, 4)}


def fought(
    bouts: Sequence[Bout], workers: int, what: str, undrawn: Iterable[str] = ()
) -> list[dict[str, Outcome | None]]:
    """The outcomes of all bouts, by the names of their designs; None where a cache is too small for a policy.

    The designs named in ``undrawn`` run once and have no intervals. Raises InputError for what a person got wrong.
    """
    return spread(partial(_fight, draws=DRAWS, undrawn=frozenset(undrawn)), bouts, workers, what)


def _fight(bout: Bout, draws: int, undrawn: frozenset[str]) -> dict[str, Outcome | None]:
    found: dict[str, Outcome | None] = {}
    ran: dict[str, Outcome | None] = {}  # one that stands under several names runs once
    for name, design in bout.items():
        often = 0 if name in undrawn else draws
        key = f"{design} {often}"
        if key not in ran:
            ran[key] = _outcome(design, often, len(bout))
        found[name] = ran[key]
    return found


def _outcome(design: Design, draws: int, among: int) -> Outcome | None:
    """The outcome of a design ``among`` so many."""
    # A bout replays often enough for compiling to pay, unless the trace is tiny.
    lookups = len(_scene(design.scene, None).work.expert) * (draws + 1) * among
    engine: Engine = "compiled" if lookups >= SHORT and available() else "auto"
    try:
        whole = _report(design, None, engine)
    except TooSmallError:
        return None
    drawn = (_report(design, draw, engine) for draw in range(draws))
    return Outcome(design, whole, tuple({name: of(one) for name, of in METRICS.items()} for one in drawn))


def _report(design: Design, draw: int | None, engine: Engine) -> Report:
    return prepared(_scene(design.scene, draw), design.policy).simulate(engine=engine)


@lru_cache(maxsize=64)
def _scene(options: SceneOptions, draw: int | None) -> Scene:
    foreseen = options.foreseen if isinstance(options, Place) else None
    return scene_of(options, load=partial(_loaded, draw=draw, seed=options.seed, foreseen=foreseen))


_kept = lru_cache(maxsize=4)(load_traces)


def _loaded(
    paths: tuple[str | Path, ...], split: str, profile: tuple[str, ...] | None, learns: bool, *, draw: int | None,
    seed: int, foreseen: float | None,
) -> LoadedTraces:  # fmt: skip
    """The traces, of whose chosen sequences a part is drawn by ``seed`` and the draw's number."""
    found = _kept(paths, split, profile, learns)
    if foreseen is not None:
        found = replace(found, chosen=_foreseen(found.chosen, foreseen, seed))
    if draw is None:
        return found
    order = np.random.default_rng((seed, draw)).permutation(found.chosen.n_sequences)
    part = found.chosen.take(order[: max(1, round(KEPT * len(order)))])
    # Plans are kept by the trace's hash: a part is a trace of its own.
    name = hashlib.sha256(f"{part.sha256} draw {draw} of seed {seed}".encode()).hexdigest()
    return replace(found, chosen=replace(part, sha256=name))


def _foreseen(trace: Trace, accuracy: float, seed: int) -> Trace:
    """The trace with predictions of an oracle: as many as a token takes, each of its experts named with this chance."""
    rng = np.random.default_rng((seed, 1))
    # Named ones first, in any order, then experts that are not taken, then those that are and are not named.
    rank = rng.random((trace.n_rows, trace.n_layers, trace.n_experts + 1), np.float32)
    named = rng.random(trace.experts.shape) < accuracy
    at = np.ix_(np.arange(trace.n_rows), np.arange(trace.n_layers))
    for slot in range(trace.top_k):
        rank[*at, trace.experts[:, :, slot]] = np.where(named[:, :, slot], -1, 2)  # -1 is the last column
    ids = np.argsort(rank[:, :, :-1], axis=2, kind="stable")[:, :, : trace.top_k].astype(np.int16)
    name = hashlib.sha256(f"{trace.sha256} foreseen {accuracy} of seed {seed}".encode()).hexdigest()
    return replace(trace, predicted_experts=ids, predicted_probs=np.full(ids.shape, 255, np.uint8), sha256=name)
