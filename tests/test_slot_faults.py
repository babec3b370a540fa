"""A real run that computes with a wrong, half-copied or changed expert is caught, with its layer and number."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from realrun.engine import RealRun
from realrun.faults import SlotFault
from sim.plan import Plan, Requests
from tests.realworlds import chain, real_run, real_world, staged
from tests.worlds import World

torch.set_num_threads(1)


class Hasty(RealRun):
    """Does not wait for copies."""

    def _wait_for(self, transfer: Any) -> None:
        pass


class Careless(RealRun):
    """Lets go of slots as soon as their kernels have been launched, which take a while to begin."""

    def _launch(self, *arguments: Any) -> Any:
        self.device.compute.delay(0.05)
        return super()._launch(*arguments)

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


def faulty(kind: type[RealRun], world: World, plan: Plan, slow_copies: bool = False) -> str:
    with staged(world) as (stage, predictions):
        run = real_run(world, plan, stage, predictions, kind, check=True)
        if slow_copies:
            device: Any = stage.device
            copy = device.copy
            device.copy = lambda *parts: (device.copies.delay(0.05), copy(*parts))
        with pytest.raises(SlotFault) as caught:
            run.execute()
    return str(caught.value)


def test_g_24_5_a_kernel_that_does_not_wait_for_its_copy_is_caught() -> None:
    said = faulty(Hasty, real_world(chain([0, 1, 2, 3]), slots=2), Plan(), slow_copies=True)
    assert said.startswith("step 0: 1 times an expert was not the expert in its slot")
    assert said.endswith("first routed layer 0, expert 0")


def test_g_24_5_half_a_copy_is_caught() -> None:
    class Early(Hasty):
        def _wait_for(self, transfer: Any) -> None:
            # The stamp is there already, as if the copies of a transfer had been taken out of order.
            self.cache.stamps[self.cache.slot[transfer.expert]] = self.link._store.stamps[transfer.expert]

    said = faulty(Early, real_world(chain([0, 1]), slots=1), Plan(), slow_copies=True)
    assert "was not whole when its kernels began" in said


def test_g_24_5_a_slot_given_away_right_after_the_launch_is_caught() -> None:
    # While the kernels of expert 0 have not begun, expert 1 is asked for and takes the only slot.
    ask = Requests.build(np.array([1]), np.array([1]), np.array([1]))
    world = real_world(chain([0, 1, 1]), slots=1)
    assert "expert 0" in faulty(Careless, world, Plan(requests=ask))


def test_another_experts_slot_is_caught() -> None:
    assert "was not the expert in its slot" in faulty(Confused, real_world(chain([0, 1, 0, 1]), slots=2), Plan())


def test_a_slot_that_changes_under_its_kernels_is_caught() -> None:
    assert "was wrong when its kernels had ended" in faulty(Meddling, real_world(chain([0, 1]), slots=2), Plan())
