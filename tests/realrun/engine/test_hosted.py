"""Real runs whose experts compute on the host, beside threads that wait."""

import dataclasses
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from realrun.device.faults import RunError
from realrun.device.host_device import HostDevice
from sim.log import HOSTED
from sim.plan import Host, Plan, Prediction
from tests.support.real_worlds import ALL_RESIDENT, chain, real_run, real_world, rig_of, staged
from tests.support.strategies import make_trace
from traces.schema import DECODE, PREFILL

torch.set_num_threads(1)


def on_the_host(layers: int = 1) -> Plan:
    """Every expert runs on the host."""
    none = np.zeros(layers, np.int64)
    return Plan(keep=False, host=Host(none, none, none, none, reserved=np.zeros(0, np.int64)))


class Restless(HostDevice):
    """Looks again at once, as whoever waits for a GPU does: it always wants the interpreter."""

    def breathe(self) -> None:
        self._check()


def test_threads_get_the_interpreter_while_whoever_waits_never_rests() -> None:
    world, device, interval = real_world(chain([0, 1, 2, 3] * 5), slots=1), Restless(), sys.getswitchinterval()
    plan = dataclasses.replace(on_the_host(), prediction=Prediction(np.array([0, 2]), np.full(2, 300_000)))
    deadline = time.monotonic() + 30
    sys.setswitchinterval(
        1.0
    )  # whoever waits for the interpreter for so long, a few times a layer, does not end in time
    try:
        rig, predictions = rig_of(world, device)
        outcome = real_run(world, plan, rig, predictions, stop=lambda: time.monotonic() > deadline).execute()
        assert sys.getswitchinterval() == 1.0
    finally:
        sys.setswitchinterval(interval)
        device.close()
    assert outcome.complete
    assert (outcome.log.found == HOSTED).all()


def test_experts_on_the_host_compute_what_the_device_does_and_touch_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = [PREFILL, PREFILL, PREFILL, DECODE, DECODE]
    routes = np.random.default_rng(5).permuted(np.tile(np.arange(5), (5, 2, 1)), axis=2)[:, :, :2]
    world = real_world(make_trace(routes, n_experts=5, phase=phase, sequence=[0] * 5), slots=4)
    with staged(world) as (rig, predictions):
        launch = rig.device.compute.launch
        launching: set[str] = set()

        def watched(*work: Any) -> None:
            launching.add(threading.current_thread().name)
            launch(*work)

        monkeypatch.setattr(rig.device.compute, "launch", watched)
        run = real_run(world, on_the_host(2), rig, predictions, keep_outputs=True)
        hosted = run.execute()
        resident = real_run(world, ALL_RESIDENT, rig, predictions, keep_outputs=True).execute()
    assert (hosted.log.found == HOSTED).all()
    assert launching == {threading.current_thread().name}
    for mine, theirs in zip(hosted.outputs, resident.outputs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_whichever_kernel_multiplies_one_row_the_outputs_agree() -> None:
    world, was = real_world(chain([0, 1, 2, 3]), slots=1), torch.backends.mkldnn.set_flags()[0]
    with staged(world) as (rig, predictions):
        outputs = []
        for own in (False, True):
            run = real_run(world, on_the_host(), rig, predictions, keep_outputs=True)
            assert run._hosted is not None and run._hosted._own_is_faster() in (False, True)
            run._hosted._own = own
            outputs.append(run.execute().outputs)
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.backends.mkldnn.set_flags()[0] == was


def test_a_host_that_does_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in ocaml-multicore/eio#25: a scheduler returned as if done while all were blocked."""
    over = threading.Event()

    def nothing(*_: Any) -> None:
        monkeypatch.setattr("realrun.engine.loop.STUCK_SECONDS", 0.05)  # only now: all else takes as long as it takes
        over.wait()

    monkeypatch.setattr("realrun.engine.host_experts.feed_forward", nothing)
    world = real_world(chain([0, 1]), slots=1)
    with staged(world) as (rig, predictions):
        run = real_run(world, on_the_host(), rig, predictions)
        monkeypatch.setattr(run.link, "close", over.set)  # what ends the run ends the expert
        with pytest.raises(RunError, match="waiting for the host's experts of layer call 0"):
            run.execute()
