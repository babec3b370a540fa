"""The reference engine: a workload under a plan, as SimPy processes, in whole nanoseconds.

Two processes run side by side: the GPU, which computes one layer call after another, and the link (``sim.run.link``),
which copies experts. A call goes like this. Attention and router run; the route is now known and all experts of the
call are looked up at once (``sim.run.call`` has the rules); those that are neither resident nor under way are demanded,
or run on the host where the plan has it so and it is cheaper; the policy's requests of this moment are made; resident
experts run, then those under way, then those demanded, each as soon as it is there. A call that needs more experts than
its slots hold runs in waves, residents first.

A run is a pure function of workload, plan and terms (``sim.run.terms``).
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
from simpy import Event

from sim.eviction import Scored, foresees
from sim.log import Counters, Log
from sim.plan import Decision, Plan
from sim.run.call import LayerCalls
from sim.run.clock import ASIDE, Clock
from sim.run.faults import SimulationError
from sim.run.host_thread import HostThread
from sim.run.link import Link
from sim.run.link_queue import Transfer
from sim.run.observer import Observer, Stall, Work
from sim.run.slots import RESIDENT, ExpertCache
from sim.run.terms import RunTerms
from sim.schedules.pipeline import LANES, Lanes
from sim.scorer import Scoring
from sim.workload import Workload
from traces.schema import PREFILL


@dataclass
class Run:
    """One run of the reference engine; ``log()`` executes it.

    Args:
        work: the calls.
        plan: the policy's decisions.
        terms: what the run is held to, see ``sim.run.terms.settle``.
        observer: told of everything that happens.
        progress: called with the number of steps done, now and then and at the end.

    """

    work: Workload
    plan: Plan
    terms: RunTerms
    observer: Observer | None = None
    progress: Callable[[int], None] | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        work, plan, terms = self.work, self.plan, self.terms
        slots = terms.slots
        self.env = Clock()
        first_call = work.first_call() if foresees(plan.eviction) else None
        self.cache = ExpertCache(
            work.expert_bytes, work.n_experts, slots.capacity, slots.pool, plan.eviction, first_call, slots.reserved,
            slots.shared,
        )
        self.host = None if work.host_thread is None else HostThread(work.host_thread, self.counters)
        copy_ns = [ns for ns in work.copy_ns for _ in range(work.n_experts)]
        self.link = Link(
            self.env,
            self.cache,
            copy_ns=copy_ns.__getitem__,
            latency_ns=work.latency_ns,
            chunks=terms.chunks,
            discipline=terms.discipline,
            counters=self.counters,
            observer=self.observer,
            chained=work.chained,
            host=self.host,
        )
        self._scoring = scoring = None if plan.scorer is None else Scoring(plan.scorer, len(self.cache.state))
        if scoring is not None:
            for rule in self.cache.rules:
                cast(Scored, rule).worths = scoring.values
            self.cache.before_eviction = lambda: scoring.refresh(self.env.now)
        self._host = terms.host
        self.calls = LayerCalls(plan, self.link, work.n_layers, work.n_experts, work, terms.host)
        if plan.everything_resident:
            self.cache.fill()
        n_steps = work.schedule.n_steps
        self.finish = [0] * n_steps
        self.found = self.calls.found
        self.stall_demand = [0] * work.n_calls
        self.stall_late = [0] * work.n_calls
        self.stall_host = [0] * work.n_calls
        self.waited = [0] * work.n_calls
        self.predict = [0] * n_steps
        self._lanes = None if terms.preparation is None else Lanes(terms.preparation)
        self._at_moments = plan.by_moment(work.n_experts)
        self._may_stream = plan.stream_prefill or plan.ring
        self._before_demands = plan.prediction.before_demands
        self._may_owe = self.observer is None and plan.prediction.critical and self.host is None
        self._owed = 0  # ns of GPU work done since the clock last moved; only while the link is idle

    def log(self) -> Log:
        """Run to the last step's end and return what happened."""
        gpu = self.env.process(self._gpu())
        try:
            self.env.run(until=gpu)
        except RuntimeError as stuck:
            if gpu.is_alive and "No scheduled events left" in str(stuck):
                queued = sorted(self.link.transfers)
                raise SimulationError(
                    f"deadlock at {self.env.now} ns: the GPU waits and nothing moves; experts asked for: {queued[:8]}"
                ) from None
            raise
        self.link.close()
        return Log(
            finish=np.array(self.finish, np.int64),
            found=np.frombuffer(bytes(self.found), np.uint8),
            stall_demand=np.array(self.stall_demand, np.int64),
            stall_late=np.array(self.stall_late, np.int64),
            predict=np.array(self.predict, np.int64),
            counters=self.counters,
            stall_host=np.array(self.stall_host if self._host is not None else [], np.int64),
            waited=np.array(self.waited if self.work.awaited_ns is not None else [], np.int64),
        )

    # -- the GPU -------------------------------------------------------------------------------------------------

    def _gpu(self) -> Generator[Event, None, None]:
        work, env, link = self.work, self.env, self.link
        n_layers = work.n_layers
        offsets, experts = work.offsets.tolist(), work.expert.tolist()
        layer_ns, shared_ns = work.layer_ns.tolist(), work.shared_ns.tolist()
        head_ns, phases = work.head_ns.tolist(), work.schedule.phase.tolist()
        self._expert_ns, self._if_awaited_ns = work.expert_ns.tolist(), work.if_awaited_ns.tolist()
        self._launch_ns = work.launch_ns
        self._split_wave_ns = [] if work.split_wave_ns is None else work.split_wave_ns.tolist()
        self._single = [] if work.split_wave_ns is None and self.host is None else work.single.tolist()
        observer = self.observer
        self._moves = [] if work.move_ns is None else work.move_ns.tolist()
        for step, phase in enumerate(phases):
            began = env.now
            link.phase = phase
            yield from self._begin_step(step, phase)
            if self.host is not None:
                self.host.await_device(env.now)
            for layer in range(n_layers):
                call = step * n_layers + layer
                if self._alone():
                    self._owed += layer_ns[call]
                else:
                    if self.host is not None:
                        yield from self._launched(self.host)
                    begin = env.now
                    # Whatever ends on the link at this instant has ended, and what follows it has begun. An idle
                    # link, as above, moves nothing.
                    copying = work.beside_copy_ns if link.moving else 0
                    yield env.timeout(layer_ns[call] + copying)
                    if observer:
                        observer.compute(begin, env.now, "attention", call)
                first = offsets[call]
                yield from self._call(call, step, first, experts[first : offsets[call + 1]], shared_ns[call])
            if self._alone():
                self._owed += head_ns[step]
            else:
                if self.host is not None:
                    yield from self._launched(self.host)
                begin = env.now
                yield env.timeout(head_ns[step])
                if observer:
                    observer.compute(begin, env.now, "head", (step + 1) * n_layers - 1)
            self.finish[step] = env.now + self._owed
            if observer:
                observer.step(began, env.now, step, phase == PREFILL)
            if self.progress and (not step % 64 or step + 1 == len(phases)):
                self.progress(step + 1)

    def _alone(self) -> bool:
        """Nothing but the GPU can act: its time may be owed instead of becoming an event."""
        return self._may_owe and self.link.idle

    def _catch_up(self) -> Generator[Event, None, None]:
        """Spend the time owed, before anything that must happen at its hour."""
        if self._owed:
            owed, self._owed = self._owed, 0
            yield self.env.timeout(owed)

    def _call(self, call: int, step: int, first: int, needed: list[int], busy: int) -> Generator[Event, None, None]:
        """One routed layer once its route is known; ``busy`` ns of other work runs with its residents."""
        calls, link = self.calls, self.link
        moment = call + step + 1
        decides = moment in self._at_moments and not self._before_demands
        yield from self._before_look_up(call, step, len(needed))
        calls.begin(call, needed, first)
        late, hosted, others = calls.late, calls.hosted, calls.others
        streams = self._may_stream and calls.streams(call)
        quiet = not (late or calls.missed or hosted or others or decides or streams)
        if quiet and self._alone() and self.plan.keep:
            self._owed += busy + sum(self._expert_ns[first : first + len(needed)])
            if needed:
                self._owed += self._starts(call, len(needed))
            return
        yield from self._catch_up()
        self._lookup_of = dict(zip(needed, range(first, first + len(needed)), strict=True))
        waves = calls.split(needed, first)
        ready, waiting = self._claim(call, waves[0])
        if decides:
            link.kick()  # demands are on their way before the policy thinks
            yield from self._decide(moment, step)
        if streams:
            self._ask(partial(calls.stream, call + 1), self.work.n_experts)
        if inserts := calls.inserts(needed, first):
            self._ask(partial(calls.insert, call, inserts), len(inserts))
        link.kick()
        self._launch(call, waves[0], waiting)
        beside = bool(hosted) and self.plan.host is not None and self.plan.host.beside
        host_ends = self._host_ends(hosted) if beside else 0
        yield from self._compute(call, waves[0], busy + ready, waiting)
        for wave in waves[1:]:
            ready, waiting = self._claim(call, wave)
            link.kick()
            self._launch(call, wave, waiting)
            yield from self._compute(call, wave, ready, waiting)
        for transfer in others:
            if link.transfers.get(transfer.expert) is transfer:
                yield from self._wait(call, transfer, "late", self.stall_late)
        if hosted:
            ends = host_ends if beside else self._host_ends(hosted)
            yield from self._await_host(call, ends, int(self.work.expert[hosted[-1]]))

    def _before_look_up(self, call: int, step: int, count: int) -> Generator[Event, None, None]:
        """What stands between a route and the look-up of its experts: the policy's turn, a scorer's, the host's."""
        if self._before_demands and (moment := call + step + 1) in self._at_moments:
            yield from self._catch_up()
            yield from self._decide(moment, step)
            self.link.kick()
        if self._scoring is not None:
            yield from self._score(self._scoring, call, step)
        if self.host is not None:
            self.host.await_device(self.env.now)
            self.host.spend(count * self.host.times.look_up_ns, self.link.phase)
            yield from self._await_thread(self.host)

    def _claim(self, call: int, wave: list[int]) -> tuple[int, list[Transfer]]:
        """Claim a wave's slots; returns the time of what is resident, its launch included, and what to wait for."""
        lookup_of, expert_ns = self._lookup_of, self._expert_ns
        resident, waiting = self.calls.claim(wave)
        for transfer in waiting:
            i = lookup_of[transfer.expert]
            self.waited[call] += self._if_awaited_ns[i] - expert_ns[i]
        if not resident:
            return 0, waiting
        return sum([expert_ns[lookup_of[expert]] for expert in resident]) + self._starts(call, len(resident)), waiting

    def _starts(self, call: int, resident: int) -> int:
        """What so many resident experts of a wave, at least one, take beyond their kernels."""
        split = self._split_wave_ns and self._single[call]
        return self._launch_ns + (self._split_wave_ns[resident] if split else 0)

    # -- the host's thread ---------------------------------------------------------------------------------------

    def _launched(self, host: HostThread) -> Generator[Event, None, None]:
        """Wait until the host has launched what comes next, which it does as soon as all before that is done."""
        host.spend(host.times.launch_ns, self.link.phase)
        yield from self._await_thread(host)

    def _await_thread(self, host: HostThread) -> Generator[Event, None, None]:
        wait = host.wait_ns(self.env.now, self.link.phase)
        if wait:
            yield self.env.timeout(wait)

    def _launch(self, call: int, wave: list[int], waiting: list[Transfer]) -> None:
        """Have the host launch a wave: its residents at once where they have one row each, the others one by one."""
        if self.host is None:
            return
        self.host.await_device(self.env.now)
        ready = len(wave) - len(waiting)
        self.host.launch(min(ready, 1) if self._single[call] else ready, len(waiting), self.link.phase)

    def _ask(self, ask: Callable[[], None], count: int) -> None:
        """Make so many requests, which take the host's time."""
        issued = self.counters.issued[self.link.phase]
        ask()
        if self.host is not None:
            more = self.counters.issued[self.link.phase] - issued
            self.host.requests(self.env.now, more, count - more, self.link.phase)

    # -- waves ---------------------------------------------------------------------------------------------------

    def _compute(
        self, call: int, wave: list[int], busy: int, waiting: list[Transfer]
    ) -> Generator[Event, None, None]:
        """Run a wave: ``busy`` ns at once, the rest in order as it lands; then let go of its slots."""
        env, cache, observer, state = self.env, self.cache, self.observer, self.cache.state
        for place, transfer in enumerate(waiting):
            expert = transfer.expert
            if state[expert] != RESIDENT and busy:
                begin = env.now
                yield env.timeout(busy)
                if observer:
                    observer.compute(begin, env.now, "experts", call)
                busy = 0
            if state[expert] != RESIDENT:
                if expert in self.calls.late:
                    yield from self._wait(call, transfer, "late", self.stall_late)
                else:
                    yield from self._wait(call, transfer, "demand", self.stall_demand)
            cache.use(expert)
            if self.host is not None:
                busy += self.host.until_launched(place, env.now + busy, self.link.phase)
            busy += self._if_awaited_ns[self._lookup_of[expert]]
        if busy:
            begin = env.now
            yield env.timeout(busy)
            if observer:
                observer.compute(begin, env.now, "experts", call)
        self.calls.let_go(wave)
        self.link.kick()

    def _wait(self, call: int, transfer: Transfer, kind: Stall, stalls: list[int]) -> Generator[Event, None, None]:
        """Stand still until ``transfer`` has landed."""
        begin = self.env.now
        transfer.event = self.env.event()
        yield transfer.event
        end = self.env.now
        stalls[call] += end - begin
        if self.observer:
            self.observer.stall(begin, end, transfer.expert, call, kind)

    def _host_ends(self, hosted: list[int]) -> int:
        """When the host is done with these look-ups if it begins now."""
        assert self._host is not None and self.plan.host is not None
        costs = self._host.shared if self.link.moving else self._host.alone
        return self.env.now + self.plan.host.call_ns + int(costs[hosted].sum())

    def _await_host(self, call: int, ends: int, expert: int) -> Generator[Event, None, None]:
        """Stand still until the host is done."""
        begin = self.env.now
        if ends > begin:
            yield self.env.timeout(ends - begin)
            self.stall_host[call] += ends - begin
            if self.observer:
                self.observer.stall(begin, ends, expert, call, "host")

    def _begin_step(self, step: int, phase: int) -> Generator[Event, None, None]:
        """What comes before the first layer of a step."""
        env, link, first = self.env, self.link, step * self.work.n_layers
        if self.plan.ring and not step:
            self._ask(partial(self.calls.stream, 0), self.work.n_experts)
            link.kick()
        if self._lanes is not None:
            yield from self._prepared(step, self._lanes)
        if self._moves and self._moves[step]:
            yield from self._catch_up()
            begin = env.now
            yield env.timeout(self._moves[step])
            if self.observer:
                self.observer.compute(begin, env.now, "move", first)
        if phase == PREFILL and self.plan.prediction.prompt_ns:
            yield from self._catch_up()
            yield from self._predicting(step, self.plan.prediction.prompt_ns, first, "prompt")
        moment = first + step
        if moment in self._at_moments:
            yield from self._catch_up()
            yield from self._decide(moment, step)
            link.kick()

    def _prepared(self, step: int, lanes: Lanes) -> Generator[Event, None, None]:
        """Stand still until what is predicted and scheduled for ``step`` is there."""
        wait = lanes.ready(step, self.finish) - self.env.now - self._owed
        if self.observer:
            for lane, begin, end in lanes.ran:
                self.observer.beside(begin, end, LANES[lane], step)
        if wait > 0:
            yield from self._catch_up()
            yield self.env.timeout(wait)
            self.predict[step] += wait

    # -- the policy ----------------------------------------------------------------------------------------------

    def _decide(self, moment: int, step: int) -> Generator[Event, None, None]:
        """Execute the plan at a moment: new values, the cost of predicting, requests."""
        decision = self._at_moments[moment]
        cost = decision.predict_ns
        if decision.shares is not None:
            self.cache.share_out(decision.shares)
        if cost and not self.plan.prediction.critical:
            self.env.call(cost, ASIDE, lambda _: self._answer_aside(decision))
            return
        self._revalue(decision)
        if cost:
            yield from self._predicting(step, cost, max(0, moment - step - 1), "predict")
        self._request(decision)

    def _score(self, scoring: Scoring, call: int, step: int) -> Generator[Event, None, None]:
        """Show a plan's scorer a route, which the step may wait for."""
        ns = int(scoring.scorer.ns[call])
        if ns and not scoring.scorer.beside:
            yield from self._catch_up()
            yield from self._predicting(step, ns, call, "predict")
        scoring.announce(call, self.env.now + self._owed)

    def _predicting(self, step: int, cost: int, call: int, what: Work) -> Generator[Event, None, None]:
        begin = self.env.now
        yield self.env.timeout(cost)
        self.predict[step] += cost
        if self.observer:
            self.observer.compute(begin, self.env.now, what, call)

    def _answer_aside(self, decision: Decision) -> None:
        """A prediction beside the step is over."""
        self._revalue(decision)
        self._request(decision)
        self.link.kick()

    def _revalue(self, decision: Decision) -> None:
        for first, row in decision.values:
            self.cache.valued(first, row)

    def _request(self, decision: Decision) -> None:
        self._ask(partial(self.link.request_moment, decision.requests), len(decision.requests))
