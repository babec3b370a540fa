"""Every experiment on small traces: what it shows follows from its data, and its data from runs."""

import hashlib
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.contest import verdict
from analysis.experiment import Data
from analysis.experiments import EXPERIMENTS, anomalies, eviction, predictors, real_routes
from analysis.experiments import domoe_ablation as ablation
from analysis.experiments import domoe_limits as limits
from analysis.experiments import domoe_neighbours as neighbours
from analysis.experiments import domoe_overall as overall
from analysis.experiments import domoe_similarity as similarity
from analysis.options import ExperimentOptions
from analysis.pages.sheets import Sheet, interval, percent
from analysis.pages.text import markdown
from analysis.paper import DOMOE
from analysis.published import Claim, Point
from analysis.runs import Design, run, spread
from analysis.workloads import by_model
from ground.errors import InputError
from sim.machine.hardware import Hardware
from sim.policies.named import NamedPolicy
from sim.run.scene import bundled_traces
from tests.support.analysis_worlds import DOMAINS, EXPERTS, LAYERS, domain_trace, domain_traces
from tests.support.places import REPOSITORY
from tests.support.strategies import make_trace
from traces.models.known import resolve_model
from traces.trace import Trace

OF_DOMOE = {name: what for name, what in EXPERIMENTS.items() if what.paper is DOMOE}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ExperimentOptions:
    folder = domain_traces(tmp_path_factory.mktemp("traces") / "toy")
    return ExperimentOptions([folder], software=("fast", "implied"), cache="12", workers=1, entries=(2, 10, 5000))


@pytest.fixture(scope="module")
def measured(options: ExperimentOptions) -> dict[str, Data]:
    """Data of all experiments of DoMoE's report, each once."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr(anomalies, "ACCURACIES", (0.0, 0.5, 1.0))
    monkey.setattr(anomalies, "SEEDS", 2)
    monkey.setattr(eviction, "ACCURACIES", (0.5, 0.75, 1.0))
    data = {name: what.measure(options) for name, what in OF_DOMOE.items()}
    monkey.undo()
    return data


def texts(sheets: list[Sheet]) -> str:
    return "\n".join(sheet.markdown() for sheet in sheets)


@pytest.mark.parametrize("name", OF_DOMOE)
def test_tables_are_whole_and_name_no_folder(name: str, measured: dict[str, Data], options: ExperimentOptions) -> None:
    sheets = EXPERIMENTS[name].sheets(measured[name])
    assert sheets
    for sheet in sheets:
        assert sheet.rows or name == "real-routes", sheet.title
        assert {len(row) for row in sheet.rows} <= {len(sheet.columns)}, sheet.title
    assert options.traces is not None
    assert str(Path(options.traces[0]).parent) not in repr(measured[name])


def test_the_documented_experiment_of_ones_own_runs(options: ExperimentOptions) -> None:
    code = (REPOSITORY / "docs/analysis.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    module: dict[str, Any] = {"__doc__": "How fast is LRU?"}
    exec(compile(code, "lru_alone.py", "exec"), module)
    own = module["EXPERIMENT"]
    assert own.place > max(one.place for one in EXPERIMENTS.values()) and own.name not in EXPERIMENTS
    (sheet,) = own.sheets(own.measure(options))
    assert len(sheet.rows) == 3


def test_ratios_are_those_of_the_runs(measured: dict[str, Data]) -> None:
    data = measured["domoe-overall"]
    assert {c["workload"] for c in data["cells"]} == {"law", "banking", "mixed"}
    for cell in data["cells"]:
        for ratio in cell["ratios"]:
            mine, theirs = (
                cell["runs"][name] for name in (ratio["ours"], overall._beside(ratio["ours"], ratio["over"]))
            )
            if ratio["metric"] == "throughput":
                assert ratio["value"] == pytest.approx(mine["tokens_per_s"] / theirs["tokens_per_s"], rel=1e-3)
                # Two sequences: the interval is from one's ratio to the other's, and the whole lies between.
                assert ratio["low"] <= ratio["value"] <= ratio["high"]
                bound = min(theirs["compute_bound"], theirs["link_bound"])
                assert ratio["most"] == pytest.approx(bound / theirs["tokens_per_s"], rel=1e-3)
            elif ratio["value"] is not None and ratio["metric"] == "hit ratio":
                assert ratio["value"] == pytest.approx(mine["hit_ratio"] / theirs["hit_ratio"], rel=1e-3)


def test_means_are_over_workloads(measured: dict[str, Data]) -> None:
    data = measured["domoe-overall"]
    for mean in data["means"]:
        values = [
            ratio["value"]
            for cell in data["cells"]
            for ratio in cell["ratios"]
            if cell["software"] == mean["software"]
            and all(ratio[key] == mean[key] for key in ("ours", "over", "metric"))
        ]
        assert len(values) == 3, mean
        if None not in values:
            assert mean["value"] == pytest.approx(np.mean(values), abs=2e-4)


def test_fmoe_is_given_three_table_sizes_and_the_same_eviction(options: ExperimentOptions) -> None:
    by_name = {one.label: one.values for one in overall.contestants(options.models[0])}
    sizes = [values["entries"] for values in by_name.values() if "entries" in values and values["eviction"] == "score"]
    assert sizes == [2000, 4000, len(DOMAINS) * 2000]
    for ours, over in product(overall.CHOICES, overall.RIVALS["fmoe"]):
        assert by_name[ours]["eviction"] == by_name[overall._beside(ours, over)]["eviction"]


@pytest.mark.parametrize(
    ("low", "high", "most", "said"),
    [
        (1.3, 1.4, 2.0, "inside"),
        (1.1, 1.2, 2.0, "higher"),
        (1.6, 1.7, 2.0, "lower"),
        (1.0, 1.1, 1.2, "impossible"),
        (None, None, 2.0, "–"),
    ],
)
def test_verdicts(low: float | None, high: float | None, most: float, said: str) -> None:
    claim = Claim(figure="T", where="s", metric="throughput", model="m", over="fmoe", low=1.32, high=1.5)
    assert verdict(claim, {"low": low, "high": high, "most": most}) == said


def test_the_ablation_sets_each_stage_beside_the_one_before(measured: dict[str, Data]) -> None:
    for cell in measured["domoe-ablation"]["cells"]:
        for step, (one, other) in ablation.STEPS.items():
            ratio = cell["runs"][one]["tokens_per_s"] / cell["runs"][other]["tokens_per_s"]
            assert cell["steps"][step]["throughput"]["value"] == pytest.approx(ratio, rel=1e-3)


def test_tables_larger_than_the_profile_are_left_out(measured: dict[str, Data]) -> None:
    points = measured["domoe-table-size"]["points"]
    assert {p["held"] for p in points} == {36}  # six profile sequences of six decoded tokens
    assert [(p["software"], p["entries"]) for p in points] == [(s, e) for s in ("fast", "implied") for e in (2, 10)]
    by_size = {(p["software"], p["entries"]): p for p in points}
    assert by_size["fast", 2]["tables_mib"] < by_size["fast", 10]["tables_mib"]
    assert by_size["implied", 10]["predict_ms_per_token"] > 0 == by_size["implied", 10]["tables_mib"]


@given(seed=st.integers(0, 1000), count=st.integers(1, 9))
def test_nearest_are_those_of_a_sort(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = rng.integers(-3, 4, (6, 3)).astype(np.int8), rng.integers(-3, 4, (5, 3)).astype(np.int8)
    cosine, index = neighbours.nearest(keys, queries, count)
    assert index.shape == (5, min(count, 6))
    for query, near, like in zip(queries, index, cosine, strict=True):
        norms = np.linalg.norm(keys, axis=1) * np.linalg.norm(query)
        true = np.where(norms > 0, keys @ query.astype(float) / np.maximum(norms, 1e-9), 0)
        assert np.allclose(like, np.sort(true)[::-1][: len(near)], atol=1e-6)
        assert np.allclose(true[near], like, atol=1e-6)


def test_domains_that_differ_are_nearer_to_themselves(measured: dict[str, Data]) -> None:
    (entry,) = measured["domoe-neighbours"]["models"]
    assert entry["domains"] == sorted(DOMAINS)
    for what in ("cosine", "same", "voted"):
        own, other = neighbours._own_and_other(entry["matrix"][what])
        assert own > other + 0.1, what


@given(seed=st.integers(0, 1000))
def test_layer_cosines_are_means_over_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-4, 5, (7, 3, 4)).astype(np.int8)
    matrix = similarity.layer_cosines(vectors)
    for a, b in product(range(3), repeat=2):
        pairs = [
            float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
            for x, y in zip(vectors[:, a].astype(float), vectors[:, b].astype(float), strict=True)
            if x.any() and y.any()
        ]
        assert matrix[a, b] == pytest.approx(np.mean(pairs), abs=1e-5)


def test_limits_of_a_published_point_by_hand() -> None:
    machine, model = Hardware.load("l40"), resolve_model("mixtral-8x7b")
    point = Point(figure="F", where="s", model="mixtral-8x7b", at="100", tokens_per_s=1.25, hit_ratio=0.438)
    found = limits.limits(point, model, machine)
    token = 32 * 2 * 3 * 4096 * 14336 * 2  # bytes of all experts that a token takes
    link = machine.link_bytes_per_s
    assert found["streaming"] == pytest.approx(link / token)
    assert found["within_hits"] == pytest.approx(link / token / 0.562)
    assert found["unexplained_ms"] == pytest.approx(1e3 * (0.8 - 0.562 * token / link))
    assert found["gbps_streaming"] == pytest.approx(1.25 * token / 1e9)
    faster = Point(figure="F", where="s", model="mixtral-8x7b", at="x", tokens_per_s=9.0, hit_ratio=0.438)
    assert limits._verdict(limits.limits(faster, model, machine)) == "impossible"


def test_anomalies_are_pairs_where_the_more_accurate_takes_longer() -> None:
    time = np.array([[[10, 20]], [[8, 25]], [[9, 24]]])  # three accuracies of one run with two parts
    assert anomalies.anomalies(time) == {"pairs": 4, "slower": 2, "worst": 0.25}
    assert anomalies.anomalies(np.array([[[3]], [[3]], [[2]]]))["slower"] == 0


def test_eviction_rules_are_compared_on_the_same_requests(measured: dict[str, Data]) -> None:
    data = measured["eviction"]
    short, rows, accurate = EXPERIMENTS["eviction"].sheets(data)
    assert {(run["requests"], run["eviction"]) for run in data["runs"] if run["accuracy"] is None} == {
        (one.label, rule) for rule, one in eviction._contestants()
    }
    columns = list(rows.columns)
    for row in rows.rows:
        cells = dict(zip(columns, row, strict=True))
        speed = {rule: float(cells[rule].replace(",", "")) for rule in eviction.RULES[:4] if cells[rule] != "–"}
        assert speed[cells["most"]] == max(speed.values())
        assert (cells["next-use"] == "–") == (not cells["requests"].startswith(eviction.NO_PREFETCH))
    assert {(row[3], row[4]) for row in accurate.rows} == {*product(eviction.ORACLES, eviction.RULES)}
    for cache in {row[0] for row in short.rows}:
        (alone,) = (row for row in short.rows if row[:2] == [cache, eviction.NO_PREFETCH])
        speeds = [[float(row[i].replace(",", "")) for i in (4, 5)] for row in rows.rows
                  if row[1] == cache and row[3] == eviction.NO_PREFETCH]  # fmt: skip
        lru, lfu = np.array(speeds).T
        assert alone[2] == "1.00"
        assert float(alone[3]) == pytest.approx(np.exp(np.log(lfu / lru).mean()), abs=0.02)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 9))
def test_a_rule_pays_from_the_least_accuracy_above_which_all_are_faster(speeds: list[int], other: int) -> None:
    speed = {index / 10: float(value) for index, value in enumerate(speeds)}
    good = [a for a in speed if all(value > other for later, value in speed.items() if later >= a)]
    assert eviction._from(speed, float(other)) == (f"{min(good):.2f}" if good else "never")
    assert eviction._from(speed, None) == "–"


def test_predictors_are_ordered_by_what_they_know(measured: dict[str, Data]) -> None:
    (entry, *_) = measured["anomalies"]["models"]
    assert entry["mean"][0] < entry["random"] < entry["mean"][-1]
    assert entry["wasted"][0] > entry["wasted"][1] > entry["wasted"][2] == 0


def test_knowledge_of_the_own_domain_is_worth_more_than_of_others(measured: dict[str, Data]) -> None:
    judged = measured["predictors"]["judged"]
    assert {j["predictor"] for j in judged} == set(predictors.KINDS)
    for name in ("popularity", "domain tables", "one table (fmoe), 2000 entries"):
        for workload in ("law", "banking"):
            recall = {
                j["learned_from"]: j["recall"]["1"]
                for j in judged
                if (j["predictor"], j["workload"]) == (name, workload)
            }
            assert recall["own"] > recall["other"], (name, workload)


def test_mixed_work_learns_from_all_that_is_not_its_own_too(measured: dict[str, Data]) -> None:
    known = {
        j["learned_from"]
        for j in measured["predictors"]["judged"]
        if j["workload"] == "mixed" and j["predictor"] == "popularity"
    }
    assert known == {"own", "other", "pooled"}


def test_domain_tables_on_routes_by_hand(tmp_path: Path) -> None:
    def written(domain: str, experts: list[int]) -> Path:
        trace = make_trace(
            experts,
            n_experts=4,
            domain=domain,
            sequence=[0, 0, 0, 1, 1, 2, 2],
            split=["profile", "eval", "eval"],
            sequence_id=np.array([f"{domain}{i}" for i in range(3)]),
        )
        trace.save(tmp_path / f"{domain}.npz")
        return tmp_path / f"{domain}.npz"

    # Law's table names expert 0, code's expert 1, both pooled expert 1 (three times; 0 and 2 are taken less).
    paths = [written("law", [0, 0, 1, 0, 0, 0, 2]), written("code", [1, 1, 2, 1, 0, 3, 3])]
    found = real_routes.tables(by_model(paths)[0])
    assert found is not None
    assert found["tokens"] == 8 and found["chance"] == 0.25
    assert found["recall"] == {"own": 0.5, "other": 0.125, "pooled": 0.125, "previous token": 0.25}
    assert found["own_over"]["previous token"]["value"] == 2.0
    assert real_routes.tables(by_model(paths[:1])[0]) is None


def test_routes_without_embeddings_are_refused_by_those_that_need_them(tmp_path: Path) -> None:
    whole = domain_trace("law")
    bare = make_trace(
        whole.experts, n_experts=EXPERTS, sequence=whole.sequence, phase=whole.phase, domain="law",
        split=whole.split.tolist(), meta={"model": whole.meta["model"]},
    )  # fmt: skip
    bare.save(tmp_path / "law.npz")
    data = real_routes.measure(ExperimentOptions(traces=[tmp_path], cache="12", workers=1))
    (entry,) = data["replays"]
    refused = {r["policy"]: r["reason"] for r in entry["refused"]}
    assert refused["domoe"] == "the trace has no array embeddings, which it needs"
    assert {"lru", "popularity", "moe-infinity", "clairvoyant"} <= {r["policy"] for r in entry["runs"]}
    assert not set(refused) & {r["policy"] for r in entry["runs"]}


def test_published_routes_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(real_routes.VARIABLE, raising=False)
    with pytest.raises(InputError, match=real_routes.VARIABLE):
        real_routes.measure(ExperimentOptions())


def test_without_embeddings_there_is_one_line(tmp_path: Path) -> None:
    make_trace([[0, 1]] * 4, n_experts=4, sequence=[0, 0, 1, 1]).save(tmp_path / "bare.npz")
    for module in (similarity, neighbours):
        with pytest.raises(InputError, match="embeddings"):
            module.measure(ExperimentOptions(traces=[tmp_path], workers=1))


def test_two_workers_give_what_one_gives(options: ExperimentOptions) -> None:
    model = options.models[0]
    designs = [
        Design(options.place(model, sources), NamedPolicy.of(policy))
        for sources in model.workloads.values()
        for policy in ("lru", "domoe")
    ]
    one, two = (run(designs, workers) for workers in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a.to_json() == b.to_json() and a.design == b.design
        assert all(np.array_equal(vars(a.shares)[name], vars(b.shares)[name]) for name in vars(a.shares))


def test_what_a_worker_refuses_is_told(options: ExperimentOptions) -> None:
    place = options.place(options.models[0], options.models[0].workloads["law"])
    with pytest.raises(InputError, match="unknown"):
        run([Design(place, NamedPolicy(name, name)) for name in ("lru", "no-such-policy")], 2)


def test_software_named_twice_is_run_once() -> None:
    assert ExperimentOptions(software=("fast", "paper", "fast")).software == ("fast", "paper")


def test_jobs_keep_their_order() -> None:
    assert spread(abs, [-3, 1, -2], 1, "counting") == [3, 1, 2]


def test_workers_end_with_the_process_that_began_them_however_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "spreading.py"
    script.write_text(
        "from analysis.runs import spread\n"
        "if __name__ == '__main__':\n"
        "    spread(exec, ['import time; print(1, flush=True); time.sleep(999)'] * 4, 2, 'sleeping')\n"
    )
    running = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == b"1\n"
    running.kill()
    running.communicate(timeout=60)  # until nobody holds the other end of the pipe


def test_cells_are_for_people() -> None:
    assert interval({"value": 1.25, "low": 1.2, "high": 1.3}) == "1.250 [1.200, 1.300]"
    assert interval({"value": None, "low": None, "high": None}) == "–"
    assert (percent(0.25), percent(None)) == ("25.0 %", "–")


def test_toy_traces_are_what_the_tests_take_them_for() -> None:
    trace = domain_trace("law")
    assert isinstance(trace, Trace) and (trace.n_layers, trace.n_experts) == (LAYERS, EXPERTS)


def test_a_page_says_which_models_traces_are_not_bundled() -> None:
    law = next(path for path in bundled_traces() if path.name == "mixtral_law.npz")
    bundled = {"trace": law.name, "sha256": hashlib.sha256(law.read_bytes()).hexdigest(), "model": "mixtral-8x7b"}
    made = {"hardware": "l40", "cache": "25%", "seed": 0, "code": "0", "traces": [bundled]}
    what = EXPERIMENTS["domoe-matching"]
    assert "not bundled" not in markdown(what, {"models": [], "made": made})
    made["traces"] = [bundled, bundled | {"sha256": "0" * 64, "model": "phi-3.5-moe"}]
    said = markdown(what, {"models": [], "made": made})
    assert said.endswith("Those of phi-3.5-moe are captures that are not bundled.\n")


def test_predictors_refuse_a_trace_without_a_profile_before_the_work_is_spread(tmp_path: Path) -> None:
    routes = np.random.default_rng(0).random((8, 2, 4)).argsort(axis=2)[:, :, :2]
    make_trace(routes, n_experts=4, domain=["law"], split=["eval"]).save(tmp_path / "law.npz")
    with pytest.raises(InputError, match=r"^--traces .*law\.npz: no sequence of split profile; expected at least one$"):
        predictors.measure(ExperimentOptions([tmp_path], workers=2))
