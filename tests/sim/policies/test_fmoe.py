"""FMoE: one table of all domains; with a single domain it is DoMoE's table searched at every layer."""

import dataclasses
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.plan import Requests
from sim.policies import make_policy
from sim.predictors.global_table import GlobalTable
from sim.predictors.table import tables
from sim.view import View
from tests.support.worlds import World, worlds
from traces.schema import DECODE
from traces.trace import Trace


def made(requests: Requests | None) -> set[tuple[int, int, int]]:
    assert requests is not None
    moment = np.repeat(requests.moment, np.diff(requests.offsets))
    return {*zip(moment.tolist(), requests.call.tolist(), requests.expert.tolist(), strict=True)}


@given(worlds(prefill=True), st.sampled_from(["layer", "token", "entry"]), st.sampled_from([1, 3, 2000]))
@settings(max_examples=40)
def test_with_one_domain_it_asks_for_what_domoe_asks_for(world: World, keys: str, entries: int) -> None:
    # Every prompt has a direction, or DoMoE would match nothing where FMoE needs no match.
    prompts = np.maximum(np.abs(world.trace.prefill_embeddings), 1)  # type: ignore[arg-type, type-var]
    trace = dataclasses.replace(
        world.trace, domain=np.full(world.trace.n_sequences, "law"), prefill_embeddings=prompts.astype(np.int8)
    )
    values = {"keys": keys, "entries": entries}
    one, other = (
        make_policy(name, dataclasses.replace(world, trace=trace).setting, {**values, **more}).plan(
            View(trace, world.work)
        )
        for name, more in (("fmoe", {}), ("domoe", {"mode": "table"}))
    )
    assert made(one.requests) == made(other.requests)
    assert one.prediction.critical


def of_one(trace: Trace, sequence: int) -> Trace:
    """One sequence as a trace of its own, known by a hash."""
    return dataclasses.replace(trace.take(np.array([sequence])), sha256=f"{sequence}")


@given(worlds(), st.integers(1, 12))
@settings(max_examples=30)
def test_domains_fill_the_table_in_turn(world: World, entries: int) -> None:
    trace = world.trace
    seen: dict[str, int] = {}
    turn = []
    for sequence, domain in enumerate(trace.domain.tolist()):
        seen[domain] = seen.get(domain, -1) + 1
        turn.append((seen[domain], domain, sequence))
    in_turn = trace.take(np.array([sequence for _, _, sequence in sorted(turn)]))
    pooled = dataclasses.replace(in_turn, domain=np.full(trace.n_sequences, "x"))
    (expected,) = tables([pooled], entries)
    table = GlobalTable([trace], entries).table
    assert len(table) == min(entries, int((trace.phase == DECODE).sum()))
    assert table.keys.tolist() == expected.keys.tolist()
    assert table.paths.tolist() == expected.paths.tolist()


@given(worlds(), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_order_of_profiles_changes_nothing(world: World, entries: int, random: Random) -> None:
    profile = [of_one(world.trace, sequence) for sequence in range(world.trace.n_sequences)]
    shuffled = random.sample(profile, len(profile))
    one, other = (GlobalTable(traces, entries).table for traces in (profile, shuffled))
    assert one.keys.tolist() == other.keys.tolist()
    assert one.paths.tolist() == other.paths.tolist()


@given(worlds(), st.sampled_from(["layer", "token"]), st.integers(1, 12))
@settings(max_examples=30)
def test_searches_and_table_are_charged(world: World, keys: str, entries: int) -> None:
    trace, work, setting = world.trace, world.work, world.setting
    decode = np.flatnonzero(work.schedule.phase == DECODE)
    plan = world.plan("fmoe", {"keys": keys, "entries": entries})
    held = min(entries, int((trace.phase == DECODE).sum()))
    searches = work.n_layers if keys == "layer" else 1
    rows = np.diff(work.schedule.offsets)[decode].tolist()
    ns = [setting.software.search_ns(setting.hardware, held, setting.model.hidden, n) for n in rows]
    assert plan.prediction.ns.tolist() == np.repeat(ns, searches).tolist()
    assert (plan.prediction.moment % (work.n_layers + 1)).tolist() == list(range(searches)) * len(decode)
    vectors = setting.software.table_bytes(held * searches * setting.model.hidden)
    paths = 2 * held * work.n_layers * setting.model.top_k if setting.software.where == "gpu" else 0
    assert plan.gpu_bytes == vectors + paths


@given(worlds())
@settings(max_examples=30)
def test_experts_are_worth_as_much_as_the_tables_paths_take_them(world: World) -> None:
    trace = world.trace
    values = world.plan("fmoe").values
    assert values is not None
    assert (values.moment.tolist(), values.index.tolist()) == ([0], [0])
    counts = np.zeros((trace.n_layers, trace.n_experts), np.int64)
    for row in trace.decode_rows.tolist():
        for layer in range(trace.n_layers):
            for expert in trace.experts[row, layer].tolist():
                counts[layer, expert] += expert >= 0
    assert values.table.tolist() == [counts.ravel().tolist()]
