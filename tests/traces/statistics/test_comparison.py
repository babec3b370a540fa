"""Statistics of routing against counts by hand, and the committed comparison against its document."""

import hashlib
import json

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.places import REPOSITORY
from tests.support.records import published
from traces.__main__ import main
from traces.assemble import assemble
from traces.statistics.comparison import behaviour, compare, replaced, tables, training_figures
from traces.trace import Trace

RECORDS = REPOSITORY / "traces" / "records"


def trace(sequences, experts=8, domains=None, name="toy", prefill=0):
    """A trace of sequences of routes (rows, K) at one layer."""
    lengths = np.array([len(rows) for rows in sequences])
    return assemble(
        meta={"schema": 1, "model": {"name": name, "experts": experts, "top_k": len(sequences[0][0])}},
        layers=[0],
        experts=np.concatenate([np.array(rows) for rows in sequences])[:, None].astype(np.int16),
        lengths=lengths,
        domain=np.array(domains or ["d"] * len(sequences)),
        sequence_id=np.array([f"{name}{i}" for i in range(len(sequences))]),
        prefill=np.full(len(sequences), prefill),
    )


def test_reuse_and_distinct_experts_by_hand():
    found = behaviour([trace([[[0, 1], [1, 2], [0, 1], [3, 4]], [[5, 6], [5, 6]]])])
    # Pairs one apart: 1 of 2, 1 of 2, 0 of 2, 2 of 2; two apart: 2 of 2, 0 of 2.
    assert found["reuse"][1] == 0.5 and found["reuse"][2] == 0.5 and found["reuse"][4] is None
    # Windows of two rows: 3, 3, 4 and 2 distinct of 4; of four rows: 5 distinct of 8.
    assert found["distinct"][2] == 12 / 16 and found["distinct"][4] == 5 / 8 and found["distinct"][8] is None
    assert (found["decode_rows"], found["sequences"], found["tables"]) == (6, 2, None)


def test_an_expert_of_none_is_neither_reused_nor_counted():
    found = behaviour([trace([[[0, -1], [0, 1], [-1, 1]]])])
    assert found["reuse"][1] == round(2 / 3, 4) and found["distinct"][2] == (2 + 2) / 8


def test_prefill_rows_do_not_count():
    rows = [[0, 1], [0, 1], [2, 3], [2, 4]]
    found = behaviour([trace([rows], prefill=2)])
    assert found["decode_rows"] == 2 and found["reuse"][1] == 0.5 and found["reuse"][2] is None


def test_even_use_has_entropy_one_and_what_popularity_gives():
    rng = np.random.default_rng(0)
    rows = [rng.permutation(8)[:2] for _ in range(20000)]
    found = behaviour([trace([rows])])
    assert found["entropy"] == pytest.approx(1, abs=1e-3) and found["top_quarter"] == pytest.approx(0.25, abs=0.01)
    assert found["reuse_by_popularity"] == pytest.approx(0.25, abs=1e-3)
    for distance in (1, 16):
        assert found["reuse"][distance] == pytest.approx(0.25, abs=0.01)
    for window in (2, 16):
        expected = 8 * (1 - 0.75**window) / (2 * window)
        assert found["distinct_by_popularity"][window] == pytest.approx(expected, abs=1e-3)
        assert found["distinct"][window] == pytest.approx(expected, abs=0.01)


def test_tables_of_the_own_domain_of_others_and_of_all():
    a, b = [[[0, 1]] * 4] * 10, [[[2, 3]] * 3] * 10
    found = behaviour([trace(a + b, domains=["a"] * 10 + ["b"] * 10)])["tables"]
    assert found == {"own": 1.0, "other": 0.0, "pooled": 0.5}  # a has more rows, so all together say 0 and 1


def record(seed, recall):
    names = ("a", "b")
    return {
        "captured": {"topology": {"name": "toy"}, "trained": {"seed": seed, "trained_tokens": 1000, "final_loss": 0.5}},
        "routing": {
            "neighbour_recall": {one: {two: recall if one == two else 0.25 for two in names} for one in names},
            "popularity_recall": dict.fromkeys(names, 0.3),
            "previous_token_recall": dict.fromkeys(names, 0.4),
            "adjacent_layer_cosine": [0.5, 0.7],
            "entropy_bits": [1.0, 2.0, 3.0],
        },
    }


def test_the_figures_of_a_training():
    found = training_figures(record(3, 0.75))
    assert (found["model"], found["seed"]) == ("toy", 3) and found["in_domain_recall"] == {"a": 0.75, "b": 0.75}
    assert found["cross_domain_recall"] == {"a": 0.25, "b": 0.25}
    assert found["entropy_bits"] == {"min": 1.0, "mean": 2.0, "max": 3.0}


def test_the_command_reads_traces_and_records_and_fills_the_document(tmp_path, capsys):
    trace([[[0, 1]] * 6] * 4).save(tmp_path / "a.npz")
    for seed in (0, 1):
        (tmp_path / f"{seed}.json").write_text(json.dumps(record(seed, 0.5 + seed / 4)))
    (tmp_path / "d.md").write_text("before\n<!-- comparison -->\nold\n<!-- end of comparison -->\nafter\n")
    out = tmp_path / "c.json"
    command = ["compare-routing", str(tmp_path / "a.npz"), "--document", str(tmp_path / "d.md"), "-o", str(out)]
    command += ["--records", str(tmp_path / "0.json"), str(tmp_path / "1.json")]
    assert main([*command, "--beside", str(tmp_path / "nothing.npz")]) == 2
    assert not out.exists() and "old" in (tmp_path / "d.md").read_text()
    assert main(command) == 0
    shown = capsys.readouterr().out
    text = (tmp_path / "d.md").read_text()
    assert text == f"before\n<!-- comparison -->\n{shown}<!-- end of comparison -->\nafter\n"
    assert "| a: own / other domains | 0.500 / 0.250 | 0.750 / 0.250 |" in shown
    assert json.loads(out.read_text())["routing"]["toy (small, trained)"]["reuse"]["1"] == 1
    with pytest.raises(InputError, match="lacks the marks"):
        replaced("no marks", json.loads(out.read_text()))


def test_the_document_shows_the_committed_figures_and_they_are_of_the_bundled_traces():
    result = json.loads((RECORDS / "comparison.json").read_text("utf-8"))
    text = (REPOSITORY / "docs" / "traces.md").read_text("utf-8")
    assert replaced(text, result) == text and tables(result) in text
    ours = [name for name in result["routing"] if "small" in name]
    bundled = {path.name: path for path in (REPOSITORY / "traces").glob("*.npz")}
    for name in ours:
        for source in result["sources"][name]:
            assert hashlib.sha256(bundled[source["file"]].read_bytes()).hexdigest() == source["sha256"]
        parts = [Trace.load(bundled[source["file"]]) for source in result["sources"][name]]
        assert json.loads(json.dumps(behaviour(parts))) == result["routing"][name]


def test_published_routes_give_the_committed_figures(tmp_path, monkeypatch):
    esft = sorted(published("deepseek_v2_lite_esft_law.npz").parent.glob("deepseek_v2_lite_esft_*.npz"))
    bundled = REPOSITORY / "traces" / "mixtral_math.npz"
    found = compare([bundled], esft, [], tmp_path / "c.json")
    committed = json.loads((RECORDS / "comparison.json").read_text("utf-8"))
    assert found["routing"]["deepseek-v2-lite"] == committed["routing"]["deepseek-v2-lite"]
