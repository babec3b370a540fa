"""What every loop over layer calls does on a device, whatever drives it.

The rules of a call, counters and the order of service are the simulator's own (``sim.run.call``, ``sim.run.slots``,
``sim.run.link_queue``); only time is the device's. A kernel has ended once the host has seen the event behind it.
Nothing blocks: while the host waits for anything it looks after the link again and again (`Loop._look_after_link`).
That is, it sees which copies have landed, lets go of slots whose kernels have ended, and hands over more copies.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from realrun.device.copy_link import CopyLink
from realrun.device.devices import Device, Event
from realrun.device.faults import RunError
from realrun.device.host_store import HostStore
from realrun.device.slots import DeviceCache, Room
from realrun.device.stamps import Checker
from realrun.engine.predicting import Predictions
from sim.eviction import foresees
from sim.log import Counters
from sim.plan import Decision, Plan
from sim.run.call import LayerCalls
from sim.run.link_queue import Transfer
from sim.run.terms import RunTerms
from sim.workload import Workload

STUCK_SECONDS = 60.0
"""Without anything arriving, ending or being computed, a run is given up."""
SWITCH_SECONDS = 2e-5
"""After so long a thread that computes gets the interpreter from the one that looks again and again."""
PAUSE_SECONDS = 5e-5
"""Between two looks after the link while a thread of the host computes: it needs the processor more."""
REQUESTS_AT_ONCE = 32
"""Requests that are made before the host does something else: the link must not run dry, nor the device."""
LOOKS_BETWEEN_CHECKS = 256
"""Looks after the link between checks of the clock and of whether somebody wants the run to end."""


Spans = list[tuple[int, Event, Event]]
"""Numbers of calls or steps, each with the marks between which something was done for it."""


class StopRequested(Exception):
    """Somebody wants the run to end."""


@dataclass
class Times:
    """Marks between which the device did something, to be read when the run is over."""

    layer: Spans = field(default_factory=list)
    shared: Spans = field(default_factory=list)
    experts: Spans = field(default_factory=list)
    head: Spans = field(default_factory=list)
    stall_demand: Spans = field(default_factory=list)
    stall_late: Spans = field(default_factory=list)
    stall_host: Spans = field(default_factory=list)


class Loop:
    """The state of one run, and what its driver does with it.

    Args:
        device, store: where experts run, and where they are copied from.
        shape: routed layers and experts a layer.
        plan, terms: what the policy decided for all of the run, and what ``sim.run.terms.settle`` made of it.
        predictions: does what the plan charges for predicting.
        check: compare every slot with its stamp, before and after its kernels.
        stop: asked now and then whether the run should end early.
        room: slots to use again.
        work: all calls of the run, where they are known beforehand.
    """

    def __init__(
        self, device: Device, store: HostStore, shape: tuple[int, int], plan: Plan, terms: RunTerms,
        predictions: Predictions, *, check: bool = False, stop: Callable[[], bool] = lambda: False,
        room: Room | None = None, work: Workload | None = None,
    ) -> None:  # fmt: skip
        self.device: Any = device
        self.plan = plan
        self.n_layers, self.n_experts = shape
        self.counters = Counters()
        self._build(store, terms, check, room, work)
        self.checker = Checker(self.device, self.cache, self.n_experts) if check else None
        self.times = Times()
        self.predict: list[int] = []
        """Time spent predicting on the critical path, a step, ns."""
        self._predictions, self._stop = predictions, stop
        self._holding: deque[tuple[Event, list[int]]] = deque()
        self._asides: list[tuple[Event, Decision]] = []
        self._to_request: Iterator[tuple[int, int, int]] | None = None
        self._moved_at = time.monotonic()
        self._waits_for = ("the first step", -1)
        self._looks = 0

    def _build(self, store: HostStore, terms: RunTerms, check: bool, room: Room | None, work: Workload | None) -> None:
        """Make what holds the experts, copies them and looks them up."""
        plan, shape = self.plan, (self.n_layers, self.n_experts)
        first_call = work.first_call() if work is not None and foresees(plan.eviction) else None
        slots = terms.slots
        self.cache: Any = DeviceCache(self.device, store.size, *shape, slots, plan.eviction, first_call, room)
        self.link: Any = CopyLink(
            self.cache, store, self.device, terms.chunks, terms.discipline, self.counters, stamped=check
        )
        self.calls: Any = LayerCalls(plan, self.link, *shape, work, terms.host)

    def copy_all(self) -> None:
        """Have every expert there before the first step, which counts nowhere."""
        for expert in range(self.n_layers * self.n_experts):
            self.link.demand(expert)
            self.link.kick()
            self.cache.use(expert)
        self._until(lambda: not self.link.moving, "all experts before step", 0)
        self.counters.demand_bytes[:] = [0, 0]

    # -- one call ------------------------------------------------------------------------------------------------

    def _begin_call(self, call: int, needed: list[int], first: int) -> None:
        """The route of ``call`` is known: look its experts up, from look-up ``first`` on."""
        self._request_all()
        self.calls.begin(call, needed, first)

    def _stand_still(self, call: int, transfers: list[Transfer], late: bool, since: Event | None = None) -> Event:
        """Have the computing stream wait for ``transfers``, from ``since`` or now, and time that; returns its end.

        It counts as waiting for a prefetch if ``late``, else for a demand.
        """
        idle = self.device.compute.mark() if since is None else since
        for transfer in transfers:
            if transfer.event is None:  # no slot is free yet
                self._until(partial(_handed_over, transfer), "a slot for expert", transfer.expert)
            self._wait_for(transfer)
        end: Event = self.device.compute.mark()
        stalls = self.times.stall_late if late else self.times.stall_demand
        stalls.append((call, idle, end))
        return end

    def _stand_still_for_others(self, call: int) -> None:
        """Have the computing stream wait for what is still under way of all that the call does not need itself."""
        under_way = self.calls.still_under_way()
        if under_way:
            self._stand_still(call, under_way, late=True)

    def _wait_for(self, transfer: Transfer) -> None:
        """The computing stream waits for a copy; the host does not."""
        self.device.compute.wait(transfer.event)

    def _hold(self, until: Event, group: list[int]) -> None:
        """Keep the slots of a wave pinned until its last kernel has ended."""
        self._holding.append((until, group))

    # -- waiting -------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], what: str, number: int, some: bool = False) -> None:
        """Look after the link until ``done``, which is waiting for ``what``, should it never end.

        With ``some`` the link gets no more than keeps it busy (``CopyLink.kick``). Raises RunError where nothing moves
        for `STUCK_SECONDS`, and StopRequested where somebody wants the run to end.
        """
        self._waits_for, self._moved_at = (what, number), time.monotonic()
        while not done():
            self._look_after_link(some)

    def _until_thread(self, done: Callable[[], bool], progress: Callable[[], int], what: str, number: int) -> None:
        """The same while a thread of the host works: leave it the processor, and see its ``progress``."""
        self._waits_for, self._moved_at = (what, number), time.monotonic()
        seen = progress()
        while not done():
            self._look_after_link()
            time.sleep(PAUSE_SECONDS)
            if progress() != seen:
                seen, self._moved_at = progress(), time.monotonic()

    def _await(
        self, event: Event, what: str, number: int, demands_follow: bool = False, some: bool = False
    ) -> None:  # fmt: skip
        """Look after the link until ``event`` has been seen; all that was launched before it is over then.

        Where ``demands_follow`` no prefetch is handed over any more: at one instant landings come first, then demands.
        ``some``: as for `_until`.
        """
        self._until(event.query, what, number, some)
        if some:
            return
        if demands_follow:
            self.link.poll(follow=False)
            self._let_go(kick=False)
        else:
            self._look_after_link()

    def _await_free(self) -> None:
        """Until no wave holds its slots any more."""
        self._until(lambda: not self._holding, "earlier kernels in layer call", self.link.passed)

    def _look_after_link(self, some: bool = False) -> None:
        """What the host does, again and again, while it waits."""
        if self.link.poll(some=some) | self._let_go(kick=not some):
            self._moved_at = time.monotonic()
        for index, (event, decision) in enumerate(self._asides):
            if event.query():
                del self._asides[index]
                self._take_values(decision)
                self._request(decision.requests)
                self.link.kick()
                break
        if self._to_request is not None:
            self._request_some()
            self.link.kick(some)
        self.device.breathe()
        self._looks += 1
        if not self._looks % LOOKS_BETWEEN_CHECKS:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        """End the run if somebody wants that or nothing moves any more."""
        if self._stop():
            raise StopRequested
        if time.monotonic() - self._moved_at > STUCK_SECONDS:
            what, number = self._waits_for
            asked = sorted(self.link.transfers)
            raise RunError(
                f"nothing has moved for {STUCK_SECONDS:.0f} s, waiting for {what} {number}; "
                f"{len(asked)} experts are asked for{f', the first is {asked[0]}' if asked else ''}"
            )

    def _let_go(self, kick: bool = True) -> bool:
        """Free the slots of waves whose kernels have ended."""
        gone = False
        while self._holding and self._holding[0][0].query():
            self.link.poll(follow=False)  # their copies ended before their kernels
            _, group = self._holding.popleft()
            self.calls.let_go(group)
            gone = True
        if gone and kick:
            self.link.kick()
        return gone

    # -- the policy ----------------------------------------------------------------------------------------------

    def decide(self, decision: Decision, number: int) -> None:
        """Execute what is decided at a moment of step ``number``: new values, the work of predicting, requests."""
        thought = self._think(decision)
        self._revalue(decision)
        if thought is not None:
            self._answer(thought, number)
        self._ask(decision)

    def _decide_before(self, decision: Decision | None, number: int) -> Decision | None:
        """Execute a call's decision if the plan has it before the call's look-up; returns what is left for later."""
        if decision is None or not self.plan.prediction.before_demands:
            return decision
        self.decide(decision, number)
        self.link.kick()
        return None

    def _think(self, decision: Decision) -> tuple[int, Event] | None:
        """Begin to predict, if the step waits for the answer: what that took, ns, and its end."""
        waits = decision.predict_ns and self.plan.prediction.critical
        return self._begin_predicting(decision.predict_ns) if waits else None

    def _begin_predicting(self, ns: int) -> tuple[int, Event]:
        """Begin a look-up of so many ns that the step waits for: what beginning it took, ns, and its end."""
        begin = time.perf_counter_ns()
        event = self._predictions.begin(ns, critical=True)
        return time.perf_counter_ns() - begin, event

    def _answer(self, thought: tuple[int, Event], number: int) -> None:
        """Wait for a prediction of step ``number``; what the host did since it began is the loop's."""
        spent, event = thought
        begin = time.perf_counter_ns()
        self._await(event, "the answer of a prediction in step", number, some=True)
        self.predict[number] += spent + time.perf_counter_ns() - begin

    def _revalue(self, decision: Decision) -> None:
        """Tell the cache of new shares and values."""
        if decision.shares is not None:
            self.cache.share_out(decision.shares)
        if not self._is_aside(decision):
            self._take_values(decision)

    def _is_aside(self, decision: Any) -> bool:
        """Whether it is predicted beside the step: values and requests come when that is over."""
        return bool(decision.predict_ns) and not self.plan.prediction.critical

    def _take_values(self, decision: Decision) -> None:
        for first, row in decision.values:
            self.cache.valued(first, row)

    def _ask(self, decision: Decision) -> None:
        """Make the requests, behind a prediction that nobody waits for if there is one."""
        if self._is_aside(decision):
            self._asides.append((self._predictions.begin(decision.predict_ns, critical=False), decision))
        else:
            self._request(decision.requests)

    def _request(self, requests: list[tuple[int, int, int]]) -> None:
        """Make requests: for what is resident or under way and the first others at once, the rest while the host waits.

        None is put off beyond the next look-up, step or stream of a layer.
        """
        self._request_all()
        if len(requests) <= REQUESTS_AT_ONCE or self.link.may_issue >= 0:
            self.link.request_moment(requests)
            return
        self._to_request = iter(self.link.request_present(requests))
        self._request_some()

    def _request_some(self) -> None:
        some = list(islice(self._to_request or (), REQUESTS_AT_ONCE))
        self.link.request_all(some)
        if len(some) < REQUESTS_AT_ONCE:
            self._to_request = None

    def _request_all(self) -> None:
        """Make the requests that are left."""
        while self._to_request is not None:
            self._request_some()
            self.link.poll()

    def _stream_layer(self, call: int) -> None:
        """Ask for all experts of the layer of ``call``."""
        self._request_all()
        self.calls.stream(call)

    def _spent(self, spans: Spans, size: int) -> np.ndarray:
        """Device time between marks, summed by number, of the first ``size`` numbers."""
        total = np.zeros(size, np.int64)
        for index, begin, end in spans:
            if index < size:
                total[index] += self.device.between(begin, end)
        return total


def _handed_over(transfer: Transfer) -> bool:
    return transfer.event is not None


@contextmanager
def undisturbed() -> Iterator[None]:
    """No pauses of Python's collector while microseconds count, and no waits of other threads for the interpreter.

    A thread that waits for the device looks again and again, so it always wants the interpreter. A thread that computes
    gives the interpreter up in every operation of torch, and by Python's own setting waits 5 ms each time to have it
    back.
    """
    was, interval = gc.isenabled(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # capturing a graph collects too: let it find little to look through
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
        if was:
            gc.enable()
