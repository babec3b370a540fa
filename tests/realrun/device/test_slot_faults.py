"""A real run that computes with a wrong, half-copied or changed expert is caught, with its layer and number."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from realrun.device.faults import SlotFault
from realrun.engine.compiled_run import CompiledRun
from realrun.engine.replay_loop import RealRun
from sim.plan import Plan, Requests
from tests.support.real_worlds import chain, real_run, real_world, staged
from tests.support.worlds import World

torch.set_num_threads(1)


class Hasty(RealRun):
    """Does not wait for copies, which begin when the first kernels have ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ended = threading.Event()
        copy = self.device.copy
        self.device.copy = lambda *parts: (self.device.copies.launch(self.ended.wait, 60), copy(*parts))

    def _wait_for(self, transfer: Any) -> None:
        pass

    def _launch(self, *arguments: Any) -> Any:
        end = super()._launch(*arguments)
        self.device.compute.launch(self.ended.set)
        return end


class HastyCompiled(CompiledRun):
    """The same in compiled code."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ended = threading.Event()
        move = self.device.move
        self.device.move = lambda *parts: (self.device.copies.launch(self.ended.wait, 60), move(*parts))
        self._goes_on = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3)(lambda *_: 0)
        self.link.c["wait"] = ctypes.cast(self._goes_on, ctypes.c_void_p).value

    def _launch(self, *arguments: Any) -> Any:
        end = super()._launch(*arguments)
        self.device.compute.launch(self.ended.set)
        return end


class Careless(RealRun):
    """Lets go of slots as soon as their kernels have been launched; those of expert 0 begin when its slot is taken."""

    def _launch(self, call: int, experts: list[int], *rest: Any) -> Any:
        if experts == [0]:
            stamp, own = self.cache.stamps[self.cache.slot[0]], self.link._store.stamps[0]
            self.device.compute.launch(until, lambda: not torch.equal(stamp, own))
        return super()._launch(call, experts, *rest)

    def _hold(self, until: Any, group: list[int]) -> None:
        for expert in group:
            self.cache.pinned[expert] = 0
        self.link.kick()


class Confused(RealRun):
    """Takes one expert's slot for another's."""

    def _launch(self, call: int, experts: list[int], *rest: Any) -> Any:
        slots = self.cache.slot
        other = next((e for e in range(len(slots)) if slots[e] >= 0 and e not in experts), None)
        if other is not None and len(experts) == 1:
            slots[experts[0]], slots[other] = slots[other], slots[experts[0]]
        return super()._launch(call, experts, *rest)


class Meddling(RealRun):
    """Changes a byte of a slot while its kernels run."""

    def _launch(self, call: int, experts: list[int], *rest: Any) -> Any:
        if not experts:
            return None
        spoiled = self.cache.bytes[self.cache.slot[experts[0]]]
        plain = self.experts.launch

        def launch(*arguments: Any) -> None:
            plain(*arguments)
            spoiled[5] ^= 64

        self.experts.launch = launch  # type: ignore[method-assign]
        return super()._launch(call, experts, *rest)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        time.sleep(1e-3)


def faulty(kind: type[RealRun], world: World, plan: Plan) -> str:
    with staged(world) as (rig, predictions):
        run = real_run(world, plan, rig, predictions, kind, check=True)
        with pytest.raises(SlotFault) as caught:
            run.execute()
    return str(caught.value)


@pytest.mark.parametrize("kind", [Hasty, HastyCompiled])
def test_a_kernel_that_does_not_wait_for_its_copy_is_caught(kind: type[RealRun]) -> None:
    """Seen in ROCm/pytorch#3194, meta-pytorch/torchrec#4231:
    a slot was read before the copying stream had written it.
    """
    said = faulty(kind, real_world(chain([0, 1, 2, 3]), slots=2), Plan())
    assert said.startswith("step 0: 1 times an expert was not the expert in its slot")
    assert said.endswith("first routed layer 0, expert 0")


def test_half_a_copy_is_caught() -> None:
    """Seen in ROCm/pytorch#3194, meta-pytorch/torchrec#4231:
    a slot was read before the copying stream had written it.
    """
    class Early(Hasty):
        def _wait_for(self, transfer: Any) -> None:
            # The stamp is there already, as if the copies of a transfer had been taken out of order.
            self.cache.stamps[self.cache.slot[transfer.expert]] = self.link._store.stamps[transfer.expert]

    said = faulty(Early, real_world(chain([0, 1]), slots=1), Plan())
    assert "was not whole when its kernels began" in said


def test_a_slot_given_away_right_after_the_launch_is_caught() -> None:
    # While the kernels of expert 0 have not begun, expert 1 is asked for and takes the only slot.
    """Seen in ROCm/pytorch#3194, meta-pytorch/torchrec#4231:
    a slot was read before the copying stream had written it.
    """
    ask = Requests.build(np.array([1]), np.array([1]), np.array([1]))
    world = real_world(chain([0, 1, 1]), slots=1)
    assert "expert 0" in faulty(Careless, world, Plan(requests=ask))


def test_another_experts_slot_is_caught() -> None:
    assert "was not the expert in its slot" in faulty(Confused, real_world(chain([0, 1, 0, 1]), slots=2), Plan())


def test_a_slot_that_changes_under_its_kernels_is_caught() -> None:
    assert "was wrong when its kernels had ended" in faulty(Meddling, real_world(chain([0, 1]), slots=2), Plan())
