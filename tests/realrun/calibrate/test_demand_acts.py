"""What handing copies over and launching take the host: the fit finds what a simulated host was given."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import realrun.calibrate.demand_acts
from realrun.calibrate.demand_acts import DemandActs, demand_acts, fitted, simulations, summed
from realrun.calibrate.loop_times import random_scene, shrunk
from realrun.calibrate.machine import Machine
from sim.machine.hardware import Hardware
from tests.support.real_worlds import TINY_MOE
from traces.models.known import model_spec


@pytest.mark.parametrize(("hand_over_ns", "launch_ns"), [(0, 0), (31_000, 14_000), (6_000, 40_000)])
def test_a_simulated_host_is_found_again(monkeypatch, hand_over_ns: int, launch_ns: int) -> None:
    """The simulator in place of the device. Other times may do as well, so what counts is what they then predict."""
    monkeypatch.setattr(realrun.calibrate.demand_acts, "STEPS", 8)
    model, layers = replace(shrunk(model_spec("qwen3-30b-a3b"), 6), vocab=1024), 6
    slots = [layers * there for there in (32, 64, 96)]
    budgets = [count * model.expert_bytes[0] for count in slots]
    *here, other = [random_scene(model, Hardware.load("h200"), 8, 128, budget, prompt=1) for budget in budgets]
    run = simulations(here)
    hand, launch, missed = fitted(run(hand_over_ns, launch_ns), run)
    assert missed < 0.01
    predict = simulations([other])
    ((took, alone),), ((true, truly),) = predict(hand, launch), predict(hand_over_ns, launch_ns)
    assert abs(took.sum() / true.sum() - 1) < 0.02 and abs(alone.sum() / truly.sum() - 1) < 0.03


def test_several_fits_give_their_medians_and_how_far_they_are_apart() -> None:
    fits = [(3, 10, 0.3), (1, 30, 0.1), (2, 20, 0.2)]
    assert summed(fits) == DemandActs(2, 20, (1, 3), (10, 30), 0.2)


def test_a_real_run_is_fitted(monkeypatch) -> None:
    for name, value in (("STEPS", 3), ("FIRST_STEP_NS", 0)):
        monkeypatch.setattr(realrun.calibrate.demand_acts, name, value)
    monkeypatch.setattr(realrun.calibrate.demand_acts, "HANDS_NS", (0, 40_000))
    monkeypatch.setattr(realrun.calibrate.demand_acts, "LAUNCHES_NS", (0, 40_000))
    acts = demand_acts(Machine("cpu", 3), TINY_MOE, Hardware.load("h200"), rounds=1)
    assert acts.hand_over_spread == (acts.hand_over_ns, acts.hand_over_ns)
    assert acts.hand_over_ns >= 0 and acts.launch_ns >= 0 and acts.missed >= 0
