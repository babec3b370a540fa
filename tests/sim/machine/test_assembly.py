"""Machines put together: loops and links that take the place of a profile's own."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.machine.assembly import Assembly
from sim.machine.cost import Costs
from sim.machine.hardware import Hardware, builtin_hardware
from sim.machine.links import link_of
from sim.machine.loop import DEFAULT_LOOP, load_loop
from sim.machine.loop_overheads import LOOP_FIGURES
from sim.run.prepared import replay
from sim.run.scene import scene
from sim.workload import batched, without_loop, workload
from tests.support.places import REPOSITORY
from traces.models.known import builtin_models, model_spec
from traces.trace import Trace

FIGURES = ("operation_us", "expert_floor_us", "layer_floor_us", *LOOP_FIGURES)
QWEN = REPOSITORY / "traces/qwen3_law.npz"


def test_graphs_are_as_measured_on_the_h200_and_say_where_that_is_assumed() -> None:
    graphs, own = load_loop("graphs"), Hardware.load("h200").software
    assert [getattr(graphs, name).value for name in FIGURES] == [getattr(own, name).value for name in FIGURES]
    assert not graphs.measured and graphs.origin == "assumed" and own.origin == "measured"
    assert Assembly("h200", "graphs").load().software == Assembly("h200", "measured").load().software == own
    assert Assembly("l40", "graphs").load().software == graphs


@pytest.mark.parametrize("name", builtin_hardware())
def test_a_card_that_was_not_measured_has_the_default_loop(name: str) -> None:
    card = Hardware.load(name)
    assert card.software.measured == card.link_measured
    if not card.link_measured:
        assert card.software == load_loop(DEFAULT_LOOP) == Assembly(name, DEFAULT_LOOP).load().software
        with pytest.raises(InputError, match=f"that of {name} was not measured; expected a profile"):
            Assembly(name, "measured").load()


def test_another_loop_takes_the_times_of_blocks_that_were_measured_with_the_own_one_along() -> None:
    own, other = Hardware.load("h200"), Assembly("h200", "eager").load()
    assert own.ffn and own.layer and not other.ffn and not other.layer
    assert other.copy_ns(10**7) == own.copy_ns(10**7) and other.name == "h200 with loop eager"
    assert other.software == own.eager and other.software.measured, "what was measured here before what is assumed"
    assert own.changed(eager=None).driven_by("eager").software == load_loop("eager")


def test_a_loop_of_ones_own(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "kind = 'mine'\nwaits_for_route = false\noperation_us = 1\nexpert_floor_us = 2\n"
        "layer_floor_us = 3\nroute_wait_us = 4\nalone_us = 5\n"
    )
    machine = Assembly("l40", str(path)).load()
    assert machine.software.kind == "mine" and machine.software.awaited_extra_us.value == 5
    path.write_text("kind = 'mine'\n")
    with pytest.raises(InputError, match=r"mine\.toml: operation_us is missing"):
        Assembly("l40", str(path)).load()
    with pytest.raises(InputError, match=r"loop 'graph' is unknown; expected .*eager, graphs"):
        Assembly("l40", "graph").load()


@given(st.sampled_from("345"), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 10**10))
def test_half_the_lanes_copy_at_half_the_rate(generation: str, lanes: int, size: int) -> None:
    machine = Hardware.load("l40")
    few, all_ = (machine.changed(link=link_of(f"PCIe{generation}x{n}")) for n in (lanes, 16))
    assert few.link.name == f"PCIe {generation} x{lanes}" and not few.link_measured
    rate = Fraction(str(few.link.gbps.value)) / Fraction(str(all_.link.gbps.value))
    assert rate == Fraction(lanes, 16)
    assert few.copy_ns(size) >= all_.copy_ns(size)


@pytest.mark.parametrize("name", ["pcie2x16", "pcie4x3", "pcie4", "x16", "", "pcie4x16x"])
def test_no_link(name: str) -> None:
    with pytest.raises(InputError, match="expected a generation and its lanes, such as pcie4x8"):
        link_of(name)


@given(st.sampled_from(builtin_models()), st.sampled_from(["l40", "rtx-5090", "t4"]), st.integers(1, 600))
def test_no_loop_is_faster_than_none(model: str, card: str, rows: int) -> None:
    """Bytes and arithmetic are the least that any block takes by the formula."""
    spec, machine = model_spec(model), Hardware.load(card)
    none = Costs(spec, machine.without_loop())
    for loop in ("eager", "graphs"):
        costs = Costs(spec, machine.driven_by(loop))
        assert (none.layer_ns(rows, rows) <= costs.layer_ns(rows, rows)).all()
        assert (none.expert_ns(rows) <= costs.expert_ns(rows)).all()
        assert (none.head_ns(rows) <= costs.head_ns(rows)).all()


def test_a_report_says_what_share_of_the_compute_bound_is_launches() -> None:
    reports = {
        loop: replay(scene(QWEN, hardware="rtx-5090", loop=loop), "all-in-gpu") for loop in (None, "eager", "graphs")
    }
    shares = {loop: report.bounds["loop_share"] for loop, report in reports.items()}
    assert shares["eager"] > 0.9 > shares["graphs"] == shares[None] > 0
    told = [note for note in reports["eager"].notes if "launches and waits, not bytes" in note]
    assert len(told) == 1 and f"{shares['eager']:.0%} of it, by the eager loop (assumed)" in told[0]
    assert reports["eager"].provenance["loop"] == "eager" and reports[None].provenance["loop_source"] == "assumed"
    assert (shares["graphs"] > 0.5) == any("not bytes" in note for note in reports["graphs"].notes)


def test_without_a_loop_all_that_is_left_is_the_rest_of_the_share() -> None:
    trace, spec, machine = Trace.load(QWEN).select("eval"), model_spec("qwen3-30b-a3b"), Hardware.load("rtx-4090")
    work = workload(trace, spec, machine, batched(trace, 1))
    bare = without_loop(work, trace, spec, machine)
    plain = workload(trace, spec, machine.without_loop(), batched(trace, 1))
    assert (bare.compute_ns() == plain.compute_ns()).all()
