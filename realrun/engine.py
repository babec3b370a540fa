"""The decode loop on a real device: the simulator's decisions, executed with streams and events.

The host goes through the calls of a workload. For each it launches what comes before the route, waits for the router's
answer (as it must in use) and lets the trace's route take its place; looks all experts of the call up at once; hands
the missing ones to the link; launches the residents at once and the others behind the events of their copies; makes the
policy's requests; and launches the next layer's part while the experts still run. Whenever it waits, it looks after the
link. Nothing else blocks.

Slots of a call are pinned from its look-up until the event after its last kernel has been seen. Counters, look-ups and
the order of service are the simulator's own (``sim.cache``, ``sim.link``); only time is the device's.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from realrun.check import Checker
from realrun.device import Device, Event
from realrun.device_cache import DeviceCache, Room
from realrun.experts import Experts
from realrun.faults import RunError
from realrun.host_store import HostStore
from realrun.hosted import HostedExperts
from realrun.layers import Layers, Step, pairs_of
from realrun.link import CopyLink
from realrun.measure.machine import the_torch
from realrun.predicting import Predictions
from sim.cache import LOADING, RESIDENT, waves
from sim.clock import Clock
from sim.engine import by_moment
from sim.eviction import NEVER, foresees
from sim.host import host_costs
from sim.link import Transfer
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, PREFILL, Counters, Log
from sim.model import ModelSpec
from sim.plan import Plan
from sim.terms import Terms
from sim.workload import Workload

if TYPE_CHECKING:
    import torch

STUCK_SECONDS = 120.0


class _Stop(Exception):
    """Somebody wants the run to end."""


@dataclass(frozen=True)
class Stage:
    """What runs of one model share: device, experts in host memory, and the model around them."""

    device: Device
    store: HostStore
    layers: Layers
    model: ModelSpec


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


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    Attributes:
        log: as a simulated run's, of the steps that were finished.
        steps: how many those are.
        complete: whether that is all of them.
        layer_ns, shared_ns, experts_ns: device time of each call's parts (calls,) int64; ``head_ns`` (steps,).
        checked: how many experts were compared with their stamps before they ran.
        outputs: the logits of each step, where they were to be kept.
    """

    log: Log
    steps: int
    complete: bool
    layer_ns: np.ndarray
    shared_ns: np.ndarray
    experts_ns: np.ndarray
    head_ns: np.ndarray
    checked: int
    outputs: "list[torch.Tensor]"

    def measured(self, work: Workload) -> Workload:
        """``work``, of the finished steps, with the times that were measured; a call's experts took equal shares."""
        count = np.maximum(1, np.diff(work.offsets))
        return replace(
            work,
            layer_ns=self.layer_ns,
            shared_ns=self.shared_ns + self.experts_ns % count,
            expert_ns=(self.experts_ns // count)[work.call],
            head_ns=self.head_ns,
        )


class RealRun:
    """One run; ``execute`` does it.

    Args:
        stage: the device and the model.
        work: the calls.
        routes: the trace's experts (T, L, K), which take the place of the router's answers.
        plan, terms: the policy's decisions and what ``sim.engine.settle`` made of them.
        predictions: does what the plan charges for predicting.
        check: compare every slot with its stamp, before and after its kernels.
        keep_outputs: keep each step's logits.
        stop: asked now and then whether the run should end early.
        progress: told the number of steps done.
        room: slots to use again.
    """

    def __init__(
        self,
        stage: Stage,
        work: Workload,
        routes: np.ndarray,
        plan: Plan,
        terms: Terms,
        predictions: Predictions,
        *,
        check: bool = False,
        keep_outputs: bool = False,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda steps: None,
        room: Room | None = None,
    ) -> None:
        self.stage, self.work, self.plan = stage, work, plan
        self.device: Any = stage.device
        self.counters = Counters()
        self._routes, self._predictions = routes, predictions
        self._stop, self._progress, self._keep_outputs = stop, progress, keep_outputs
        future = foresees(plan.eviction)
        self.cache = DeviceCache(
            self.device, stage.store.size, work.n_layers, work.n_experts, terms.slots, plan.eviction,
            work.first_call() if future else None, room,
        )  # fmt: skip
        self.link = CopyLink(
            Clock(), self.cache, stage.store, self.device, terms.chunks, terms.discipline, self.counters, stamped=check
        )
        self.experts = Experts(stage.model, self.cache)
        self.checker = Checker(self.device, self.cache, work.n_experts) if check else None
        self.times = Times()
        self.finish: list[int] = []
        self.found = bytearray(len(work.expert))  # REUSE_HIT is 0
        self.predict = [0] * work.schedule.n_steps
        self.outputs: list[torch.Tensor] = []
        self._hosted = HostedExperts(self.device, stage.store, stage.model) if plan.host is not None else None
        chosen = host_costs(work, plan.host).chosen.tolist() if plan.host is not None else None
        self._to_host: list[bool] = chosen or [False] * len(work.expert)
        self._next_call = work.next_call().tolist() if future else [NEVER] * len(work.expert)
        self._at_moments = by_moment(plan, work.n_experts)
        self._holding: deque[tuple[Event, list[int]]] = deque()
        self._asides: list[tuple[Event, list[tuple[int, int, int]]]] = []
        self._moved_at = time.monotonic()
        self._turns = 0

    def execute(self) -> Outcome:
        """Run to the last step's end, or until ``stop`` says so.

        Raises SlotFault if a check fails, RunError if the device does not go on.
        """
        complete = True
        with self.device.running(), _no_garbage():
            self._prepare()
            self._start = time.perf_counter_ns()
            try:
                self._steps()
            except _Stop:
                complete = False
            finally:
                self.link.close()
                self.device.synchronize()
                if self._hosted:
                    self._hosted.close()
            return self._outcome(complete)

    # -- before the first step -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Warm-up, which no figure of the report counts: libraries, kernels, graphs, and the all-resident case."""
        schedule = self.work.schedule
        top_k = self._routes.shape[2]
        rows = np.diff(schedule.offsets)
        for count in np.unique(rows[schedule.phase != PREFILL]).tolist():
            self._warm_up(self.stage.layers.decode_step(count, top_k), prompt=False)
        if (schedule.phase == PREFILL).any():
            longest = int(rows[schedule.phase == PREFILL].max())
            self._warm_up(Step(self.stage.model, longest, top_k, self.device, prompt=True), prompt=True)
        if self.plan.everything_resident:
            for expert in range(self.work.n_layers * self.work.n_experts):
                self.link.demand(expert)
                self.link.kick()
                self.cache.used[expert] = 1
            while self.link.moving:
                self._turn()
            self.counters.demand_bytes[:] = [0, 0]
        self.device.synchronize()

    def _warm_up(self, step: Step, prompt: bool) -> None:
        for layer in dict.fromkeys((0, self.work.n_layers - 1, self.work.n_layers)):
            self.stage.layers.launch(step, layer, prompt)
            if layer < self.work.n_layers:
                self.stage.layers.launch_shared(step, layer)
        take = self._take(np.zeros(step.rows * step.top_k, np.int64), prompt)
        for count in {1, min(2, step.rows), step.rows}:
            slots, pairs = [0], [(0, count)]
            self.device.compute.launch(self.experts.launch, step.states, step.outputs, slots, pairs, take)
        many = min(step.top_k, self.cache.n_slots)
        pairs = [(pair, pair + 1) for pair in range(many)]
        self.device.compute.launch(self.experts.launch, step.states, step.outputs, list(range(many)), pairs, take)
        for tensor in (step.outputs, step.tokens):  # every run begins alike
            self.device.compute.launch(tensor.zero_)
        self.device.synchronize()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _steps(self) -> None:
        work, plan = self.work, self.plan
        offsets, experts = work.offsets.tolist(), work.expert.tolist()
        tokens = np.cumsum(work.tokens) - work.tokens
        ends = (tokens + work.tokens).tolist()
        begins = tokens.tolist()
        for number, phase in enumerate(work.schedule.phase.tolist()):
            self.link.phase = phase
            step, take = self._step(number, phase == PREFILL)
            if phase == PREFILL and plan.prediction.prompt_ns:
                self._predicting(number, plan.prediction.prompt_ns)
            moment = number * (work.n_layers + 1)
            if moment in self._at_moments:
                self._decide(moment, number)
                self.link.kick()
            for layer in range(work.n_layers):
                call = number * work.n_layers + layer
                self._until_route(step, layer, call, phase == PREFILL)
                first, end = offsets[call], offsets[call + 1]
                base = begins[first] if end > first else 0
                pairs = [(begins[i] - base, ends[i] - base) for i in range(first, end)]
                self._call(call, number, first, experts[first:end], pairs, step, take[layer])
            self._finish(step, number, phase == PREFILL)

    def _step(self, number: int, prompt: bool) -> tuple[Step, Any]:
        """The tensors of a step and the row of each pair of each layer."""
        schedule, layers = self.work.schedule, self.stage.layers
        rows = schedule.rows[schedule.offsets[number] : schedule.offsets[number + 1]]
        routes = self._routes[rows]
        count, top_k = len(rows), routes.shape[2]
        step = (
            Step(self.stage.model, count, top_k, self.device, prompt=True)
            if prompt
            else layers.decode_step(count, top_k)
        )
        take, give = pairs_of(routes, none=count * top_k)
        step.choose(give if count > 1 or (routes < 0).any() else None, self.device)
        return step, self._take(take, prompt)

    def _take(self, take: np.ndarray, prompt: bool) -> Any:
        """Rows of pairs, on the device where they are many."""
        return the_torch().from_numpy(take).to(self.device.torch_device) if prompt else take.tolist()

    def _until_route(self, step: Step, layer: int, call: int, prompt: bool) -> None:
        """Run what comes before a route and wait for the router's answer."""
        compute = self.device.compute
        begin = compute.mark()
        self.stage.layers.launch(step, layer, prompt)
        route = compute.mark()
        self.times.layer.append((call, begin, route))
        if self.stage.model.shared_ffn:
            self.stage.layers.launch_shared(step, layer)
            self.times.shared.append((call, route, compute.mark()))
        self._await(route)

    def _finish(self, step: Step, number: int, prompt: bool) -> None:
        """Run what comes after the last routed layer and wait for the token."""
        compute = self.device.compute
        begin = compute.mark()
        self.stage.layers.launch(step, self.work.n_layers, prompt)
        if self.checker:
            self.checker.fetch()
        end = compute.mark()
        self._await(end)
        self.times.head.append((number, begin, end))
        self.finish.append(time.perf_counter_ns() - self._start)
        if self.checker:
            self.checker.read(number)
        if self._keep_outputs:
            self.outputs.append(step.logits.clone().cpu())
        self._progress(number + 1)

    # -- one call ------------------------------------------------------------------------------------------------

    def _call(
        self, call: int, number: int, first: int, needed: list[int], pairs: list[tuple[int, int]], step: Step, take: Any
    ) -> None:
        """One routed layer once its route is known."""
        link, plan = self.link, self.plan
        late = self._look_up(call, needed, first)
        rest = self._rest(call, late) if plan.ring else []
        link.passed = call
        moment = call + number + 1
        of = dict(zip(needed, pairs, strict=True))
        hosted = [expert for i, expert in enumerate(needed, first) if self.found[i] == HOSTED] if self._hosted else []
        if hosted:
            needed = [expert for expert in needed if expert not in hosted]
        groups = waves(self.cache, needed, link.demanded) if needed else [needed]
        if len(groups) > 1:
            link.awaited.update(expert for group in groups[1:] for expert in group)
        ready, waiting = self._claim(groups[0])
        link.kick()
        decision = self._at_moments.get(moment)
        thinks = decision is not None and decision[1] and plan.prediction.critical
        if thinks:  # the step waits for the answer; demands are on their way
            self._decide(moment, number)
        last = self._launch(call, ready, of, step, take)
        if decision is not None and not thinks:
            self._decide(moment, number)
        if self._streams(call):
            self._stream_next_layer(call + 1)
        link.kick()
        beside = self._begin_hosted(step, hosted, of, take) if plan.host is not None and plan.host.beside else None
        self._launch_late(call, groups[0], waiting, late, of, step, take, last)
        for group in groups[1:]:
            self._await_free()
            link.awaited.difference_update(group)
            ready, waiting = self._claim(group)
            link.kick()
            last = self._launch(call, ready, of, step, take)
            self._launch_late(call, group, waiting, late, of, step, take, last)
        for transfer in rest:
            if link.transfers.get(transfer.expert) is transfer:
                self._stand_still(call, transfer, late=True)
        if hosted:
            self._await_hosted(call, step, beside or self._begin_hosted(step, hosted, of, take))

    def _look_up(self, call: int, needed: list[int], first: int) -> set[int]:
        """Find each needed expert resident, under way or absent; return those under way."""
        cache, link, counters, found = self.cache, self.link, self.counters, self.found
        late: set[int] = set()
        for i, expert in enumerate(needed, first):
            state = cache.state[expert]
            if state == RESIDENT:
                if not cache.used[expert]:
                    found[i] = PREFETCH_HIT
                    cache.used[expert] = 1
                    counters.useful_prefetch(expert)
            else:
                link.forget_if_passed(expert, call)
                transfer = link.transfers.get(expert)
                if transfer is not None:
                    found[i] = LATE_IN_FLIGHT if state == LOADING else LATE_QUEUED
                    counters.late[transfer.phase] += 1
                    late.add(expert)
                    link.demand(expert)
                else:
                    found[i] = HOSTED if self._to_host[i] else MISS
                    if self._to_host[i]:
                        continue  # it gets no slot, so its pool's rule hears nothing of it
            cache.needed(expert, self._next_call[i])
        return late

    def _rest(self, call: int, late: set[int]) -> list[Transfer]:
        """Insist on what was requested for ``call``, is under way and is not needed; return it."""
        link, wanted, n_experts = self.link, self.cache.wanted_until, self.work.n_experts
        layer = call % self.work.n_layers * n_experts
        return [
            link.insist(expert)
            for expert in range(layer, layer + n_experts)
            if expert not in late and wanted[expert] == call and expert in link.transfers
        ]

    def _claim(self, group: list[int]) -> tuple[list[int], list[Transfer]]:
        """Pin a wave and demand what it lacks: what is resident, and what to wait for, those under way first."""
        cache, link = self.cache, self.link
        ready: list[int] = []
        under_way: list[Transfer] = []
        absent: list[Transfer] = []
        for expert in group:
            cache.pinned[expert] = 1
            if cache.state[expert] == RESIDENT:
                ready.append(expert)
            else:
                (under_way if expert in link.transfers else absent).append(link.demand(expert))
        return ready, under_way + absent

    def _launch(
        self, call: int, experts: list[int], of: dict[int, tuple[int, int]], step: Step, take: Any
    ) -> Event | None:
        """Run experts whose slots are ready; returns the end of their kernels, None if there are none."""
        if not experts:
            return None
        compute = self.device.compute
        slots = [self.cache.slot[expert] for expert in experts]
        pairs = [of[expert] for expert in experts]
        if self.checker:
            self.checker.launch(slots, experts, after=False)
        begin = compute.mark()
        compute.launch(self.experts.launch, step.states, step.outputs, slots, pairs, take)
        end: Event = compute.mark()
        self.times.experts.append((call, begin, end))
        if self.checker:
            self.checker.launch(slots, experts, after=True)
            end = compute.mark()
        return end

    def _launch_late(
        self, call: int, group: list[int], waiting: list[Transfer], late: set[int], of: dict[int, tuple[int, int]],
        step: Step, take: Any, last: Event | None,
    ) -> None:  # fmt: skip
        """Run the experts that are on their way, each behind its copy; then hold the wave's slots until all is done."""
        for transfer in waiting:
            self._stand_still(call, transfer, transfer.expert in late, last)
            last = self._launch(call, [transfer.expert], of, step, take)
            self.cache.used[transfer.expert] = 1
        if group:
            assert last is not None
            self._hold(last, group)

    def _stand_still(self, call: int, transfer: Transfer, late: bool, since: Event | None = None) -> None:
        """Have the computing stream wait for ``transfer``, from ``since`` on or now, and time that."""
        idle = self.device.compute.mark() if since is None else since
        while transfer.event is None:  # no slot is free yet
            self._turn()
        self._wait_for(transfer)
        stalls = self.times.stall_late if late else self.times.stall_demand
        stalls.append((call, idle, self.device.compute.mark()))

    def _wait_for(self, transfer: Transfer) -> None:
        """The computing stream waits for a copy; the host does not."""
        self.device.compute.wait(transfer.event)

    def _hold(self, until: Event, group: list[int]) -> None:
        """Keep the slots of a wave pinned until its last kernel has ended."""
        self._holding.append((until, group))

    def _begin_hosted(self, step: Step, hosted: list[int], of: dict[int, tuple[int, int]], take: Any) -> Any:
        """Have the host start on a call's experts that run there; None if there are none."""
        if not hosted:
            return None
        assert self._hosted is not None
        return self._hosted.begin(step, hosted, [of[expert] for expert in hosted], take)

    def _await_hosted(self, call: int, step: Step, work: Any) -> None:
        """Wait for the host's experts and bring what they computed to the device."""
        assert self._hosted is not None
        idle = self.device.compute.mark()
        while not work.done():
            self._turn()
        work.result()
        self._hosted.bring(step)
        self.times.stall_host.append((call, idle, self.device.compute.mark()))

    # -- waiting -------------------------------------------------------------------------------------------------

    def _await(self, event: Event) -> None:
        """Look after the link until ``event`` has been seen; all that was launched before it is over then."""
        while not event.query():
            self._turn()
        self._turn()

    def _await_free(self) -> None:
        """Until no wave holds its slots any more."""
        while self._holding:
            self._turn()

    def _turn(self) -> None:
        """What the host does while it waits."""
        if self.link.poll() | self._let_go():
            self._moved_at = time.monotonic()
        for index, (event, requests) in enumerate(self._asides):
            if event.query():
                del self._asides[index]
                self._request(requests)
                self.link.kick()
                break
        self.device.breathe()
        self._turns += 1
        if not self._turns % 256:
            if self._stop():
                raise _Stop
            if time.monotonic() - self._moved_at > STUCK_SECONDS:
                queued = sorted(self.link.transfers)[:8]
                raise RunError(f"nothing has moved for {STUCK_SECONDS:.0f} s; experts asked for: {queued}")

    def _let_go(self) -> bool:
        """Free the slots of waves whose kernels have ended."""
        gone = False
        while self._holding and self._holding[0][0].query():
            self.link.poll()  # their copies ended before their kernels
            _, group = self._holding.popleft()
            for expert in group:
                self.cache.pinned[expert] = 0
                if not self.plan.keep:
                    self.cache.release(expert)
            self.link.kick()
            gone = True
        return gone

    # -- the policy ----------------------------------------------------------------------------------------------

    def _decide(self, moment: int, number: int) -> None:
        """Execute the plan at a moment: new values, the work of predicting, requests."""
        values, cost, requests = self._at_moments[moment]
        for first, row in values:
            self.cache.valued(first, row)
        if cost and self.plan.prediction.critical:
            self._predicting(number, cost)
        elif cost:
            self._asides.append((self._predictions.begin(cost, critical=False), requests))
            return
        self._request(requests)

    def _predicting(self, number: int, ns: int) -> None:
        begin = time.perf_counter_ns()
        self._await(self._predictions.begin(ns, critical=True))
        self.predict[number] += time.perf_counter_ns() - begin

    def _request(self, requests: list[tuple[int, int, int]]) -> None:
        link = self.link
        for expert, call, priority in requests:
            if call > link.passed:
                link.request(expert, call, priority)

    def _streams(self, call: int) -> bool:
        """Whether the experts of the call after this one are copied while this one computes."""
        if self.plan.ring:
            return call + 1 < self.work.n_calls
        prefill = self.plan.stream_prefill and self.link.phase == PREFILL
        return prefill and (call + 1) % self.work.n_layers != 0

    def _stream_next_layer(self, call: int) -> None:
        n_experts = self.work.n_experts
        layer = call % self.work.n_layers
        for expert in range(layer * n_experts, (layer + 1) * n_experts):
            self.link.request(expert, call, call)

    # -- what came of it -----------------------------------------------------------------------------------------

    def _outcome(self, complete: bool) -> Outcome:
        steps = len(self.finish)
        calls = steps * self.work.n_layers
        times = self.times
        lookups = int(self.work.offsets[calls])
        return Outcome(
            log=Log(
                np.array(self.finish, np.int64),
                np.frombuffer(bytes(self.found[:lookups]), np.uint8),
                self._spent(times.stall_demand, calls),
                self._spent(times.stall_late, calls),
                np.array(self.predict[:steps], np.int64),
                self.counters,
                self._spent(times.stall_host, calls) if self._hosted else np.zeros(0, np.int64),
            ),
            steps=steps,
            complete=complete,
            layer_ns=self._spent(times.layer, calls),
            shared_ns=self._spent(times.shared, calls),
            experts_ns=self._spent(times.experts, calls),
            head_ns=self._spent(times.head, steps),
            checked=self.checker.checked if self.checker else 0,
            outputs=self.outputs,
        )

    def _spent(self, spans: list[tuple[int, Event, Event]], size: int) -> np.ndarray:
        """Device time between marks, summed by number, of the first ``size`` numbers."""
        total = np.zeros(size, np.int64)
        for index, begin, end in spans:
            if index < size:
                total[index] += self.device.between(begin, end)
        return total


@contextmanager
def _no_garbage() -> Iterator[None]:
    """No pauses of Python's collector while microseconds count."""
    was = gc.isenabled()
    gc.collect()
    gc.freeze()  # capturing a graph collects too: let it find little to look through
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()
