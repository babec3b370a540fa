"""DoMoE as a policy: votes against brute force, what is asked for and when, what it is charged in time and memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.machine.prediction_costs import PredictionCosts
from sim.plan import Plan
from sim.policies import Setting, make_policy
from sim.policies.domoe import Domoe
from sim.predictors.adaptive import objective
from sim.predictors.base import top
from sim.predictors.neighbours import Neighbours
from sim.predictors.prototypes import ITERATIONS
from sim.run.prepared import replay
from sim.run.scene import bundled_traces, scene
from sim.view import View
from sim.workload import batched, workload
from tests.sim.machine.test_prediction_costs import HOST
from tests.support.strategies import make_trace
from tests.support.worlds import World, toy_machine, toy_model, worlds
from traces.trace import Trace

FAST, HOSTED = PredictionCosts.load("fast"), PredictionCosts.parse(HOST)


def policy(setting: Setting, **values: Any) -> Domoe:
    made = make_policy("domoe", setting, values)
    assert isinstance(made, Domoe)
    return made


def world(
    domains: list[str],
    tokens: int = 3,
    *,
    layers: int = 3,
    seed: int = 0,
    software: PredictionCosts = FAST,
    batch: int = 1,
) -> World:
    """A sequence a domain, two prompt tokens and ``tokens`` decoded ones; each domain points its own way."""
    rng = np.random.default_rng(seed)
    names = sorted(set(domains))
    length, count = 2 + tokens, len(domains)
    phase = np.tile([0, 0] + [1] * tokens, count)
    lean = np.repeat([np.eye(4, dtype=int)[names.index(d)] * 40 for d in domains], length, axis=0)
    keys = (lean[:, None, :] + rng.integers(-9, 10, (count * length, layers + 1, 4))).astype(np.int8)
    routes = rng.random((count * length, layers, 6)).argsort(axis=2)[:, :, :2]
    trace = make_trace(
        routes, n_experts=6, sequence=np.repeat(np.arange(count), length), phase=phase, domain=domains,
        token=rng.integers(0, 5, count * length).astype(np.int32), embeddings=keys[phase == 1],
        prefill_embeddings=keys[phase == 0, 1], embedding_scale=np.ones(layers + 1, np.float32), split="profile",
        meta={"embedding": {"basis_sha256": "0", "dims": 4, "bits": 8, "prefill_layer": 1}},
    )  # fmt: skip
    model, machine = toy_model(layers, 6, 2, (50_000,) * layers), toy_machine()
    work = workload(trace, model, machine, batched(trace, batch))
    return World(trace, model, machine, batch, work, 900_000, software=software)


def view(here: World) -> View:
    return View(here.trace, here.work)


def asked(plan: Plan) -> list[tuple[int, int, int]]:
    assert plan.requests is not None
    moment = np.repeat(plan.requests.moment, np.diff(plan.requests.offsets))
    return list(zip(moment.tolist(), plan.requests.call.tolist(), plan.requests.expert.tolist(), strict=True))


# -- votes -------------------------------------------------------------------------------------------------------------


def brute(predictor: Neighbours, query: np.ndarray, chosen: np.ndarray, level: int, layer: int) -> np.ndarray:
    """The vote for one token and layer, from cosines of everything."""
    entries = []
    for number, table in enumerate(predictor.tables):
        key_level = {"layer": level, "entry": predictor.level, "token": 0}[predictor.keys]
        for entry in range(len(table) if chosen[number] else 0):
            key = table.keys[entry, key_level].astype(float)
            lengths = np.linalg.norm(key) * np.linalg.norm(query.astype(float))
            cosine = float(key @ query.astype(float) / lengths) if lengths else 0.0
            entries.append((cosine, table.paths[entry, layer]))
    votes = np.zeros(predictor.n_experts)
    for cosine, path in sorted(entries, key=lambda e: -e[0])[: predictor.votes]:
        for expert in path[path >= 0]:
            votes[expert] += max(0.0, cosine)
    return votes


@pytest.mark.parametrize("keys", ["layer", "entry", "token"])
@given(seed=st.integers(0, 999), votes=st.integers(1, 12))
@settings(max_examples=20)
def test_votes_are_those_of_the_nearest_entries(keys: str, seed: int, votes: int) -> None:
    here = world(["law", "code", "law"], 5, seed=seed)
    predictor = policy(here.setting, keys=keys, top_k=votes).predictor(1, 6)
    rng = np.random.default_rng(seed)
    queries = rng.integers(-60, 61, (4, 4)).astype(np.int8)
    chosen = rng.random((4, 2)) < 0.7
    for point in range(3):
        level = predictor.query_level(point)
        scores = predictor.vote(queries, chosen, level, range(point, 3))
        assert (scores.dtype, scores.shape) == (np.float32, (4, 3 - point, 6))
        for row in range(4):
            alone = predictor.vote(queries[row : row + 1], chosen[row : row + 1], level, range(point, 3))
            assert alone.tobytes() == scores[row : row + 1].tobytes(), "one row and many: the same bits"
            for layer in range(point, 3):
                expected = brute(predictor, queries[row], chosen[row], level, layer)
                # Two entries as near as rounding of keys goes may change places at the end of the line.
                if np.abs(scores[row, layer - point] - expected).max() > 2e-3:
                    more = brute(_with(predictor, votes + 1), queries[row], chosen[row], level, layer)
                    assert np.abs(more - expected).max() > 0


def _with(predictor: Neighbours, votes: int) -> Neighbours:
    return Neighbours(
        predictor.tables, predictor.matching, votes=votes, keys=predictor.keys, level=predictor.level,
        n_experts=predictor.n_experts,
    )  # fmt: skip


def test_two_entries_give_no_more_than_their_votes() -> None:
    """Seen in facebookresearch/faiss#2657, #1206, #1731:
    asking for more neighbours than there are returns -1, the last row.
    """
    here = world(["law", "code"], 1)
    predictor = policy(here.setting, top_k=4).predictor(1, 6)
    assert [(t.domain, len(t)) for t in predictor.tables] == [("code", 1), ("law", 1)]
    law = predictor.tables[1]
    scores = predictor.vote(law.keys[:, 0], np.array([[False, True]]), 0, range(3))[0]
    for layer in range(3):
        assert set(np.flatnonzero(scores[layer])) == set(law.paths[0, layer].tolist()), "no vote of the last table"
        assert scores[layer].max() == pytest.approx(1, abs=1e-3)


def test_a_query_of_zeros_predicts_nothing_and_leaves_others_as_they_were() -> None:
    """Seen in vlasky/sqlite-vec#8, HKUDS/LightRAG#3421: a vector of zeros made cosines NaN and spoilt the order."""
    here = world(["law", "code"], 4)
    assert here.trace.embeddings is not None
    blank = here.trace.embeddings.copy()
    blank[1] = 0
    spoilt = dataclasses.replace(here, trace=dataclasses.replace(here.trace, embeddings=blank), profile=here.trace)
    predictor = policy(here.setting).predictor(1, 6)
    for point in range(3):
        before = predictor.scores(view(here), point, range(point, 3))
        after = predictor.scores(view(spoilt), point, range(point, 3))
        assert not after[1].any()
        assert np.isfinite(after).all()
        assert np.delete(after, 1, 0).tobytes() == np.delete(before, 1, 0).tobytes()


def test_a_prompt_of_zeros_matches_no_table_and_its_sequence_is_served_on_demand() -> None:
    here = world(["law", "code"], 3)
    assert here.trace.prefill_embeddings is not None
    prompts = here.trace.prefill_embeddings.copy()
    prompts[:2] = 0  # the first sequence's
    blank = dataclasses.replace(
        here, trace=dataclasses.replace(here.trace, prefill_embeddings=prompts), profile=here.trace
    )
    plan = blank.plan("domoe", {"layers": "all"})
    steps = {moment // 4 for moment, _, _ in asked(plan)}
    assert steps == {5, 6, 7}, "the second sequence's decode steps alone"
    searched = plan.prediction.moment[plan.prediction.ns > 0] // 4
    assert set(searched.tolist()) <= {0, 4, 5, 6, 7}, "nothing is searched where no table is consulted"


def test_a_single_domain_is_always_its_own_and_popularity_is_plain_frequency() -> None:
    """Seen in antirez/ds4#390: a usage profile of one workload serves only that."""
    here = world(["law"] * 3, 4)
    made = policy(here.setting)
    predictor = made.predictor(1, 6)
    assert predictor.consulted(view(here).prompts(), 3).tolist() == [[True]] * 3
    values = made.plan(view(here)).values
    assert values is not None
    decode = here.trace.experts[here.trace.decode_rows]
    counts = [[int((decode[:, layer] == expert).sum()) for expert in range(6)] for layer in range(3)]
    assert values.table[values.index].tolist() == [[times for layer in counts for times in layer]]
    assert (values.table > 0).any()


# -- requests ----------------------------------------------------------------------------------------------------------


@given(
    worlds(),
    st.sampled_from(["layer", "entry", "token"]),
    st.sampled_from(["all", "every:2", "every:9"]),
    st.integers(0, 3),
    st.integers(0, 2),
)
@settings(max_examples=50)
def test_each_prediction_asks_for_the_best_experts_up_to_the_next(
    here: World, keys: str, layers: str, reach: int, fetch: int
) -> None:
    made = policy(here.setting, keys=keys, layers=layers, reach=reach, fetch=fetch, top_k=2, entries=4)
    looking = view(here)
    n_layers, n_experts = here.work.n_layers, here.work.n_experts
    predictor = made.predictor(looking.prompt_level, n_experts)
    spacing = 1 if layers == "all" else int(layers.split(":")[1])
    wanted: dict[tuple[int, int, int], int] = {}
    step = looking.step[looking.decoding].tolist()
    for point in range(0, n_layers, spacing):
        covered = range(point, min(max(point + spacing, point + reach), n_layers))
        best = top(predictor.scores(looking, point, covered), fetch or here.model.top_k)
        for row, number in enumerate(step):
            for layer in covered:
                for rank, expert in enumerate(best[row, layer - point].tolist()):
                    if expert >= 0:
                        key = (number * (n_layers + 1) + point, number * n_layers + layer, layer * n_experts + expert)
                        wanted[key] = min(rank, wanted.get(key, rank))
    expected = sorted(wanted, key=lambda k: (k[0], k[1], wanted[k], k[2]))
    assert asked(made.plan(looking)) == expected


def test_the_modes_of_the_ablation() -> None:
    here = world(["law", "code"], 6)
    tables = policy(here.setting, mode="table").plan(view(here))
    everywhere = policy(here.setting, layers="all").plan(view(here))
    assert asked(tables) == asked(everywhere)
    trajectory = policy(here.setting, mode="trajectory").plan(view(here))
    assert asked(trajectory) != asked(tables)
    assert trajectory.gpu_bytes == 2 * 2 * 18, "two requests' activation matrices of 3 x 6 numbers"
    dear = policy(dataclasses.replace(here.setting, software=_slow(FAST, 1e6)))
    assert dear.prediction_layers(1, 6, 3) == (0,), "a second a search"
    cheap = policy(dataclasses.replace(here.setting, software=_slow(FAST, 0.0)), layers="sampled")
    expected = [
        objective(layers, cheap.miss(1, 6), cheap.predict_ns, cheap.load_ns)
        for layers in (cheap.prediction_layers(1, 6, 3), (0,))
    ]
    assert expected[0] <= expected[1]


def _slow(software: PredictionCosts, us: float) -> PredictionCosts:
    figure = software.search_us.model_copy(update={"value": us})
    return software.model_copy(update={"search_us": figure})


@pytest.mark.parametrize(
    "values",
    [
        {"layers": "every:0"},
        {"layers": "some"},
        {"layers": "every:2", "mode": "table"},
        {"mode": "trajectory", "sure": 0.5},
        {"mode": "trajectory", "grow": True},
    ],
)
def test_other_layers_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"policy domoe: parameter .*; expected (adaptive, sampled|mode full)"):
        make_policy("domoe", world(["law"]).setting, values)


def test_a_profile_without_embeddings_is_refused() -> None:
    here = world(["law"])
    bare = dataclasses.replace(here.trace, embeddings=None)
    with pytest.raises(InputError, match="no trace of the profile split holds embeddings"):
        dataclasses.replace(here, profile=bare).plan("domoe")


# -- costs -------------------------------------------------------------------------------------------------------------


def charged(plan: Plan) -> dict[int, int]:
    return dict(zip(plan.prediction.moment.tolist(), plan.prediction.ns.tolist(), strict=True))


@pytest.mark.parametrize("software", [FAST, HOSTED])
@pytest.mark.parametrize(("keys", "searches"), [("layer", 3), ("entry", 3), ("token", 1)])
def test_time_and_memory_by_hand(software: PredictionCosts, keys: str, searches: int) -> None:
    # Three sequences of two domains, each matched with its own alone: prefill, two decode steps, and so on.
    here = world(["law", "code", "law"], 2, software=software)
    model, machine = here.model, here.hardware
    made = policy(here.setting, keys=keys, layers="all", tables=1)
    plan = made.plan(view(here))
    predictor = made.predictor(1, 6)
    prototypes = sum(len(p.centres) for p in predictor.matching.prototypes)
    on_gpu = software.where == "gpu"
    levels = {"layer": 3, "entry": 1, "token": 1}[keys]
    entry = (2 * levels * model.hidden + 2 * 3 * 2) if on_gpu else 0  # bf16 keys; paths of 3 layers x 2 experts
    assert [len(t) for t in predictor.tables] == [2, 4]
    assert plan.gpu_bytes == (2 * prototypes * model.hidden if on_gpu else 0) + 4 * entry
    expected = {}
    for number, (entries, load) in enumerate(((4, 4), (2, 2), (4, 4))):  # room for one table: each is loaded anew
        match = software.cluster_ns(machine, 2, model.hidden, 2, ITERATIONS)
        match += software.search_ns(machine, prototypes, model.hidden, 2)
        expected[3 * number * 4 + 1] = match + software.load_ns(machine, load * entry)
        for step in (3 * number + 1, 3 * number + 2):
            for point in range(searches):
                expected[step * 4 + point] = software.search_ns(machine, entries, model.hidden)
    assert charged(plan) == expected
    assert plan.prediction.critical
    roomy = charged(policy(here.setting, keys=keys, layers="all", tables=1, room=2).plan(view(here)))
    assert roomy[6 * 4 + 1] == match, "the third prompt's table is still there"


def test_a_batch_searches_all_that_it_consults_and_reloads_what_has_no_room() -> None:
    here = world(["law", "code"], 2, batch=2)
    made = policy(here.setting, layers="all", tables=1)
    entry = 2 * 3 * here.model.hidden + 2 * 3 * 2
    search = FAST.search_ns(here.hardware, 4, here.model.hidden, 2)
    costs = charged(made.plan(view(here)))
    # Steps: two prefills, two decode steps of both. One table fits, and each step wants two: the missing one comes.
    assert [costs[2 * 4 + point] for point in (1, 2)] == [search, search]
    assert costs[2 * 4] == costs[3 * 4] == search + FAST.load_ns(here.hardware, 2 * entry)
    both = charged(policy(here.setting, layers="all", tables=1, room=2).plan(view(here)))
    assert both[2 * 4] == both[3 * 4] == search


@pytest.mark.parametrize("software", ["fast", "paper"])
def test_a_bundled_trace_is_charged_at_the_real_models_size(software: str) -> None:
    path = next(p for p in bundled_traces() if p.name == "mixtral_banking.npz")
    here = scene(path, software=software, profile=[path])
    report = replay(here, "domoe", {"keys": "entry"})
    entries = int((Trace.load(path).select("profile").phase == 1).sum())
    size = 2 * 4096 * (entries + 16) + 2 * 32 * 2 * entries
    assert report.gpu_bytes["policy"] == (size if software == "fast" else 0)
    assert report.to_json()["time_ms"]["predict"] > 0
    assert report.to_json()["prefill"]["time_ms"]["predict"] > 0
    assert any(note.startswith(f"routing tables: banking {entries:,} of {entries:,} tokens") for note in report.notes)


@given(st.sets(st.integers(0, 4), min_size=1))
@settings(max_examples=25)
def test_the_note_says_all_layers_only_where_all_of_them_predict(points: set[int]) -> None:
    """Predictions at the first layers alone were reported as predictions at all of them."""
    here = world(["a"], layers=5)
    made = policy(here.setting)
    made.prediction_layers = lambda *_: tuple(sorted(points))  # type: ignore[method-assign]
    said = made.plan(made.view(here.trace, here.work)).note.rpartition("predictions at routed layers: ")[2]
    assert said == ("all" if len(points) == 5 else ", ".join(map(str, sorted(points))))
