"""How fast the engines are, as ratios in one run: SimPy beside a bare loop, compiled beside SimPy, the cache alone.

The bare loop is what one would write first in SimPy: an attention time-out, one transfer process a miss on a shared
link, all of them awaited, one compute time-out. It is told which look-ups miss, so it decides nothing; the distance to
it is what the cache, the policy and the record of a run cost. The compiled engine runs longer traces of the same kind.
Routes, costs and plans are made beforehand and code is compiled beforehand; a run is all that is measured.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from rich.console import Group
from rich.table import Table
from simpy import Environment, Event, Resource

from ground.errors import InputError
from sim.compiled import available, run_compiled
from sim.log import MISS
from sim.machine.hardware import Hardware
from sim.model.spec import load_model
from sim.plan import Plan
from sim.policies import Setting, make_policy
from sim.run.simpy_engine import Run
from sim.workload import Workload, batched, workload
from traces.trace import DECODE, Trace

T = TypeVar("T")

MOST_TOKENS = 5_000_000


@dataclass(frozen=True)
class Case:
    """What is run: a policy with room for a share of all experts of a model."""

    policy: str
    share: float
    model: str = "mixtral-8x7b"


CASES = (
    *(Case("lru", share) for share in (0.1, 0.25, 0.5, 0.75, 1.0)),
    Case("previous-token", 0.2),
    Case("clairvoyant", 0.25),
    *(Case("lru", share, "qwen3-30b-a3b") for share in (0.02, 0.9)),
)


@dataclass(frozen=True)
class Row:
    """One measurement: decode tokens a second of an engine, and of what it is compared with where that was run."""

    engine: str
    policy: str
    model: str
    tokens: int
    slots: int
    miss_ratio: float
    tokens_per_s: float
    beside: str = ""
    beside_tokens_per_s: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class CacheRow:
    """Accesses a second of one cache and the share that missed; None where it is not installed."""

    what: str
    accesses: int
    slots: int
    miss_ratio: float | None = None
    accesses_per_s: float | None = None


@dataclass(frozen=True)
class Stage:
    """A case with everything made that comes before a run."""

    case: Case
    tokens: int
    work: Workload
    plan: Plan
    budget: int

    @property
    def slots(self) -> int:
        """How many experts fit."""
        return self.budget // max(self.work.expert_bytes)

    def row(self, engine: str, seconds: float, missed: np.ndarray, beside: str = "", other: float | None = None) -> Row:
        """A measurement here; ``other`` is tokens a second of ``beside``."""
        speed = self.tokens / seconds
        return Row(
            engine,
            self.case.policy,
            self.case.model,
            self.tokens,
            self.slots,
            float(missed.mean()),
            speed,
            beside,
            other,
            speed / other if other else None,
        )


def synthetic_trace(tokens: int, model: str = "mixtral-8x7b", seed: int = 0) -> Trace:
    """One decode sequence whose routes drift like a topic's: Zipf popularity, an autoregressive topic, Gumbel noise."""
    spec = load_model(model)
    rng = np.random.default_rng(seed)
    shape = (spec.routed_layers, spec.experts)
    base = np.log(1.0 / (1 + rng.permuted(np.tile(np.arange(spec.experts), (shape[0], 1)), axis=1)))
    topic = np.zeros(shape)
    routes = np.empty((tokens, shape[0], spec.top_k), np.int16)
    for t in range(tokens):
        topic = 0.95 * topic + 0.3 * rng.standard_normal(shape)
        score = base + 2 * topic + rng.gumbel(size=shape)
        routes[t] = np.argsort(-score, axis=1)[:, : spec.top_k]
    rows = np.arange(tokens, dtype=np.int32)
    return Trace(
        meta={
            "schema": 1,
            "model": {"name": model, "experts": spec.experts, "top_k": spec.top_k},
            "captured": {"what": "synthetic routes of the benchmark"},
            "text": {"source": "none", "licence": "none"},
            "decoding": {"mode": "synthetic"},
        },
        layers=np.array(spec.moe_layers, np.int32),
        experts=routes,
        token=np.full(tokens, -1, np.int32),
        sequence=np.zeros(tokens, np.int32),
        position=rows,
        phase=np.full(tokens, DECODE, np.uint8),
        domain=np.array(["synthetic"]),
        split=np.array(["eval"]),
        sequence_id=np.array(["0"]),
    )


def bare_loop(work: Workload, missed: np.ndarray) -> int:
    """The bare SimPy loop; returns its makespan in ns. ``missed`` (N,) bool, one a look-up."""
    env = Environment(0)
    link = Resource(env, 1)
    calls = np.concatenate([[0], np.cumsum(missed)])[work.offsets].tolist()
    copy = [work.copy_ns[e // work.n_experts] for e in work.expert[missed].tolist()]
    layer_ns = work.layer_ns.tolist()
    spent = np.concatenate([[0], np.cumsum(work.expert_ns)])
    expert_ns = np.diff(spent[work.offsets]).tolist()

    def transfer(ns: int) -> Generator[Event, None, None]:
        with link.request() as turn:
            yield turn
            yield env.timeout(ns)

    def gpu() -> Generator[Event, None, None]:
        for call in range(work.n_calls):
            yield env.timeout(layer_ns[call])
            moves = [env.process(transfer(ns)) for ns in copy[calls[call] : calls[call + 1]]]
            if moves:
                yield env.all_of(moves)
            yield env.timeout(expert_ns[call])

    env.run(until=env.process(gpu()))
    return int(env.now)


def run_bench(tokens: int, long: int) -> tuple[list[Row], list[CacheRow]]:
    """Measure, the best of three runs each: SimPy on traces of ``tokens`` decode tokens, compiled on ``long``.

    Models with more experts get a quarter of the tokens. Without numba the compiled engine and the caches are left out.
    Raises InputError for fewer than 4 tokens, or more than memory holds.
    """
    for flag, count in (("--tokens", tokens), ("--long", long)):
        if not 4 <= count <= MOST_TOKENS:
            raise InputError(f"{flag}: {count} decode tokens; expected 4 to {MOST_TOKENS:,}")
    rows = []
    simpy: dict[Case, float] = {}
    for case in CASES:
        stage = prepare(case, tokens)
        rows.append(_measure_simpy(stage, bare=case.policy == "lru" and case.model == "mixtral-8x7b"))
        simpy[case] = rows[-1].tokens_per_s
    rows.append(_measure_simpy(prepare(Case("lru", 0.25), 4 * tokens), bare=False))
    if not available():
        return rows, []
    from sim.bench.cache import measure_caches

    caches: list[CacheRow] = []
    for case in CASES:
        stage = prepare(case, long)
        run_compiled(stage.work, stage.plan, stage.budget)
        seconds, log = _best(partial(run_compiled, stage.work, stage.plan, stage.budget))
        rows.append(stage.row("compiled", seconds, log.found == MISS, "simpy", simpy[case]))
        if case in (Case("lru", 0.25), Case("lru", 0.5)):
            caches += measure_caches(stage.work, stage.budget)
    return rows, caches


def prepare(case: Case, tokens: int) -> Stage:
    """Set the stage for a synthetic trace of ``tokens`` decode tokens."""
    spec = load_model(case.model)
    tokens = tokens if spec.experts <= 8 else tokens // 4
    trace = synthetic_trace(tokens, case.model)
    work = workload(trace, spec, Hardware.load("l40"), batched(trace, 1))
    budget = int(spec.all_expert_bytes * case.share)
    made = make_policy(case.policy, Setting(spec, budget, ()))
    return Stage(case, tokens, work, made.plan(made.view(trace, work)), budget)


def _best(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the fastest of three runs, and what the last returned."""
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - begin)
    return best, result


def _measure_simpy(stage: Stage, bare: bool) -> Row:
    seconds, log = _best(lambda: Run(stage.work, stage.plan, stage.budget).log())
    missed = log.found == MISS
    if not bare:
        return stage.row("simpy", seconds, missed)
    beside, _ = _best(lambda: bare_loop(stage.work, missed))
    return stage.row("simpy", seconds, missed, "bare loop", stage.tokens / beside)


def bench_view(rows: list[Row], caches: list[CacheRow]) -> Group:
    """The measurements as tables."""
    speeds = _table("engine speed (decode tokens simulated a second)", "engine", "policy", "model", "tokens", "slots",
                    "misses", "tokens/s", "beside", "its tokens/s", "ratio")  # fmt: skip
    for row in rows:
        speeds.add_row(
            row.engine,
            row.policy,
            row.model,
            f"{row.tokens:,}",
            f"{row.slots:,}",
            f"{100 * row.miss_ratio:.1f}%",
            f"{row.tokens_per_s:,.0f}",
            row.beside,
            f"{row.beside_tokens_per_s:,.0f}" if row.beside_tokens_per_s else "",
            f"{row.ratio:,.2f}" if row.ratio else "",
        )
    alone = _table("the cache alone under LRU", "cache", "accesses", "slots", "misses", "accesses/s")
    for cache in caches:
        alone.add_row(
            cache.what,
            f"{cache.accesses:,}",
            f"{cache.slots:,}",
            "" if cache.miss_ratio is None else f"{100 * cache.miss_ratio:.1f}%",
            "" if cache.accesses_per_s is None else f"{cache.accesses_per_s:,.0f}",
        )
    return Group(speeds, alone if caches else "the compiled engine and the caches need numba: left out")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    words = ("engine", "policy", "model", "beside", "cache")
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    return table


def bench_json(rows: list[Row], caches: list[CacheRow]) -> dict[str, list[dict[str, object]]]:
    """The measurements as data."""
    return {"engines": [asdict(row) for row in rows], "caches": [asdict(row) for row in caches]}
