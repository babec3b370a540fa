"""What every loop over layer calls does on a device, whoever drives it: look up, claim, wait, let go, decide.

Slots of a call are pinned from its look-up until the event after its last kernel has been seen. Counters, look-ups and
the order of service are the simulator's own (``sim.run.slots``, ``sim.run.link``); only time is the device's. Whoever waits
takes a turn: it sees what has landed, lets go of slots whose kernels have ended and hands over more copies. Nothing
else blocks.
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
from sim.eviction import NEVER
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, Counters
from sim.plan import Plan
from sim.run.clock import Clock
from sim.run.link import Transfer
from sim.run.slots import LOADING, RESIDENT
from sim.run.terms import Terms

STUCK_SECONDS = 60.0
"""Without anything arriving, ending or being computed, a run is given up."""
SWITCH_SECONDS = 2e-5
"""After so long a thread that computes gets the interpreter from the one that looks again and again."""
PAUSE_SECONDS = 5e-5
"""Between two turns while a thread of the host computes: it needs the processor more."""
REQUESTS_AT_ONCE = 32
"""Requests that are made before the host does something else: the link must not run dry, nor the device."""
TURNS_BETWEEN_LOOKS = 256
"""Turns between looks at the clock and at whether somebody wants the run to end."""

Moment = tuple[list[tuple[int, np.ndarray]], int, list[tuple[int, int, int]]]
"""What is decided at a moment: values from an expert on, ns of prediction, requests (expert, call, priority)."""


class Stopped(Exception):
    """Somebody wants the run to end."""


@dataclass
class Times:
    """Marks between which the device did something, to be read when the run is over."""

    layer: list[tuple[int, Event, Event]] = field(default_factory=list)
    shared: list[tuple[int, Event, Event]] = field(default_factory=list)
    experts: list[tuple[int, Event, Event]] = field(default_factory=list)
    head: list[tuple[int, Event, Event]] = field(default_factory=list)
    stall_demand: list[tuple[int, Event, Event]] = field(default_factory=list)
    stall_late: list[tuple[int, Event, Event]] = field(default_factory=list)
    stall_host: list[tuple[int, Event, Event]] = field(default_factory=list)


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
        first_call: of each expert, for clairvoyant rules.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        shape: tuple[int, int],
        plan: Plan,
        terms: Terms,
        predictions: Predictions,
        *,
        check: bool = False,
        stop: Callable[[], bool] = lambda: False,
        room: Room | None = None,
        first_call: np.ndarray | None = None,
    ) -> None:
        self.device: Any = device
        self.plan = plan
        self.n_layers, self.n_experts = shape
        self.counters = Counters()
        self.cache = DeviceCache(
            device, store.size, *shape, terms.slots, plan.eviction, first_call, room
        )  # fmt: skip
        self.link = CopyLink(
            Clock(), self.cache, store, device, terms.chunks, terms.discipline, self.counters, stamped=check
        )
        self.checker = Checker(self.device, self.cache, self.n_experts) if check else None
        self.times = Times()
        self.found = bytearray()
        """What each look-up found; 0 is REUSE_HIT."""
        self.predict: list[int] = []
        """Time spent predicting on the critical path, a step, ns."""
        self._next_call: list[int] = []
        self._to_host: list[bool] = []
        self._predictions, self._stop = predictions, stop
        self._holding: deque[tuple[Event, list[int]]] = deque()
        self._asides: list[tuple[Event, list[tuple[int, int, int]]]] = []
        self._to_request: Iterator[tuple[int, int, int]] | None = None
        self._moved_at = time.monotonic()
        self._waits_for = ("the first step", -1)
        self._turns = 0

    def _copy_all(self) -> None:
        """Have every expert there before the first step, which counts nowhere."""
        for expert in range(self.n_layers * self.n_experts):
            self.link.demand(expert)
            self.link.kick()
            self.cache.used[expert] = 1
        self._until(lambda: not self.link.moving, "all experts before step", 0)
        self.counters.demand_bytes[:] = [0, 0]

    # -- one call ------------------------------------------------------------------------------------------------

    def _look_up(self, call: int, needed: list[int], first: int) -> set[int]:
        """Find each needed expert resident, under way or absent; return those under way."""
        self._request_all()
        cache, link, found = self.cache, self.link, self.found
        state, used, pool, rules, next_call = cache.state, cache.used, cache.pool, cache.rules, self._next_call
        late: set[int] = set()
        for i, expert in enumerate(needed, first):
            if state[expert] == RESIDENT:
                if not used[expert]:
                    found[i] = PREFETCH_HIT
                    used[expert] = 1
                    self.counters.useful_prefetch(expert)
            else:
                link.forget_if_passed(expert, call)
                transfer = link.transfers.get(expert)
                if transfer is not None:
                    found[i] = LATE_IN_FLIGHT if state[expert] == LOADING else LATE_QUEUED
                    self.counters.late[transfer.phase] += 1
                    late.add(expert)
                    link.demand(expert)
                else:
                    hosted = bool(self._to_host) and self._to_host[i]
                    found[i] = HOSTED if hosted else MISS
                    if hosted:
                        continue  # it gets no slot, so its pool's rule hears nothing of it
            rules[pool[expert]].needed(expert, next_call[i] if next_call else NEVER)
        return late

    def _rest(self, call: int, late: set[int]) -> list[Transfer]:
        """Insist on what was requested for ``call``, is under way and is not needed; return it."""
        link, wanted, n_experts = self.link, self.cache.wanted_until, self.n_experts
        first = call % self.n_layers * n_experts
        return [
            link.insist(expert)
            for expert in range(first, first + n_experts)
            if expert in link.transfers and expert not in late and wanted[expert] == call
        ]

    def _claim(self, group: list[int]) -> tuple[list[int], list[Transfer]]:
        """Pin a wave and demand what it lacks: what is resident, and what to wait for, those under way first."""
        link, pinned, state = self.link, self.cache.pinned, self.cache.state
        ready: list[int] = []
        under_way: list[Transfer] = []
        absent: list[Transfer] = []
        for expert in group:
            pinned[expert] = 1
            if state[expert] == RESIDENT:
                ready.append(expert)
            else:
                (under_way if expert in link.transfers else absent).append(link.demand(expert))
        return ready, under_way + absent

    def _stand_still(self, call: int, transfers: list[Transfer], late: bool, since: Event | None = None) -> Event:
        """Have the computing stream wait for ``transfers``, from ``since`` or now, and time that; returns its end."""
        idle = self.device.compute.mark() if since is None else since
        for transfer in transfers:
            if transfer.event is None:  # no slot is free yet
                self._until(partial(_handed_over, transfer), "a slot for expert", transfer.expert)
            self._wait_for(transfer)
        end: Event = self.device.compute.mark()
        stalls = self.times.stall_late if late else self.times.stall_demand
        stalls.append((call, idle, end))
        return end

    def _stand_still_for_rest(self, call: int, rest: list[Transfer]) -> None:
        """Have the computing stream wait for what of ``rest`` is still under way, though nobody needs it."""
        under_way = [transfer for transfer in rest if self.link.transfers.get(transfer.expert) is transfer]
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
        for `STUCK_SECONDS`, and Stopped.
        """
        self._waits_for, self._moved_at = (what, number), time.monotonic()
        while not done():
            self._turn(some)

    def _until_thread(self, done: Callable[[], bool], progress: Callable[[], int], what: str, number: int) -> None:
        """The same while a thread of the host works: leave it the processor, and see its ``progress``."""
        self._waits_for, self._moved_at = (what, number), time.monotonic()
        seen = progress()
        while not done():
            self._turn()
            time.sleep(PAUSE_SECONDS)
            if progress() != seen:
                seen, self._moved_at = progress(), time.monotonic()

    def _await(self, event: Event, what: str, number: int, demands_follow: bool = False) -> None:
        """Look after the link until ``event`` has been seen; all that was launched before it is over then.

        Where ``demands_follow`` no prefetch is handed over any more: at one instant landings come first, then demands.
        """
        self._until(event.query, what, number)
        if demands_follow:
            self.link.poll(follow=False)
            self._let_go(kick=False)
        else:
            self._turn()

    def _await_free(self) -> None:
        """Until no wave holds its slots any more."""
        self._until(lambda: not self._holding, "earlier kernels in layer call", self.link.passed)

    def _turn(self, some: bool = False) -> None:
        """What the host does while it waits."""
        if self.link.poll(some=some) | self._let_go(kick=not some):
            self._moved_at = time.monotonic()
        for index, (event, requests) in enumerate(self._asides):
            if event.query():
                del self._asides[index]
                self._request(requests)
                self.link.kick()
                break
        if self._to_request is not None:
            self._request_some()
            self.link.kick(some)
        self.device.breathe()
        self._turns += 1
        if not self._turns % TURNS_BETWEEN_LOOKS:
            if self._stop():
                raise Stopped
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
            for expert in group:
                self.cache.pinned[expert] = 0
                if not self.plan.keep and expert not in self.cache.own:
                    self.cache.release(expert)
            gone = True
        if gone and kick:
            self.link.kick()
        return gone

    # -- the policy ----------------------------------------------------------------------------------------------

    def _decide(self, decision: Moment, number: int) -> None:
        """Execute what is decided at a moment of step ``number``: new values, the work of predicting, requests."""
        thought = self._think(decision)
        self._revalue(decision)
        if thought is not None:
            self._answer(thought, number)
        self._ask(decision)

    def _think(self, decision: Moment) -> tuple[int, Event] | None:
        """Begin to predict, if the step waits for the answer: what that took, ns, and its end."""
        if not (decision[1] and self.plan.prediction.critical):
            return None
        begin = time.perf_counter_ns()
        event = self._predictions.begin(decision[1], critical=True)
        return time.perf_counter_ns() - begin, event

    def _answer(self, thought: tuple[int, Event], number: int) -> None:
        """Wait for a prediction of step ``number``; what the host did since it began is the loop's."""
        spent, event = thought
        begin = time.perf_counter_ns()
        self._until(event.query, "the answer of a prediction in step", number, some=True)
        self.predict[number] += spent + time.perf_counter_ns() - begin

    def _revalue(self, decision: Moment) -> None:
        """Tell the cache of new values."""
        for first, row in decision[0]:
            self.cache.valued(first, row)

    def _ask(self, decision: Moment) -> None:
        """Make the requests, behind a prediction that nobody waits for if there is one."""
        _, cost, requests = decision
        if cost and not self.plan.prediction.critical:
            self._asides.append((self._predictions.begin(cost, critical=False), requests))
        else:
            self._request(requests)

    def _request(self, requests: list[tuple[int, int, int]]) -> None:
        """Make requests: for what is there or under way and the first others at once, the rest while the host waits.

        None is put off beyond the next look-up, step or stream of a layer.
        """
        self._request_all()
        if len(requests) <= REQUESTS_AT_ONCE:
            self.link.request_all(requests)
            return
        self._to_request = iter(self.link.keep(requests))
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

    def _stream_next_layer(self, call: int) -> None:
        self._request_all()
        first = call % self.n_layers * self.n_experts
        self.link.request_all([(expert, call, call) for expert in range(first, first + self.n_experts)])

    def _spent(self, spans: list[tuple[int, Event, Event]], size: int) -> np.ndarray:
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

    Whoever waits for a device looks again and again, so it always wants the interpreter. A thread that computes gives
    that up in every operation of torch, and by Python's own setting waits 5 ms each time to have it back.
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
