"""Replay on a real device: the simulator's decisions, executed with streams and events.

The host goes through the calls of a workload. For each it launches what comes before the route, waits for the router's
answer (as it must in use) and lets the trace's route take its place; looks all experts of the call up at once; hands
the missing ones to the link; launches the residents at once and the others behind the events of their copies; makes the
policy's requests; and launches the next layer's part while the experts still run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from realrun.device.devices import Event
from realrun.device.torch_device import the_torch
from realrun.engine.experts import Experts, Rows
from realrun.engine.host_experts import HostedExperts
from realrun.engine.layers import Layers, Step, pairs_of
from realrun.engine.loop import Loop, StopRequested, undisturbed
from realrun.engine.portions import portions
from realrun.engine.predicting import Predictions
from realrun.engine.rig import Rig
from sim.log import Log
from sim.plan import Plan
from sim.run.link_queue import Transfer
from sim.run.terms import RunTerms
from sim.workload import Workload
from traces.schema import PREFILL

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    Attributes:
        log: as a simulated run's, of the steps that were finished.
        steps: how many those are.
        complete: whether that is all of them.
        layer_ns, shared_ns, experts_ns: device time of each call's parts (calls,) int64; ``head_ns`` (steps,).
        link_busy_ns: how long copies were under way, of the decode steps that were finished, by the host's clock.
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
    link_busy_ns: int
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
            awaited_ns=None,
            split_wave_ns=None,
            head_ns=self.head_ns,
        )


@dataclass(frozen=True)
class Running:
    """A layer call once its route is known: its number, its step, the pairs of each expert and the rows of all."""

    number: int
    step: Step
    pairs: dict[int, tuple[int, int]]
    take: Rows


class RealRun(Loop):
    """One replay; ``execute`` does it.

    Args:
        rig, layers: the device, the experts in host memory and the model around them.
        work: the calls.
        routes: the trace's experts (T, L, K), which take the place of the router's answers.
        plan, terms, predictions, options: as in ``realrun.engine.loop.Loop``.
        keep_outputs: keep each step's logits.
        progress: told the number of steps done.
    """

    def __init__(
        self, rig: Rig, layers: Layers, work: Workload, routes: np.ndarray, plan: Plan, terms: RunTerms,
        predictions: Predictions, *, keep_outputs: bool = False, progress: Callable[[int], None] = lambda steps: None,
        **options: Any,
    ) -> None:  # fmt: skip
        shape = (work.n_layers, work.n_experts)
        super().__init__(rig.device, rig.store, shape, plan, terms, predictions, work=work, **options)
        self.model, self.layers, self.work, self._routes = rig.model, layers, work, routes
        self._progress, self._keep_outputs = progress, keep_outputs
        self.experts = Experts(rig.model, self.cache)
        self.finish: list[int] = []
        self._busy: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.predict = [0] * work.schedule.n_steps
        self._at_moments: dict[int, Any] = self._moments()
        self._hosted = HostedExperts(self.device, rig.store, rig.model) if plan.host is not None else None

    def execute(self) -> Outcome:
        """Run to the last step's end, or until ``stop`` says so.

        Raises SlotFault if a check fails, RunError if the device does not go on.
        """
        complete = True
        with self.device.running(), undisturbed():
            self._prepare()
            self._start = time.perf_counter_ns()
            try:
                self._steps()
                self._request_all()
            except StopRequested:
                complete = False
            finally:
                self.link.close()
                self.device.synchronize()
                self._end()
            return self._outcome(complete)

    def _moments(self) -> dict[int, Any]:
        return self.plan.by_moment(self.work.n_experts)

    # -- before the first step -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Warm-up, which no figure of the report counts: libraries, kernels, graphs, and the all-resident case."""
        schedule = self.work.schedule
        top_k = self._routes.shape[2]
        rows = np.diff(schedule.offsets)
        for count in np.unique(rows[schedule.phase != PREFILL]).tolist():
            self._warm_up(self.layers.decode_step(count, top_k), {1, min(2, count), count}, prompt=False)
        if (schedule.phase == PREFILL).any():
            longest = int(rows[schedule.phase == PREFILL].max())
            served = {1, min(2, longest), longest, *np.unique(np.minimum(self.work.tokens, longest)).tolist()}
            self._warm_up(Step(self.model, longest, top_k, self.device, prompt=True), served, prompt=True)
        prediction = self.plan.prediction
        self._predictions.prepare({*prediction.ns.tolist(), prediction.prompt_ns})
        self.device.synchronize()
        if self.plan.everything_resident:
            self.copy_all()
        self.device.synchronize()

    def _warm_up(self, step: Step, served: set[int], prompt: bool) -> None:
        """One step's kernels, experts for each number of rows ``served``: what a library first uses, it loads then."""
        for layer in dict.fromkeys((0, self.work.n_layers - 1, self.work.n_layers)):
            self.layers.launch(step, layer, prompt)
            if layer < self.work.n_layers:
                self.layers.launch_shared(step, layer)
        (take,) = self._take(np.zeros((1, step.rows * step.top_k), np.int64))
        for count in sorted(served):
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
        pairs = self._pairs()
        for number, phase in enumerate(work.schedule.phase.tolist()):
            self._request_all()
            self.link.phase = phase
            if plan.ring and not number:
                self._stream_layer(0)
                self.link.kick()
            step, take = self._step(number, phase == PREFILL)
            if phase == PREFILL and plan.prediction.prompt_ns:
                self._answer(self._begin_predicting(plan.prediction.prompt_ns), number)
            moment = number * (work.n_layers + 1)
            if moment in self._at_moments:
                self.decide(self._at_moments[moment], number)
                self.link.kick()
            for layer in range(work.n_layers):
                call = number * work.n_layers + layer
                first, end = offsets[call], offsets[call + 1]
                of = dict(zip(experts[first:end], pairs[first:end], strict=True))
                self._until_route(step, layer, call, phase == PREFILL)
                self._call(Running(call, step, of, take[layer]), number, first)
            self._finish(step, number, phase == PREFILL)

    def _pairs(self) -> list[tuple[int, int]]:
        """The pairs of each look-up, from and to, counted from the first of its call."""
        work = self.work
        ends = np.cumsum(work.tokens)
        begins = ends - work.tokens
        base = begins[work.offsets[work.call]]
        return list(zip((begins - base).tolist(), (ends - base).tolist(), strict=True))

    def _step(self, number: int, prompt: bool) -> tuple[Step, list[Rows]]:
        """The tensors of a step and the row of each pair of each layer."""
        schedule, layers = self.work.schedule, self.layers
        rows = schedule.rows[schedule.offsets[number] : schedule.offsets[number + 1]]
        routes = self._routes[rows]
        count, top_k = len(rows), routes.shape[2]
        new = Step(self.model, count, top_k, self.device, prompt=True) if prompt else None
        step = new or layers.decode_step(count, top_k)
        if count == 1 and not prompt and (routes >= 0).all():  # one row's pairs: in the order that its step has anyway
            step.choose(None, self.device)
            return step, [Rows([0] * top_k)] * self.work.n_layers
        take, give = pairs_of(routes, none=count * top_k)
        step.choose(give if count > 1 or (routes < 0).any() else None, self.device)
        return step, self._take(take)

    def _take(self, take: np.ndarray) -> list[Rows]:
        """Rows of pairs of each layer (L, P), on the device as well.

        They are copied there once a step: a copy for each expert would wait behind experts on the same link.
        """
        there = the_torch().from_numpy(take).to(self.device.torch_device)
        return [Rows(*both) for both in zip(take.tolist(), there.unbind(0), strict=True)]

    def _until_route(self, step: Step, layer: int, call: int, prompt: bool) -> None:
        """Run what comes before a route and wait for the router's answer."""
        self.link.poll()
        compute = self.device.compute
        begin = compute.mark()
        self.layers.launch(step, layer, prompt)
        route = compute.mark()
        self.times.layer.append((call, begin, route))
        if self.model.shared_ffn:
            self.layers.launch_shared(step, layer)
            self.times.shared.append((call, route, compute.mark()))
        self._await(route, "the route of layer call", call, demands_follow=True)

    def _finish(self, step: Step, number: int, prompt: bool) -> None:
        """Run what comes after the last routed layer and wait for the token."""
        compute = self.device.compute
        begin = compute.mark()
        self.layers.launch(step, self.work.n_layers, prompt)
        if self.checker:
            self.checker.fetch()
        end = compute.mark()
        self._await(end, "the token of step", number)
        self.times.head.append((number, begin, end))
        self._busy.append(self.link.busy_ns())  # before the clock: no longer than the step lasts
        self.finish.append(time.perf_counter_ns() - self._start)
        if self.checker:
            self.checker.read(number)
        if self._keep_outputs:
            self.outputs.append(step.logits.clone().cpu())
        self._progress(number + 1)

    # -- one call ------------------------------------------------------------------------------------------------

    def _call(self, call: Running, number: int, first: int) -> None:
        """One routed layer of step ``number`` once its route is known; its look-ups are those from ``first`` on."""
        calls, link, plan, needed = self.calls, self.link, self.plan, [*call.pairs]
        decision = self._decide_before(self._at_moments.get(call.number + number + 1), number)
        self._begin_call(call.number, needed, first)
        since = self.device.compute.mark() if calls.late or calls.missed else None
        hosted = [needed[i - first] for i in calls.hosted]
        groups = calls.split(needed, first)
        ready, waiting = calls.claim(groups[0])
        thought = self._think(decision) if decision is not None else None
        link.kick(some=True)
        if decision is not None and thought is not None:  # the step waits for the answer; a demand is on its way
            self._revalue(decision)
            self._answer(thought, number)
            since = None
        beside = self._begin_hosted(call, hosted) if plan.host is not None and plan.host.beside else None
        last = self._launch_ready(call, ready, waiting, since)
        link.kick()
        streams = calls.streams(call.number)
        if decision is not None:
            if thought is None:
                self._revalue(decision)
            self._ask(decision)
        if streams:
            self._stream_layer(call.number + 1)
        if inserts := calls.inserts(needed, first):
            self._request_all()
            calls.insert(call.number, inserts)
        if streams or inserts or decision is not None:
            link.kick()
        self._launch_late(call, groups[0], waiting, last)
        for group in groups[1:]:
            self._await_free()
            ready, waiting = calls.claim(group)
            link.kick()
            self._launch_late(call, group, waiting, self._launch_ready(call, ready, waiting, None))
        self._stand_still_for_others(call.number)
        if hosted:
            self._await_hosted(call, beside or self._begin_hosted(call, hosted))

    def _launch_ready(self, call: Running, ready: list[int], waiting: list[Transfer], since: Event | None) -> Event:
        """Run the residents of a wave; returns the mark from which on the stream waits for the others, if any.

        ``since`` marks when the others were asked for: the stream has stood still for their sake from there on.
        """
        if not ready:
            return self.device.compute.mark() if since is None else since
        begin = self.device.compute.mark()
        if waiting and since is not None:
            stalls = self.times.stall_late if waiting[0].expert in self.calls.late else self.times.stall_demand
            stalls.append((call.number, since, begin))
        return self._launch(call, ready, begin)

    def _launch(self, call: Running, experts: list[int], begin: Event) -> Event:
        """Run experts from the mark ``begin`` on; returns the end of their kernels."""
        compute, step = self.device.compute, call.step
        slots = self._slots(experts)
        pairs = [call.pairs[expert] for expert in experts]
        if self.checker:
            self.checker.launch(slots, experts, after=False)
            begin = compute.mark()
        for number, some in enumerate(portions(pairs, self.experts.few) if len(pairs) > 1 else [[0]]):
            if number:
                self.link.poll()  # launching takes a while: the link must not run dry meanwhile
            here = [slots[place] for place in some], [pairs[place] for place in some]
            compute.launch(self.experts.launch, step.states, step.outputs, *here, call.take)
        end: Event = compute.mark()
        self.times.experts.append((call.number, begin, end))
        if self.checker:
            self.checker.launch(slots, experts, after=True)
            end = compute.mark()
        return end

    def _slots(self, experts: list[int]) -> list[int]:
        """The slots of experts that are there or on their way."""
        return [self.cache.slot[expert] for expert in experts]

    def _launch_late(self, call: Running, group: list[int], waiting: list[Transfer], last: Event) -> None:
        """Run the experts that are on their way, each behind its copy; then hold the wave's slots until all is done."""
        for transfer in waiting:
            there = self._stand_still(call.number, [transfer], transfer.expert in self.calls.late, last)
            last = self._launch(call, [transfer.expert], there)
            self.cache.use(transfer.expert)
            self.link.poll()
        if group:
            self._hold(last, group)

    def _begin_hosted(self, call: Running, hosted: list[int]) -> Any:
        """Have the host start on a call's experts that run there; None if there are none."""
        if not hosted:
            return None
        assert self._hosted is not None
        return self._hosted.begin(call.step, hosted, [call.pairs[expert] for expert in hosted], call.take)

    def _await_hosted(self, call: Running, work: Any) -> None:
        """Wait for the host's experts and bring what they computed to the device."""
        assert self._hosted is not None
        idle = self.device.compute.mark()
        self._until_thread(work.done, self._hosted.progress, "the host's experts of layer call", call.number)
        self._hosted.bring(call.step, work.result())
        self.times.stall_host.append((call.number, idle, self.device.compute.mark()))

    def _end(self) -> None:
        if self._hosted:
            self._hosted.close()

    # -- what came of it -----------------------------------------------------------------------------------------

    def _found(self) -> np.ndarray:
        """What each look-up found (N,) uint8."""
        return np.frombuffer(bytes(self.calls.found), np.uint8)

    def _outcome(self, complete: bool) -> Outcome:
        steps = len(self.finish)
        calls = steps * self.work.n_layers
        times = self.times
        lookups = int(self.work.offsets[calls])
        return Outcome(
            log=Log(
                finish=np.array(self.finish, np.int64),
                found=self._found()[:lookups],
                stall_demand=self._spent(times.stall_demand, calls),
                stall_late=self._spent(times.stall_late, calls),
                predict=np.array(self.predict[:steps], np.int64),
                counters=self.counters,
                stall_host=self._spent(times.stall_host, calls) if self._hosted else np.zeros(0, np.int64),
            ),
            steps=steps,
            complete=complete,
            layer_ns=self._spent(times.layer, calls),
            shared_ns=self._spent(times.shared, calls),
            experts_ns=self._spent(times.experts, calls),
            head_ns=self._spent(times.head, steps),
            link_busy_ns=int(np.diff(self._busy, prepend=0)[self.work.schedule.phase[:steps] != PREFILL].sum()),
            checked=self.checker.checked if self.checker else 0,
            outputs=self.outputs,
        )
