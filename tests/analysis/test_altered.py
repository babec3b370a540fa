"""Policies under other terms, and the experiments that exchange parts of DoMoE and its rivals."""

import dataclasses
from pathlib import Path

import pytest

from analysis.altered import Altered, replayed_altered
from analysis.experiment import Data
from analysis.experiments import domoe_code as conditions
from analysis.experiments import domoe_parts as parts
from analysis.experiments import domoe_two_by_two as exchanged
from analysis.options import IMPLIED, ExperimentOptions
from analysis.runs import Design, replayed_design
from sim.policies.named import NamedPolicy
from sim.run.prepared import prepare, replay
from sim.run.scene import scene_of
from tests.support.analysis_worlds import domain_traces


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ExperimentOptions:
    folder = domain_traces(tmp_path_factory.mktemp("traces") / "toy")
    return ExperimentOptions([folder], software=("fast",), cache="12", workers=1)


def law(options: ExperimentOptions, software: str = "fast") -> tuple[Design, Design]:
    """A place for two designs: policies are put in their place."""
    place = options.place(options.models[0], options.models[0].workloads["law"], software)
    return Design(place, NamedPolicy("domoe", "domoe")), Design(place, NamedPolicy("fmoe", "fmoe"))


def test_a_policy_that_evicts_as_itself_is_itself(options: ExperimentOptions) -> None:
    for design in law(options):
        same = Altered("same", design.policy.name, evicts_as=design.policy)
        altered = replayed_altered(dataclasses.replace(design, policy=same)).report
        assert altered.to_json() == replayed_design(design).report.to_json()
        assert replayed_altered(design).report.to_json() == altered.to_json(), "and one that is not altered"


def test_requests_stay_and_eviction_is_the_others(options: ExperimentOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    domoe, fmoe = law(options)
    here = scene_of(domoe.scene)
    mine, other = (prepare(here, name).plan for name in ("domoe", "fmoe"))
    seen = []
    run = type(prepare(here, "lru"))
    whole = run.execute
    monkeypatch.setattr(run, "execute", lambda self, **more: seen.append(self) or whole(self, **more))
    replayed_altered(dataclasses.replace(domoe, policy=Altered("x", "domoe", evicts_as=fmoe.policy)))
    (ran,) = seen
    assert mine.requests is not None and ran.plan.requests is not None and other.values is not None
    assert ran.plan.requests.expert.tolist() == mine.requests.expert.tolist()
    assert ran.plan.values.table.tolist() == other.values.table.tolist() != mine.values.table.tolist()
    assert ran.plan.gpu_bytes == mine.gpu_bytes
    assert ran.terms.slots == prepare(here, "domoe").terms.slots


def test_another_order_of_the_link_is_the_runs(options: ExperimentOptions) -> None:
    domoe, _ = law(options)
    ordered = dataclasses.replace(domoe, policy=Altered("x", "domoe", discipline="fifo"))
    expected = replay(scene_of(domoe.scene), "domoe", discipline="fifo")
    assert replayed_altered(ordered).report.to_json() == expected.to_json()


@pytest.fixture(scope="module")
def swapped(options: ExperimentOptions) -> Data:
    return exchanged.measure(options)


def test_parts_multiply_to_the_whole(swapped: Data) -> None:
    for cell in swapped["cells"]:
        effect = {name: ratio["value"] for name, ratio in cell["effects"].items()}
        for requests, eviction in (("domoe", "fmoe"), ("fmoe", "domoe")):
            product = effect[f"requests, {eviction}"] * effect[f"eviction, {requests}"]
            assert product == pytest.approx(effect["both"], rel=1e-3)
        speed = {name: run["tokens_per_s"] for name, run in cell["runs"].items()}
        assert speed["domoe, domoe"] / speed["fmoe, fmoe"] == pytest.approx(effect["both"], rel=1e-3)
    first, second = exchanged.sheets(swapped)
    assert [row[1] for row in first.rows] == ["law", "banking", "mixed", "mean"]
    assert len(second.rows) == 3


def test_conditions_are_added_one_after_another(options: ExperimentOptions) -> None:
    names = [*conditions.CONDITIONS]
    model = options.models[0]
    values = {name: {one.label: one.values for one in conditions.contestants(model, name)} for name in names}
    orders = [{one.discipline for one in conditions.contestants(model, name)} for name in names]
    assert orders == [{"preemptive"}, *[{"demand-first"}] * 4]
    assert [conditions.CONDITIONS[name].software == IMPLIED for name in names] == [False, False, False, True, True]
    assert [values[name]["moe-infinity"].get("code", False) for name in names] == [False, False, True, True, True]
    assert [values[name]["domoe"].get("search", "after") for name in names] == ["after"] * 4 + ["before"]
    for name in names:
        assert values[name]["fmoe, domains x N"]["entries"] == 4 * values[name]["fmoe, N"]["entries"]
        for one in conditions.contestants(model, name):
            one.kind.takes.model_validate(one.values)


def test_every_exchange_is_of_one_form(tmp_path: Path) -> None:
    those = parts.contestants()
    for (form, part), one in those.items():
        if form and part and not isinstance(one, Altered):
            own, plain = (
                one.kind.takes.model_validate(values).model_dump() for values in (one.values, parts.FORMS[form])
            )
            assert len([name for name in own if own[name] != plain[name]]) == 1, (form, part)
    best, literal = (those[form, "no requests"] for form in (parts.BEST, parts.LITERAL))
    assert isinstance(best, Altered) and isinstance(literal, Altered)
    assert (best.evicts_as, literal.evicts_as) == (those[parts.BEST, ""], those[parts.LITERAL, ""])
