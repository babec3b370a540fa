"""The loop of a model whose own code computes with weights that come and go: it says when calls begin and end."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from realrun.engine.loop import Loop
from sim.run.link_queue import Transfer
from sim.run.slots import RESIDENT

if TYPE_CHECKING:
    import torch


class OffloadLoop(Loop):
    """Calls whose experts are run one after another by the model's own code, in rising order.

    As many as fit are claimed ahead; each is let go of when the next one is taken up.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.step = self._call_number = self._current = -1
        self._to_claim: deque[int] = deque()
        self._claimed: dict[int, Transfer | None] = {}

    def begin_step(self, phase: int) -> None:
        """A step begins."""
        self.step += 1
        self.link.phase = phase
        self.predict.append(0)
        if self.plan.ring and not self.step:
            self._stream_layer(0)
            self.link.kick()

    def call(self, layer: int, needed: list[int], decide: Callable[[], Any]) -> None:
        """The route of a layer is known: ``needed`` are its experts, flat and rising; ``decide`` asks the policy."""
        self._await_free()  # the host has the route, so all that was launched before it is over
        self._look_after_link()
        call = self.step * self.n_layers + layer
        self.calls.expect(len(needed))
        self._call_number, self._current = call, -1
        before = self.plan.prediction.before_demands
        if before:
            self._decide_before(decide(), self.step)
        self._begin_call(call, needed, len(self.calls.found) - len(needed))
        self._to_claim.extend(needed)
        self.link.awaited.update(needed)
        self._claim_more()
        self.link.kick()
        if not before and (decision := decide()) is not None:
            self.decide(decision, self.step)
        if self.calls.streams(call):
            self._stream_layer(call + 1)
        self.link.kick()

    def slot_of(self, expert: int) -> "torch.Tensor":
        """The bytes of ``expert``, whose call is under way: the model computes with them next."""
        if expert != self._current:
            self._leave_current()
            if expert not in self._claimed and expert not in self._to_claim:  # the model comes back to it
                self._to_claim.appendleft(expert)
                self._claim_more()
                self.link.kick()
            self._until(lambda: expert in self._claimed, "a slot for expert", expert)
            transfer = self._claimed.pop(expert)
            if transfer is not None and self.cache.state[expert] != RESIDENT:
                self._stand_still(self._call_number, [transfer], expert in self.calls.late)
            self.cache.use(expert)
            self._current = expert
            if self.checker:
                self.checker.launch([self.cache.slot[expert]], [expert], after=False)
        return self.cache.bytes[self.cache.slot[expert]]

    def leave(self) -> None:
        """The call's experts have been launched."""
        self._leave_current()
        for expert in list(self._claimed):  # claimed, and in the end not run
            self._hold(self.device.compute.record(), [expert])
        self._claimed.clear()
        self._to_claim.clear()
        self.link.awaited.clear()
        self._stand_still_for_others(self._call_number)

    def _leave_current(self) -> None:
        if self._current >= 0:
            if self.checker:
                self.checker.launch([self.cache.slot[self._current]], [self._current], after=True)
            self._hold(self.device.compute.record(), [self._current])
            self._current = -1

    def _claim_more(self) -> None:
        cache = self.cache
        while self._to_claim and cache.pinned.count(1) < cache.fit[self._to_claim[0]]:
            expert = self._to_claim.popleft()
            _, waiting = self.calls.claim([expert])
            self._claimed[expert] = waiting[0] if waiting else None

    def _let_go(self, kick: bool = True) -> bool:
        gone = super()._let_go(kick and not self._to_claim)
        if gone and self._to_claim:
            self._claim_more()
            self.link.kick()
        return gone

    def _wait_for(self, transfer: Transfer) -> None:
        """What the model's own code computes from now on waits for the copy."""
        self.device.hold_back(transfer.event)
