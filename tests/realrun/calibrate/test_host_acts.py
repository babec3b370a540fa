"""What requests take the host: what is asked for, and that the fit finds what a simulated host was given."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from ground.errors import InputError
from realrun.calibrate import machine_profile
from realrun.calibrate.demand_acts import DemandActs
from realrun.calibrate.host_acts import (
    SHARES_DROPPED,
    SHARES_ISSUED,
    _nonnegative,
    asked,
    fitted,
    host_acts,
    numbers,
    summed,
)
from realrun.calibrate.loop_times import SPARE_SLOTS, random_scene, shrunk, staying, without_loop
from realrun.calibrate.machine import Machine
from realrun.calibrate.machine_profile import _host_thread
from realrun.calibrate.parts import Parts
from realrun.engine.small_scene import scaled
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import HostTimes
from tests.support.real_worlds import TINY_MOE
from tests.support.runs import executed
from traces.models.known import model_spec
from traces.schema import DECODE


@settings(max_examples=50)
@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e7), st.integers(0, 2**32 - 1))
def test_the_fit_finds_what_was_there(request_ns: float, drop_ns: float, base: float, seed: int) -> None:
    dropped, issued = numbers(27, 4000, seed)
    assert len({*zip(dropped.tolist(), issued.tolist(), strict=True)}) == len(SHARES_DROPPED) * len(SHARES_ISSUED)
    left = base + issued * request_ns + dropped * drop_ns
    found = fitted(left, dropped, issued)
    assert found == pytest.approx((request_ns, drop_ns, 0), rel=1e-6, abs=1e-3)
    slow = left.copy()
    slow[np.random.default_rng(seed).integers(len(slow))] += 1e8  # one slow moment of a shared host
    assert fitted(slow, dropped, issued) == pytest.approx(found, rel=1e-6, abs=1e-3)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_no_factor_is_below_nothing_and_none_misses_less(seed: int) -> None:
    scipy = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(seed)
    columns, values = random.random((9, 3)), random.normal(size=9)
    found = _nonnegative(columns, values)
    expected, missed = scipy.nnls(columns, values)
    assert found.min() >= 0 and np.linalg.norm(columns @ found - values) == pytest.approx(missed)
    assert found == pytest.approx(expected, abs=1e-9)


def test_times_below_nothing_are_none() -> None:
    dropped, issued = numbers(9, 100)
    request_ns, drop_ns, _ = fitted(1e6 + 50.0 * issued - 10.0 * dropped, dropped, issued)
    assert drop_ns == 0 and request_ns > 0


def test_several_fits_give_their_medians_and_how_far_they_are_apart() -> None:
    acts = summed([(3.0, 10.0, 100.0), (1.0, 30.0, 300.0), (2.0, 20.0, 200.0)])
    assert (acts.request_ns, acts.drop_ns, acts.request_spread, acts.drop_spread) == (2, 20, (1, 3), (10, 30))
    assert acts.missed_us == 0.2


def test_a_simulated_host_is_found_again() -> None:
    """The simulator in place of the device: its requests take what the fit then says, and nothing else does."""
    model, hardware = replace(shrunk(model_spec("qwen3-30b-a3b"), 12), vocab=1024), Hardware.load("h200")
    there, steps = 16, 18
    slots = there * model.routed_layers + SPARE_SLOTS
    here = random_scene(model, without_loop(hardware), steps, there, slots * model.expert_bytes[0])
    dropped, issued = numbers(steps, 1000)
    plan = replace(staying(here, there), requests=asked(here, there, dropped, issued))
    plan.check(here.work.n_layers, here.work.n_experts, here.work.schedule.n_steps)
    decode = here.work.schedule.phase == DECODE
    for times in (HostTimes(request_ns=230, drop_ns=70), HostTimes(request_ns=40, drop_ns=110)):
        log = executed(replace(here.work, host_thread=times), plan, here.budget).log
        few = 2 * SPARE_SLOTS * steps  # that are still there, or under way, from the token before
        assert issued.sum() - few <= log.counters.issued[1] <= issued.sum()
        left = np.diff(log.finish, prepend=0) - here.work.compute_ns()
        left -= (log.stall_demand + log.stall_late).reshape(-1, here.work.n_layers).sum(1)
        request_ns, drop_ns, _ = fitted(left[decode], dropped, issued)
        assert (request_ns, drop_ns) == pytest.approx((times.request_ns, times.drop_ns), rel=0.02)


def test_a_real_run_is_fitted_and_put_into_the_profile(monkeypatch) -> None:
    monkeypatch.setattr(machine_profile, "demand_acts", lambda *_: DemandActs(3.0, 4.0, (1.0, 5.0), (2.0, 6.0), 0.01))
    hardware, machine = Hardware.load("h200"), Machine("cpu", 3)
    acts = host_acts(machine, TINY_MOE, hardware, rounds=1, least=1)
    assert acts.request_ns >= 0 and acts.drop_ns >= 0 and acts.request_spread == (acts.request_ns, acts.request_ns)
    with pytest.raises(InputError, match="not resident; expected 1000 at least to time requests"):
        host_acts(machine, TINY_MOE, hardware)
    parts, table = Parts(machine), {"software": {"kind": "CUDA graphs"}}
    model = shrunk(scaled(model_spec("qwen3-30b-a3b"), 64), 10)
    details = _host_thread(parts, [TINY_MOE, model], hardware, table, "seen")
    names = ["request_ns", "drop_ns", "hand_over_ns", "launch_ns"]
    assert not parts.left_out and details.keys() == {*names, "missed_us", "missed_share"}
    thread = table["software"]["host_thread"]
    assert thread.pop("copies_ahead") == 1 and [*thread] == names
    assert all(figure["measured"] and "random routes" in figure["source"] for figure in thread.values())
