"""ExpertFlow's experiments on two small data sets: what they show follows from runs, and intervals from their draws."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from analysis import jackknife, services
from analysis.bootstrap import Ratio
from analysis.entries import having
from analysis.experiment import Data
from analysis.experiments import (
    EXPERIMENTS,
    expertflow_conditions,
    expertflow_hits,
    expertflow_parts,
    expertflow_rivals,
    expertflow_scheduler,
)
from analysis.expertflow import ENGINE, OURS, ratio, way
from analysis.jackknife import compared, fought
from analysis.options import ExperimentOptions
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.runs import Design, scene_at
from analysis.services import Way, designs
from sim.policies.named import NamedPolicy
from sim.run.prepared import replay
from sim.run.scene import SceneOptions
from tests.support.analysis_worlds import SWITCH, domain_trace, domain_traces, predicted_trace, predicted_traces

OF_EXPERTFLOW = {name: what for name, what in EXPERIMENTS.items() if what.paper is EXPERTFLOW}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ExperimentOptions:
    return ExperimentOptions(
        [predicted_traces(tmp_path_factory.mktemp("traces") / "switch")], hardware="a40", workers=1
    )


@pytest.fixture(scope="module", autouse=True)
def few_places() -> Iterator[None]:
    """Fewer places, draws and ways than a report has."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr(services, "SLOTS", (4, 16))
    monkey.setattr(services, "BATCHES", (4, 32))
    monkey.setattr(jackknife, "DRAWS", 2)
    monkey.setattr(expertflow_hits, "SLOTS", (4, 8, 16))
    monkey.setattr(expertflow_scheduler, "SLOTS", (16,))
    monkey.setattr(expertflow_parts, "BATCHES", (32,))
    monkey.setattr(expertflow_rivals, "SLOTS", (4,))
    monkey.setattr(expertflow_rivals, "ACCURACIES", (0.0, 0.5, 1.0))
    monkey.setattr(expertflow_conditions, "ACCURACIES", (0.5, 1.0))
    yield
    monkey.undo()


@pytest.fixture(scope="module")
def measured(options: ExperimentOptions) -> dict[str, Data]:
    return {name: what.measured(options) for name, what in OF_EXPERTFLOW.items()}


@pytest.mark.parametrize("name", OF_EXPERTFLOW)
def test_tables_are_whole(name: str, measured: dict[str, Data], options: ExperimentOptions) -> None:
    sheets = OF_EXPERTFLOW[name].sheets(measured[name])
    assert sheets
    for sheet in sheets:
        assert {len(row) for row in sheet.rows} <= {len(sheet.columns)}, sheet.title
    assert options.traces is not None
    assert str(Path(options.traces[0]).parent) not in repr(measured[name])


def test_a_service_is_a_data_set_of_the_predictors_own_or_of_another(options: ExperimentOptions) -> None:
    own, other = services.services(options)
    assert (own.data, own.in_domain, other.data, other.in_domain) == ("translation", True, "summaries", False)
    assert (own.slots, own.batches, own.sequences) == ((4, 16), (4, 32), 64)
    place = own.place(options, 4, 32)
    assert (place.batch, scene_at(place).budget) == (32, 4 * sum(scene_at(place).model.expert_bytes))


def test_traces_without_predictions_take_turns(tmp_path: Path) -> None:
    (service,) = services.services(ExperimentOptions([domain_traces(tmp_path / "toy")]))
    assert (service.data, service.in_domain, len(service.sources), service.sequences) == ("mixed", None, 4, 8)
    assert way(service).scene["foreseen"] == 0.9


def test_claims_stand_beside_ratios_of_their_place(measured: dict[str, Data]) -> None:
    rows = OF_EXPERTFLOW["expertflow-throughput"].sheets(measured["expertflow-throughput"])[0].rows
    row = next(row for row in rows if row[:3] == [SWITCH, "se-moe", "16 / 32"])
    (cell,) = having(measured["expertflow-throughput"]["cells"], slots=16, batch=32, in_domain=True)
    mine, over = (cell["runs"][name]["tokens_per_s"] for name in (OURS, "se-moe"))
    found = ratio(cell, OURS, "se-moe")
    assert found["value"] == pytest.approx(mine / over, rel=1e-3) and found["low"] <= found["value"] <= found["high"]
    assert row[3] == "2.01" and row[4].startswith(f"{found['value']:.3f}")


def test_runs_are_those_of_a_plain_replay(measured: dict[str, Data], options: ExperimentOptions) -> None:
    own, _ = services.services(options)
    (cell,) = having(measured["expertflow-throughput"]["cells"], slots=4, batch=4, in_domain=True)
    alone = replay(scene_at(own.place(options, 4, 4)), "expertflow")
    assert cell["runs"][ENGINE]["tokens_per_s"] == pytest.approx(alone.tokens_per_s, rel=1e-4)


def bout(place: jackknife.Place, *policies: str) -> dict[str, Design]:
    return designs(place, {text: Way.of(text) for text in policies})


def test_a_design_over_itself_is_one_without_doubt(options: ExperimentOptions) -> None:
    place = services.services(options)[0].place(options, 4, 4)
    (ran,) = fought([bout(place, "lru", "expertflow")], 1, "test")
    assert compared("throughput", ran["lru"], ran["lru"]) == Ratio(1.0, 1.0, 1.0)
    wide = compared("throughput", ran["expertflow"], ran["lru"])
    assert wide.low is not None and wide.high is not None and wide.value is not None
    assert wide.low < wide.value < wide.high and wide.low * wide.high == pytest.approx(wide.value**2)
    assert compared("throughput", None, ran["lru"]) == Ratio(None)


def test_draws_hold_three_quarters_of_the_sequences_each_once(options: ExperimentOptions) -> None:
    place = services.services(options)[0].place(options, 4, 4)
    whole = jackknife._scene(place, None).trace
    drawn = [jackknife._scene(place, number).trace for number in range(3)]
    for one in drawn:
        ids = one.sequence_id.tolist()
        assert len(set(ids)) == len(ids) == 48 and set(ids) <= set(whole.sequence_id.tolist())
    assert len({tuple(one.sequence_id.tolist()) for one in drawn}) == len({one.sha256 for one in drawn}) == 3
    assert drawn[0].sha256 != whole.sha256


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_an_oracle_is_right_as_often_as_it_says(options: ExperimentOptions, accuracy: float) -> None:
    place = services.services(options)[0].place(options, 16, 4, foreseen=accuracy)
    trace = jackknife._scene(place, None).trace
    assert trace.predicted_experts is not None
    assert (trace.predicted_experts == trace.experts).mean() == pytest.approx(accuracy, abs=0.05)
    assert len(np.unique(trace.predicted_experts[:, :, 0])) > 20  # wrong ones are any
    misses = replay(jackknife._scene(place, None), "expertflow").decode.misses
    assert (misses == 0) == (accuracy == 1)


def test_an_oracle_names_no_expert_twice(tmp_path: Path) -> None:
    trace = jackknife._foreseen(domain_trace("law"), 0.5, 0)
    assert trace.predicted_experts is not None and trace.predicted_experts.shape == trace.experts.shape
    ids = np.sort(trace.predicted_experts, axis=2)
    assert (ids[:, :, 1:] > ids[:, :, :-1]).all()
    right = (trace.predicted_experts[:, :, :, None] == trace.experts[:, :, None]).any(axis=3).mean()
    assert right == pytest.approx(0.5, abs=0.05)


def test_a_cache_that_is_too_small_is_left_out(options: ExperimentOptions) -> None:
    place = services.services(options)[0].place(options, 4, 4)
    design = Design(place, NamedPolicy("a pool a layer", "lru", {"scope": "layer"}))
    few = SceneOptions(place.traces, hardware="a40", cache="1", batch=4, profile=place.profile)
    (ran,) = fought([{"fits": design, "not": Design(few, design.policy)}], 1, "test")
    assert ran["fits"] is not None and ran["not"] is None


@pytest.mark.parametrize("slots", [4, 16])
def test_lru_one_by_one_is_plain_lru_where_a_token_takes_one_expert(options: ExperimentOptions, slots: int) -> None:
    alone = services.services(options)[0].place(options, slots, 1)
    hits = replay(scene_at(alone), "lru", {"scope": "layer"}).decode.hit_ratio
    assert expertflow_hits.one_by_one(scene_at(alone).work, slots) == pytest.approx(hits, abs=1e-4)


def test_lru_one_by_one_forgets_what_a_batch_still_needs(options: ExperimentOptions) -> None:
    place = services.services(options)[0].place(options, 4, 32)
    hits = replay(scene_at(place), "lru", {"scope": "layer"}).decode.hit_ratio
    assert hits is not None and expertflow_hits.one_by_one(scene_at(place).work, 4) < hits


def test_the_predictor_is_judged_by_what_the_trace_holds(measured: dict[str, Data]) -> None:
    judged = measured["expertflow-accuracy"]["judged"]
    (own,) = having(judged, data="translation", guess="predictor")
    trace = predicted_trace("translation", "translation")
    rows = trace.row_split("eval")
    assert trace.predicted_experts is not None
    right = (trace.predicted_experts[rows][:, :, :1] == trace.experts[rows]).mean()
    assert own["token"] == pytest.approx(float(right), abs=1e-4) and 0.7 < own["token"] < 0.8
    assert "token" not in having(judged, data="translation", guess="TLP")[0]  # no token ids


def test_pays_from_is_the_least_accuracy_above_which_none_is_slower() -> None:
    def cell(speeds: list[float]) -> Data:
        runs = {expertflow_rivals._oracle(a): {"tokens_per_s": s} for a, s in zip((0.0, 0.5, 1.0), speeds, strict=True)}
        return {"runs": runs | {name: {"tokens_per_s": 2.0} for name in expertflow_rivals.RIVALS}}

    assert expertflow_rivals.pays_from(cell([1.0, 3.0, 4.0])) == 0.5
    assert expertflow_rivals.pays_from(cell([3.0, 1.0, 4.0])) == 1.0
    assert expertflow_rivals.pays_from(cell([3.0, 3.0, 3.0])) == 0.0
    assert expertflow_rivals.pays_from(cell([3.0, 3.0, 2.0])) is None


def test_a_rival_that_copies_back_is_slower(measured: dict[str, Data]) -> None:
    cells = measured["expertflow-throughput"]["cells"]
    for cell in cells:
        assert cell["runs"]["cache-moe, code"]["tokens_per_s"] <= cell["runs"]["lru"]["tokens_per_s"]


def test_memory_of_slots_grows_by_what_a_slot_of_every_layer_takes(measured: dict[str, Data]) -> None:
    (one,) = measured["expertflow-memory"]["models"]
    assert one["expert_bytes"] == 32 * one["slot_bytes"] == 12 * 32 * 9437184  # both stacks
    assert one["kv_bytes"] < one["kv_bytes_in_flight"]


def test_domoe_stands_beside_expertflow_where_traces_hold_embeddings(tmp_path: Path) -> None:
    experiment = OF_EXPERTFLOW["expertflow-domoe"]
    data = experiment.measured(ExperimentOptions([domain_traces(tmp_path / "toy")], hardware="a40", workers=1))
    assert [cell["batch"] for cell in data["cells"]] == [1, 4]
    for sheet in experiment.sheets(data):
        place = [sheet.columns.index(name) for name in ("domoe", "domoe, best", "lru, a layer")]
        assert len(sheet.rows) == 2 and "–" not in {row[column] for row in sheet.rows for column in place}


def test_published_hits_fit_what_the_paper_says_of_their_differences() -> None:
    hits = {(p.at, p.slots, p.batch): p.hit_ratio or 0.0 for p in expertflow().points("hits")}
    assert hits["PLEC", 16, 4] - hits["PLEC", 16, 16] == pytest.approx(0.0605)
    assert hits["LRU", 16, 4] - hits["LRU", 16, 16] == pytest.approx(0.1824)
    assert {(at, slots, batch) for at, slots, batch in hits} == {
        (at, *place) for at in ("PLEC", "LRU") for place in ((16, 4), (16, 16), (8, 16))
    }


def test_levels_carry_half_of_their_interval(options: ExperimentOptions) -> None:
    place = services.services(options)[0].place(options, 4, 4)
    (ran,) = fought([bout(place, "lru")], 1, "test")
    assert ran["lru"] is not None
    drawn = [draw["hit ratio"] or 0.0 for draw in ran["lru"].draws]
    found = jackknife.level("hit ratio", ran["lru"])
    assert found["plus_minus"] == pytest.approx(2.776 * np.sqrt(3) * np.std(drawn, ddof=1), abs=1e-4)
