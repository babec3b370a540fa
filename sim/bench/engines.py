"""How fast the engines are, as ratios in one run: SimPy beside a bare loop, compiled beside SimPy, the cache alone.

The bare loop is what one would write first in SimPy: an attention time-out, one transfer process a miss on a shared
link, all of them awaited, one compute time-out. It is told which look-ups miss, so it decides nothing; the distance to
it is what the cache, the policy and the record of a run cost. The compiled engine runs longer traces of the same kind.
Routes, costs and plans are made beforehand and code is compiled beforehand; a run is all that is measured.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from simpy import Environment, Event, Resource

from ground.errors import InputError
from sim.bench.speeds import CacheSpeed, EngineSpeed
from sim.compiled.availability import available
from sim.compiled.engine import run_compiled
from sim.log import MISS, Log
from sim.machine.hardware import Hardware
from sim.plan import Plan
from sim.policies import Setting, make_policy
from sim.run.simpy_engine import Run
from sim.run.terms import RunTerms, settle
from sim.workload import Workload, batched, workload
from traces.assemble import assemble
from traces.models.known import model_spec
from traces.trace import Trace

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
class PreparedCase:
    """A case with everything made that comes before a run."""

    case: Case
    tokens: int
    work: Workload
    plan: Plan
    budget: int

    @property
    def terms(self) -> RunTerms:
        """What a run is held to; settling that is part of a run."""
        return settle(self.work, self.plan, self.budget)

    @property
    def slots(self) -> int:
        """How many experts fit."""
        return self.budget // max(self.work.expert_bytes)

    def row(
        self, engine: str, seconds: float, missed: np.ndarray, beside: str = "", other: float | None = None
    ) -> EngineSpeed:
        """A measurement here; ``other`` is tokens a second of ``beside``."""
        case, speed = self.case, self.tokens / seconds
        return EngineSpeed(
            engine, case.policy, case.model, self.tokens, self.slots, float(missed.mean()), speed, beside, other,
            speed / other if other else None,
        )  # fmt: skip


def synthetic_trace(tokens: int, model: str = "mixtral-8x7b", seed: int = 0) -> Trace:
    """One decode sequence whose routes drift like a topic's: Zipf popularity, an autoregressive topic, Gumbel noise."""
    spec = model_spec(model)
    rng = np.random.default_rng(seed)
    shape = (spec.routed_layers, spec.experts)
    base = np.log(1.0 / (1 + rng.permuted(np.tile(np.arange(spec.experts), (shape[0], 1)), axis=1)))
    topic = np.zeros(shape)
    routes = np.empty((tokens, shape[0], spec.top_k), np.int16)
    for t in range(tokens):
        topic = 0.95 * topic + 0.3 * rng.standard_normal(shape)
        score = base + 2 * topic + rng.gumbel(size=shape)
        routes[t] = np.argsort(-score, axis=1)[:, : spec.top_k]
    return assemble(
        meta={
            "schema": 1,
            "model": {"name": model, "experts": spec.experts, "top_k": spec.top_k},
            "captured": {"what": "synthetic routes of the benchmark"},
            "text": {"source": "none", "licence": "none"},
            "decoding": {"mode": "synthetic"},
        },
        layers=list(spec.moe_layers),
        experts=routes,
        lengths=np.array([tokens]),
        domain=np.array(["synthetic"]),
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


def run_bench(tokens: int, long: int) -> tuple[list[EngineSpeed], list[CacheSpeed]]:
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
        prepared = prepared_case(case, tokens)
        rows.append(_measure_simpy(prepared, bare=case.policy == "lru" and case.model == "mixtral-8x7b"))
        simpy[case] = rows[-1].tokens_per_s
    rows.append(_measure_simpy(prepared_case(Case("lru", 0.25), 4 * tokens), bare=False))
    if not available():
        return rows, []
    from sim.bench.cache import measure_caches

    caches: list[CacheSpeed] = []
    for case in CASES:
        prepared = prepared_case(case, long)
        compiled = partial(_compiled, prepared)
        compiled()
        seconds, log = _best(compiled)
        rows.append(prepared.row("compiled", seconds, log.found == MISS, "simpy", simpy[case]))
        if case in (Case("lru", 0.25), Case("lru", 0.5)):
            caches += measure_caches(prepared.work, prepared.budget)
    return rows, caches


def prepared_case(case: Case, tokens: int) -> PreparedCase:
    """Make what a run of ``case`` needs, for a synthetic trace of ``tokens`` decode tokens."""
    spec = model_spec(case.model)
    tokens = tokens if spec.experts <= 8 else tokens // 4
    trace = synthetic_trace(tokens, case.model)
    work = workload(trace, spec, Hardware.load("l40"), batched(trace, 1))
    budget = int(spec.all_expert_bytes * case.share)
    made = make_policy(case.policy, Setting(spec, budget, ()))
    return PreparedCase(case, tokens, work, made.plan(made.view(trace, work)), budget)


def _best(run: Callable[[], T]) -> tuple[float, T]:
    """Seconds of the fastest of three runs, and what the last returned."""
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - begin)
    return best, result


def _compiled(prepared: PreparedCase) -> Log:
    return run_compiled(prepared.work, prepared.plan, prepared.terms)


def _measure_simpy(prepared: PreparedCase, bare: bool) -> EngineSpeed:
    seconds, log = _best(lambda: Run(prepared.work, prepared.plan, prepared.terms).log())
    missed = log.found == MISS
    if not bare:
        return prepared.row("simpy", seconds, missed)
    beside, _ = _best(lambda: bare_loop(prepared.work, missed))
    return prepared.row("simpy", seconds, missed, "bare loop", prepared.tokens / beside)
