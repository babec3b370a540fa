"""Domain tables, prototypes and matching: what is kept, what follows it, and whose prompt is whose."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.predictors.domain import Domain
from sim.predictors.matching import Matching, confusion
from sim.predictors.prototypes import Prototypes, cluster, unit
from sim.predictors.table import Table, apportioned, tables
from sim.run.scene import bundled_traces
from tests.support.strategies import make_trace
from traces.trace import Trace

LEVELS, DIMS, TOP_K = 3, 4, 2


def tokens(seed: int, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids with random keys and paths."""
    rng, n = np.random.default_rng(seed), len(ids)
    keys = rng.integers(-9, 10, (n, LEVELS, DIMS)).astype(np.int8)
    return np.array(ids, np.int64), keys, rng.integers(-1, 8, (n, LEVELS - 1, TOP_K)).astype(np.int16)


streams = st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=5)


# -- tables ------------------------------------------------------------------------------------------------------------


def seats(ids: list[int], most: int) -> Counter[int]:
    """Sainte-Lague's method, place by place."""
    frequency, given_out = Counter(ids), Counter[int]()
    for _ in range(min(most, len(ids))):
        left = [token for token in frequency if given_out[token] < frequency[token]]
        given_out[min(left, key=lambda token: (-frequency[token] / (2 * given_out[token] + 1), token))] += 1
    return given_out


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(0, 30))
def test_places_go_to_tokens_in_proportion_to_their_frequency(ids: list[int], most: int) -> None:
    token = np.array(ids, np.int64)
    frequency = np.array([ids.count(t) for t in ids], np.int64)
    kept = apportioned(token, frequency, most)
    assert Counter(token[kept].tolist()) == +seats(ids, most)
    for t in set(ids):  # the earliest occurrences of each
        mine = kept[token == t]
        assert mine.tolist() == sorted(mine.tolist(), reverse=True)


@given(streams, st.integers(1, 20))
@settings(max_examples=200)
def test_appending_gives_each_token_as_many_entries_as_building_anew(parts: list[list[int]], most: int) -> None:
    grown = Table.empty("law", LEVELS, DIMS, TOP_K)
    data = [tokens(seed, part) for seed, part in enumerate(parts)]
    for part in data:
        before = grown
        grown, kept = grown.append(*part, most)
        everything = [np.concatenate([old, new])[kept] for old, new in zip(
            (before.token, before.keys, before.paths), part, strict=True)]  # fmt: skip
        for array, expected in zip((grown.token, grown.keys, grown.paths), everything, strict=True):
            np.testing.assert_array_equal(array, expected)
    whole = [np.concatenate(columns) for columns in zip(*data, strict=True)]
    anew, _ = Table.empty("law", LEVELS, DIMS, TOP_K).append(whole[0], whole[1], whole[2], most)
    assert len(grown) == min(most, sum(map(len, parts)))
    assert grown.seen == anew.seen == dict(Counter(token for part in parts for token in part))
    # The bound: the same tokens with as many entries each; where nothing was left out, the very same entries.
    if most >= sum(map(len, parts)):
        np.testing.assert_array_equal(grown.keys, anew.keys)
    assert Counter(grown.token.tolist()) == Counter(anew.token.tolist())


def test_tables_are_of_decoded_tokens_of_each_domain() -> None:
    def trace(domains: list[str], seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        rows = 3 * len(domains)
        phase = np.tile([0, 1, 1], len(domains))
        return make_trace(
            rng.integers(0, 4, (rows, 2, 1)), n_experts=4, sequence=np.repeat(np.arange(len(domains)), 3), phase=phase,
            domain=domains, token=np.arange(rows, dtype=np.int32), split="profile",
            embeddings=rng.integers(-3, 4, (2 * len(domains), 3, 2)).astype(np.int8),
            prefill_embeddings=rng.integers(-3, 4, (len(domains), 2)).astype(np.int8),
            embedding_scale=np.ones(3, np.float32),
            meta={"embedding": {"basis_sha256": "0", "dims": 2, "bits": 8, "prefill_layer": 1}},
        )  # fmt: skip

    one, two = trace(["law", "code", "law"], 1), trace(["math", "law"], 2)
    found = tables([one, two], 100)
    assert [table.domain for table in found] == ["code", "law", "math"]
    law = found[1]
    assert law.token.tolist() == [1, 2, 7, 8, 4, 5]
    assert one.embeddings is not None
    assert two.embeddings is not None
    np.testing.assert_array_equal(law.keys, np.concatenate([one.embeddings[[0, 1, 4, 5]], two.embeddings[2:]]))
    np.testing.assert_array_equal(law.paths, np.concatenate([one.experts[[1, 2, 7, 8]], two.experts[[4, 5]]]))
    assert [len(table) for table in tables([one, two], 3)] == [2, 3, 2]
    bare = make_trace([[0]], n_experts=2)
    with pytest.raises(InputError, match="no trace of the profile split holds embeddings"):
        tables([bare], 3)


# -- prototypes --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 12))
def test_clustering_is_pure_and_gives_unit_centres(seed: int, rows: int, k: int) -> None:
    points = np.random.default_rng(seed).integers(-2, 3, (rows, DIMS)).astype(np.int8)
    centres = cluster(points, k, seed)
    assert cluster(points, k, seed).tobytes() == centres.tobytes()
    directions = {tuple(np.round(row, 9)) for row in unit(points).tolist() if any(row)}
    assert len(centres) <= min(k, len(directions))
    assert (len(centres) > 0) == bool(directions)
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1)


def test_well_apart_directions_are_found() -> None:
    rng = np.random.default_rng(0)
    axes = np.eye(4) * 100
    points = np.repeat(axes, 25, axis=0) + rng.normal(0, 1, (100, 4))
    centres = cluster(np.rint(points).astype(np.int8), 4, 1)
    assert sorted((centres @ np.eye(4)).argmax(axis=1).tolist()) == [0, 1, 2, 3]
    assert (centres @ np.eye(4)).max(axis=1).min() > 0.999


def test_fewer_embeddings_than_prototypes_are_all_prototypes() -> None:
    """Seen in OSU-NLP-Group/HippoRAG#66, facebookresearch/faiss#154: clustering fewer samples than clusters aborted."""
    assert len(Prototypes.build(np.eye(3, dtype=np.int8), 8, 0).centres) == 3


def test_identical_embeddings_have_one_prototype() -> None:
    """Seen in facebookresearch/faiss#436: identical points gave fewer clusters than were asked for."""
    built = Prototypes.build(np.full((6, 3), 5, np.int8), 8, 0)
    assert built.centres.tolist() == pytest.approx(np.full((1, 3), 3**-0.5))
    assert built.distance(np.full((2, 3), 1, np.int8)) == pytest.approx(0, abs=1e-12)


def test_zeros_have_no_direction_and_what_is_not_finite_is_refused() -> None:
    """Seen in langchain-ai/langchain#31822: embeddings of NaN pass, and the index then answers -1.
    And vlasky/sqlite-vec#8, HKUDS/LightRAG#3421: a vector of zeros made cosines NaN and spoilt the order.
    """
    assert cluster(np.zeros((4, 3), np.int8), 2, 0).shape == (0, 3)
    with_zeros = np.array([[0, 0], [3, 0], [0, 0], [0, 4]], np.int8)
    assert sorted(cluster(with_zeros, 4, 0).tolist()) == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="row 1 of the embeddings is not finite"):
        cluster(np.array([[1.0, 0.0], [np.nan, 1.0]]), 2, 0)


@given(st.integers(0, 99), st.integers(1, 10), st.integers(0, 10))
def test_prototypes_are_the_means_of_what_they_stand_for(seed: int, gone: int, come: int) -> None:
    rng = np.random.default_rng(seed)
    first = rng.integers(-9, 10, (60, DIMS)).astype(np.int8)
    new = rng.integers(-9, 10, (come, DIMS)).astype(np.int8)
    start = Prototypes.build(first, 3, seed)
    after = start.changed(first[:gone], new, np.concatenate([first[gone:], new]), 3, seed)
    nearest = [(unit(points) @ start.centres.T).argmax(axis=1) for points in (first[gone:], new)]
    members, points = np.concatenate(nearest), unit(np.concatenate([first[gone:], new]))
    for centre in range(len(start.centres)):
        total = points[members == centre].sum(axis=0)
        if np.abs(total).max(initial=0) > 1e-6:
            np.testing.assert_allclose(after.centres[centre], total / np.linalg.norm(total), atol=1e-6)


def test_prototypes_of_a_full_table_are_clustered_anew_once_a_quarter_has_come() -> None:
    rng = np.random.default_rng(0)
    now = rng.integers(-9, 10, (60, DIMS)).astype(np.int8)
    found = Prototypes.build(now, 3, 0)
    times = []
    for _ in range(8):  # four leave and four come: the table stays as large as it was
        new = rng.integers(-9, 10, (4, DIMS)).astype(np.int8)
        gone, now = now[:4], np.concatenate([now[4:], new])
        found = found.changed(gone, new, now, 3, 0)
        times.append(found.times)
    assert times == [1, 1, 1, 2, 2, 2, 2, 3], "16 of 60 are more than a quarter"


@cache
def real() -> dict[str, Trace]:
    found = {
        str(t.domain[0]): t for t in map(Trace.load, bundled_traces()) if t.meta["model"]["name"] == "mixtral-8x7b"
    }
    return {domain: found[domain] for domain in ("banking", "code", "counselling", "law", "math")}


@pytest.mark.parametrize("most", [300, 2000])
@pytest.mark.parametrize("domain", ["law", "code"])
def test_maintained_prototypes_stay_within_a_tenth_of_rebuilt_ones(domain: str, most: int) -> None:
    trace = real()[domain].select("profile")
    assert trace.embeddings is not None
    rows, level = trace.decode_rows, 16
    data = trace.token[rows].astype(np.int64), trace.embeddings, trace.experts[rows]
    first = len(rows) // 2
    empty = Table.empty(domain, *trace.embeddings.shape[1:], trace.top_k)
    start, _ = empty.append(*(part[:first] for part in data), most)
    grown = Domain.build(start, level, most, 16)
    for begin in range(first, len(rows), 60):
        grown = grown.append(*(part[begin : begin + 60] for part in data))
        anew, _ = empty.append(*(part[: begin + 60] for part in data), most)
        rebuilt = Domain.build(anew, level, most, 16)
        entries = rebuilt.table.keys[:, level]
        assert grown.prototypes.distance(entries) <= 1.1 * rebuilt.prototypes.distance(entries)


# -- matching ----------------------------------------------------------------------------------------------------------


def prototypes(*centres: list[list[int]]) -> list[Prototypes]:
    return [Prototypes.build(np.array(c, np.int8).reshape(-1, 2), 8, 0) for c in centres]


PROMPT = np.array([[100, 0], [0, 100]], np.int8)


def test_the_two_readings_rank_differently() -> None:
    # One domain agrees with the prompt's first half fully and with the other not at all; another with both somewhat.
    domains = prototypes([[100, 0]], [[80, 60]])
    mean, largest = (Matching(domains, 2, reading).scores(PROMPT).tolist() for reading in ("A", "B"))
    assert mean == pytest.approx([0.5, 0.7])
    assert largest == pytest.approx([1.0, 0.8])


@given(st.integers(0, 999), st.sampled_from(["A", "B"]))
def test_scores_are_the_formula(seed: int, reading: str) -> None:
    rng = np.random.default_rng(seed)
    domains = [Prototypes.build(rng.integers(-9, 10, (6, DIMS)).astype(np.int8), 3, 0) for _ in range(4)]
    prompt = rng.integers(-9, 10, (7, DIMS)).astype(np.int8)
    matching = Matching(domains, 3, reading)  # type: ignore[arg-type]
    centres = cluster(prompt, 3, 0)
    for domain, score in zip(domains, matching.scores(prompt), strict=True):
        cosines = [[float(c @ p) for p in domain.centres] for c in centres]
        strongest = [max(row) for row in cosines]
        assert score == pytest.approx(sum(strongest) / len(strongest) if reading == "A" else max(strongest))
    assert matching.scores(prompt).tobytes() == Matching(domains, 3, reading).scores(prompt).tobytes()  # type: ignore[arg-type]


def test_the_margin_decides_whether_more_than_the_best_is_consulted() -> None:
    domains = prototypes([[100, 0]], [[80, 60]], [[-100, 0]])
    scores = Matching(domains, 2).scores(PROMPT)
    assert scores.tolist() == pytest.approx([0.5, 0.7, -0.5])
    for most, margin, expected in ((2, 0.19, [1]), (2, 0.21, [1, 0]), (3, 2.0, [1, 0, 2]), (1, 2.0, [1]), (2, 0, [1])):
        assert Matching(domains, 2, "A", most, margin).consulted(PROMPT).tolist() == expected


def test_prompts_without_direction_match_nothing_and_there_is_no_table_of_all() -> None:
    """Seen in vlasky/sqlite-vec#8, HKUDS/LightRAG#3421: a vector of zeros made cosines NaN and spoilt the order."""
    domains = prototypes([[100, 0]], [[80, 60]])
    for prompt in (np.zeros((3, 2), np.int8), np.zeros((0, 2), np.int8)):
        assert Matching(domains, 2).consulted(prompt).tolist() == []
    assert Matching(prototypes([], [[1, 1]]), 2).consulted(PROMPT).tolist() == [1], "a domain without entries"


def test_a_tie_goes_to_the_first_domain() -> None:
    assert Matching(prototypes([[1, 1]], [[2, 2]]), 2, "A", 1).consulted(PROMPT).tolist() == [0]


def test_confusion_counts_every_prompt_once() -> None:
    found = tables([trace.select("profile") for trace in real().values()], 2000)
    matching = Matching([Domain.build(t, 16, 2000, 16).prototypes for t in found], 8, margin=0.05)
    for domain, trace in real().items():
        counts = confusion(matching, [t.domain for t in found], trace.select("eval"))
        assert list(counts) == [domain]
        best, consulted = counts[domain]
        assert best.sum() == trace.select("eval").n_sequences
        assert (consulted >= best).all()
        assert consulted.sum() <= 2 * best.sum()
