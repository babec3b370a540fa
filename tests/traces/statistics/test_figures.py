"""The statistics of routing that are published of released models, against plain loops and counts by hand."""

from itertools import combinations
from math import inf, log2, nan

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.strategies import make_trace, traces
from traces.schema import DECODE, PREFILL
from traces.statistics.domain_use import divergence, evenness, most_over_least, own_over_other
from traces.statistics.figures import PHASES, figures, parting
from traces.statistics.repetition import repetition, repetition_at_random
from traces.statistics.usage import chances, domain_shares, reuse, reuse_by_popularity
from traces.trace import Trace


def rows_of(trace, phase, domain):
    """(row, ids by layer) of a domain's rows of a phase."""
    return [
        (row, trace.experts[row].tolist())
        for row in range(trace.n_rows)
        if trace.phase[row] == phase and trace.domain[trace.sequence[row]] == domain
    ]


def plain_repetition(trace, phase, choices):
    """[domain][layer], a pair at a time."""
    found = []
    for domain in sorted(set(trace.domain.tolist())):
        rows = dict(rows_of(trace, phase, domain))
        found.append([])
        for layer in range(trace.n_layers):
            same = pairs = 0
            for row, ids in rows.items():
                if row - 1 not in rows or trace.sequence[row] != trace.sequence[row - 1]:
                    continue
                before = {e for e in rows[row - 1][layer][:choices] if e >= 0}
                now = {e for e in ids[layer][:choices] if e >= 0}
                if before and now:
                    pairs += 1
                    same += bool(before & now)
            found[-1].append(same / pairs if pairs else nan)
    return found


def plain_shares(trace, phase):
    """[domain][layer][expert], an activation at a time."""
    found = []
    for domain in sorted(set(trace.domain.tolist())):
        rows = rows_of(trace, phase, domain)
        if not rows:
            continue
        counts = [[0] * trace.n_experts for _ in range(trace.n_layers)]
        for _, ids in rows:
            for layer, taken in enumerate(ids):
                for expert in taken:
                    if expert >= 0:
                        counts[layer][expert] += 1
        found.append([[count / max(1, sum(layer)) for count in layer] for layer in counts])
    return found


def bits(share):
    return -sum(p * log2(p) for p in share if p > 0)


def plain_divergence(shares):
    values = [
        bits([(p + q) / 2 for p, q in zip(one, other, strict=True)]) - (bits(one) + bits(other)) / 2
        for a, b in combinations(shares, 2)
        for one, other in zip(a, b, strict=True)
        if sum(one) and sum(other)
    ]
    return sum(values) / len(values) if values else nan


def plain_own_over_other(shares, top_k):
    own, other = [], []
    for a, asked in enumerate(shares):
        for b, learned in enumerate(shares):
            for asked_layer, learned_layer in zip(asked, learned, strict=True):
                table = sorted(range(len(learned_layer)), key=lambda e: (-learned_layer[e], e))[:top_k]
                (own if a == b else other).append(sum(asked_layer[e] for e in table))
    if not other:
        return nan
    return inf if not sum(other) else (sum(own) / len(own)) / (sum(other) / len(other))


def plain_reuse(trace, phase):
    """By layer: the share of activations whose expert the row before took, and what popularity alone gives of it."""
    again, alone = [], []
    rows = [row for row in range(trace.n_rows) if trace.phase[row] == phase]
    for layer in range(trace.n_layers):
        found = used = 0
        taken = [[e for e in trace.experts[row, layer].tolist() if e >= 0] for row in rows]
        for at in range(1, len(rows)):
            if rows[at] - 1 == rows[at - 1] and trace.sequence[rows[at]] == trace.sequence[rows[at - 1]]:
                used += len(taken[at])
                found += sum(e in taken[at - 1] for e in taken[at])
        again.append(found / used if used else nan)
        routed = max(1, sum(bool(ids) for ids in taken))
        chance = [sum(e in ids for ids in taken) / routed for e in range(trace.n_experts)]
        alone.append(sum(p * p for p in chance) / (sum(chance) or 1))
    return again, alone


def plain_use(shares):
    """Entropy over the most possible, and most over least used, by layer."""
    even, spread = [], []
    for layers in zip(*shares, strict=True):
        used = [sum(column) for column in zip(*layers, strict=True)]
        total = sum(used) or 1
        even.append(bits([p / total for p in used]) / log2(len(used)))
        spread.append(max(used) / min(used) if min(used) else inf)
    return even, spread


@given(traces(prefill=None))
@settings(max_examples=60)
def test_every_statistic_is_what_plain_loops_count(trace: Trace) -> None:
    for phase in PHASES.values():
        for choices in (1, min(2, trace.top_k)):
            assert repetition(trace, phase, choices) == pytest.approx(
                np.array(plain_repetition(trace, phase, choices)), nan_ok=True
            )
        again, alone = plain_reuse(trace, phase)
        assert reuse(trace, 1, phase) == pytest.approx(np.array(again), nan_ok=True)
        chance = chances(trace.experts[trace.phase == phase], trace.n_experts)
        assert reuse_by_popularity(chance) == pytest.approx(np.array(alone))
        expected, found = plain_shares(trace, phase), domain_shares(trace, phase)
        assert found.shape == (len(expected), trace.n_layers, trace.n_experts)
        if not expected:
            continue
        assert found == pytest.approx(np.array(expected))
        even, spread = plain_use(expected)
        assert evenness(found) == pytest.approx(np.array(even))
        assert most_over_least(found) == pytest.approx(np.array(spread))
        assert divergence(found) == pytest.approx(plain_divergence(expected), abs=1e-12, nan_ok=True)


@given(traces(prefill=None))
@settings(max_examples=60)
def test_activations_in_the_own_table_over_those_in_another_are_what_plain_loops_count(trace: Trace) -> None:
    share = np.round(domain_shares(trace), 3)  # equal shares are equal in both, whatever the order of adding
    expected = plain_own_over_other(share.tolist(), trace.top_k)
    assert own_over_other(share, trace.top_k) == pytest.approx(expected, nan_ok=True)


@given(traces())
@settings(max_examples=60)
def test_figures_are_finite_or_none_and_those_of_the_functions(trace: Trace) -> None:
    for name, found in figures(trace).items():
        if found is None:
            assert not (trace.experts[trace.phase == PHASES[name]] >= 0).any()
            continue
        flat = [value for each in found.values() if isinstance(each, dict) for value in each.values()]
        numbers = [number for value in flat for number in (value if isinstance(value, list) else [value])]
        assert all(number is None or np.isfinite(number) for number in numbers)
        assert 0 <= found["entropy"]["least"] <= found["entropy"]["mean"] <= 1
        by_layer = {number: found["first_repeated"][number] for number in map(str, trace.layers.tolist())}
        known = [value for value in by_layer.values() if value is not None]
        assert found["first_repeated"]["highest"] == (max(known) if known else None)


def test_the_first_and_the_second_choice_by_hand() -> None:
    # Second after first; nothing; first after first. A prompt's last row and the first one decoded are no pair.
    rows = [[0, 1], [2, 0], [3, 1], [3, 0], [3, 0], [3, 2]]
    trace = make_trace(rows, n_experts=4, phase=[PREFILL] * 4 + [DECODE] * 2)
    assert repetition(trace, PREFILL, 1).tolist() == [[1 / 3]]
    assert repetition(trace, PREFILL, 2).tolist() == [[2 / 3]]
    assert repetition(trace, DECODE, 1).tolist() == [[1.0]]


def test_at_random_eight_experts_repeat_as_the_paper_says() -> None:
    assert repetition_at_random(8, 1) == 0.125
    assert round(repetition_at_random(8, 2), 2) == 0.46
    rng = np.random.default_rng(0)
    trace = make_trace(rng.random((20000, 8)).argsort(axis=1)[:, :2], n_experts=8)
    for choices in (1, 2):
        assert repetition(trace, DECODE, choices).item() == pytest.approx(repetition_at_random(8, choices), abs=0.01)


def parted(trace, phase=None):
    """Divergence and own over other, without what chance gives."""
    return [found["mean"] for found in parting(trace, phase).values()]


def test_domains_that_share_no_expert_part_by_one_bit_and_equal_ones_not_at_all() -> None:
    apart = make_trace([[0, 1], [0, 1], [2, 3]], n_experts=4, sequence=[0, 0, 1], domain=["a", "b"])
    assert parted(apart) == [1.0, None]
    # Domains count alike, though a has twice the rows of b.
    assert figures(apart)["decode"]["entropy"] == {"least": 1.0, "mean": 1.0}
    alike = make_trace([[0, 1], [0, 1], [0, 1]], n_experts=4, sequence=[0, 0, 1], domain=["a", "b"])
    assert parted(alike) == [0.0, 1.0]
    half = make_trace([[0, 1], [1, 2]], n_experts=4, sequence=[0, 1], domain=["a", "b"])
    assert parted(half)[1] == 2.0 and parted(half, PREFILL) == [None, None]


def test_what_chance_parts_is_all_of_it_where_domains_do_not_differ_and_little_where_they_do() -> None:
    rng = np.random.default_rng(0)
    where = {"n_experts": 8, "sequence": np.repeat([0, 1], 1000), "domain": ["a", "b"]}
    routes = rng.random((2000, 20, 8)).argsort(axis=2)[:, :, :2]
    divergences = parting(make_trace(routes, **where))["divergence"]
    assert divergences["mean"] == pytest.approx(divergences["random"], rel=0.5) and 0 < divergences["random"] < 0.002
    first = routes[:, :, :1] // 2  # experts 0 to 3
    first[1000:] += 4
    found = parting(make_trace(first, **where))
    assert found["divergence"]["mean"] == 1.0 and found["divergence"]["random"] < 0.01
    assert 1 <= found["own_over_other"]["random"] < 1.3 and found["own_over_other"]["mean"] is None


def test_reuse_is_of_the_phase_asked_for_and_popularity_alone_explains_independent_rows() -> None:
    rows = [[0], [0], [1], [2], [2], [2]]
    trace = make_trace(rows, n_experts=4, phase=[PREFILL] * 3 + [DECODE] * 3)
    assert reuse(trace, 1, PREFILL).tolist() == [0.5] and reuse(trace, 1, DECODE).tolist() == [1.0]
    # Of two experts, one taken by 3 rows of 4, the other by 1: 9/16 + 1/16.
    assert reuse_by_popularity(np.array([[0.75, 0.25]])).tolist() == [0.625]
    rng = np.random.default_rng(0)
    even = make_trace(rng.choice(4, (20000, 1), p=[0.7, 0.1, 0.1, 0.1]), n_experts=4)
    assert figures(even)["decode"]["reuse_over_popularity"]["mean"] == pytest.approx(1, abs=0.02)
