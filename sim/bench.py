"""How fast the engine is, as ratios in one run: against a bare SimPy loop with the same transfers, and over sizes.

The bare loop is what one would write first: an attention time-out, one transfer process a miss on a shared link, all of
them awaited, one compute time-out. It is told which look-ups miss, so it decides nothing; the distance to it is what
the cache, the policy and the record of a run cost.
"""

import time
from collections.abc import Generator
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table
from simpy import Environment, Event, Resource

from sim.engine import Run
from sim.hardware import Hardware
from sim.log import MISS
from sim.model import load_model
from sim.policies import Setting, make_policy
from sim.view import View
from sim.workload import Workload, batched, workload
from traces.trace import DECODE, Trace


@dataclass(frozen=True)
class Row:
    """One measurement: decode tokens a second of the engine and, where it was run, of the bare loop."""

    what: str
    tokens: int
    slots: int
    miss_ratio: float
    tokens_per_s: float
    bare_tokens_per_s: float | None
    ratio: float | None


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


def run_bench(tokens: int) -> list[Row]:
    """Measure; each figure is the best of three runs, whose set-up (routes, costs, plan) is not counted."""
    machine = Hardware.load("l40")
    rows = []
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        rows.append(_measure("lru, beside the bare loop", tokens, share, "lru", machine, bare=True))
    rows.append(_measure("previous-token", tokens, 0.2, "previous-token", machine))
    rows.append(_measure("clairvoyant", tokens, 0.25, "clairvoyant", machine))
    rows.append(_measure("lru, 4 x the tokens", 4 * tokens, 0.25, "lru", machine))
    for share in (0.02, 0.9):
        rows.append(_measure("lru, 128 experts a layer", tokens // 4, share, "lru", machine, model="qwen3-30b-a3b"))
    return rows


def _measure(
    what: str,
    tokens: int,
    share: float,
    policy: str,
    machine: Hardware,
    bare: bool = False,
    model: str = "mixtral-8x7b",
) -> Row:
    spec = load_model(model)
    trace = synthetic_trace(tokens, model)
    work = workload(trace, spec, machine, batched(trace, 1))
    budget = int(spec.all_expert_bytes * share)
    made = make_policy(policy, Setting(spec, budget, ()))
    plan = made.plan(View(trace, work, made.clairvoyant))
    best = beside = float("inf")
    missed = np.zeros(len(work.expert), bool)
    for _ in range(3):
        run = Run(work, plan, budget)
        begin = time.perf_counter()
        log = run.log()
        best = min(best, time.perf_counter() - begin)
        missed = log.found == MISS
        if bare:
            begin = time.perf_counter()
            bare_loop(work, missed)
            beside = min(beside, time.perf_counter() - begin)
    return Row(
        what=what,
        tokens=tokens,
        slots=budget // max(spec.expert_bytes),
        miss_ratio=float(missed.mean()),
        tokens_per_s=tokens / best,
        bare_tokens_per_s=tokens / beside if bare else None,
        ratio=beside / best if bare else None,
    )


def bench_table(rows: list[Row]) -> Table:
    """The measurements as a table."""
    table = Table(title="engine speed (decode tokens simulated a second)", title_justify="left")
    for name in ("what", "tokens", "slots", "misses", "tokens/s", "bare loop", "ratio"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.tokens:,}",
            f"{row.slots:,}",
            f"{100 * row.miss_ratio:.1f}%",
            f"{row.tokens_per_s:,.0f}",
            f"{row.bare_tokens_per_s:,.0f}" if row.bare_tokens_per_s else "",
            f"{row.ratio:.2f}" if row.ratio else "",
        )
    return table


def bench_json(rows: list[Row]) -> list[dict[str, object]]:
    """The measurements as data."""
    return [asdict(row) for row in rows]
