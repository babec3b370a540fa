"""The reference engine: a workload under a plan, as SimPy processes, in whole nanoseconds.

Two processes run side by side: the GPU, which computes one layer call after another, and the link (``sim.run.link``), which
copies experts. A call goes like this. Attention and router run; the route is now known and all experts of the call are
looked up at once; those that are neither resident nor under way are demanded, or run on the host where the plan has it
so and it is cheaper; the policy's requests of this moment are made; resident experts run, then those under way, then
those demanded, each as soon as it is there. Experts of the call are pinned from its look-up to the end of its last
kernel. A call that needs more experts than its slots hold runs in waves, residents first.

A run is a pure function of workload, plan and capacity.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from simpy import Event

from sim.eviction import NEVER, foresees
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT, PREFILL, Counters, Log
from sim.plan import Discipline, Plan, Requests
from sim.run.clock import ASIDE, Clock
from sim.run.host_costs import host_costs
from sim.run.link import Link, Observer, Transfer
from sim.run.slots import LOADING, RESIDENT, ExpertCache, waves
from sim.run.terms import settle
from sim.workload import Workload


class SimulationError(RuntimeError):
    """The run cannot go on: a defect of the engine or of a policy's own eviction rule, never of the input."""

    def __str__(self) -> str:
        return f"the run cannot go on: {super().__str__()}"


@dataclass
class Run:
    """One run of the reference engine; ``log()`` executes it.

    Args:
        work: the calls.
        plan: the policy's decisions.
        budget: bytes of GPU memory for experts and for the policy's own tables.
        discipline, chunks: override the plan's link settings.
        observer: told of everything that happens.
        progress: called with the number of steps done, now and then.

    Raises InputError if the budget cannot hold one expert, or the plan asks for something impossible.
    """

    work: Workload
    plan: Plan
    budget: int
    discipline: Discipline | None = None
    chunks: int | None = None
    observer: Observer | None = None
    progress: Callable[[int], None] | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        work, plan = self.work, self.plan
        terms = settle(work, plan, self.budget, self.discipline, self.chunks)
        slots = terms.slots
        self.env = Clock()
        self._future = foresees(plan.eviction)
        first_call = work.first_call() if self._future else None
        self.cache = ExpertCache(
            work.expert_bytes, work.n_experts, slots.capacity, slots.pool, plan.eviction, first_call, slots.own
        )
        self._host = host_costs(work, plan.host) if plan.host is not None else None
        self._to_host = self._host.chosen.tolist() if self._host is not None else [False] * len(work.expert)
        copy_ns = [ns for ns in work.copy_ns for _ in range(work.n_experts)]
        self.link = Link(
            self.env,
            self.cache,
            copy_ns.__getitem__,
            work.latency_ns,
            terms.chunks,
            terms.discipline,
            self.counters,
            self.observer,
            work.chained,
        )
        if plan.everything_resident:
            for expert in range(work.n_layers * work.n_experts):
                self.cache.allot(expert, -1, demand=True)
                self.cache.landed(expert)
                self.cache.used[expert] = 1
        n_steps = work.schedule.n_steps
        self.finish = [0] * n_steps
        self.found = bytearray(len(work.expert))  # REUSE_HIT is 0
        self.stall_demand = [0] * work.n_calls
        self.stall_late = [0] * work.n_calls
        self.stall_host = [0] * work.n_calls
        self.waited = [0] * work.n_calls
        self.predict = [0] * n_steps
        self._at_moments = by_moment(plan, work.n_experts)
        self._may_stream = plan.stream_prefill or plan.ring
        self._may_owe = self.observer is None and plan.prediction.critical
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
            np.array(self.finish, np.int64),
            np.frombuffer(bytes(self.found), np.uint8),
            np.array(self.stall_demand, np.int64),
            np.array(self.stall_late, np.int64),
            np.array(self.predict, np.int64),
            self.counters,
            np.array(self.stall_host if self._host is not None else [], np.int64),
            np.array(self.waited if self.work.waited_ns is not None else [], np.int64),
        )

    # -- the GPU -------------------------------------------------------------------------------------------------

    def _gpu(self) -> Generator[Event, None, None]:
        work, env, link = self.work, self.env, self.link
        n_layers = work.n_layers
        offsets, experts = work.offsets.tolist(), work.expert.tolist()
        layer_ns, shared_ns = work.layer_ns.tolist(), work.shared_ns.tolist()
        head_ns, phases = work.head_ns.tolist(), work.schedule.phase.tolist()
        self._expert_ns, self._waits_ns = work.expert_ns.tolist(), work.waits_ns.tolist()
        self._launch_ns = work.launch_ns
        self._apart_ns: list[int] | None = None if work.apart_ns is None else work.apart_ns.tolist()
        self._single = [] if work.apart_ns is None else work.single.tolist()
        self._next_call = work.next_call().tolist() if self._future else [NEVER] * len(experts)
        moments, observer = self._at_moments, self.observer
        for step, phase in enumerate(phases):
            began = env.now
            link.phase = phase
            if self.plan.ring and not step:
                self._stream_layer(0)
                link.kick()
            if phase == PREFILL and self.plan.prediction.prompt_ns:
                yield from self._catch_up()
                yield from self._predicting(step, self.plan.prediction.prompt_ns, step * n_layers, "prompt")
            moment = step * (n_layers + 1)
            if moment in moments:
                yield from self._catch_up()
                yield from self._decide(moment, step)
                link.kick()
            for layer in range(n_layers):
                call = step * n_layers + layer
                if self._alone():
                    self._owed += layer_ns[call]
                else:
                    begin = env.now
                    # Whatever ends on the link at this instant has ended, and what follows it has begun. An idle
                    # link, as above, moves nothing.
                    copying = work.copying_ns if link.moving else 0
                    yield env.timeout(layer_ns[call] + copying)
                    if observer:
                        observer.compute(begin, env.now, "attention", call)
                first = offsets[call]
                yield from self._call(call, step, first, experts[first : offsets[call + 1]], shared_ns[call])
            if self._alone():
                self._owed += head_ns[step]
            else:
                begin = env.now
                yield env.timeout(head_ns[step])
                if observer:
                    observer.compute(begin, env.now, "head", (step + 1) * n_layers - 1)
            self.finish[step] = env.now + self._owed
            if observer:
                observer.step(began, env.now, step, phase == PREFILL)
            if self.progress and not step % 64:
                self.progress(step)

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
        link = self.link
        late = self._look_up(call, needed, first)
        rest = self._rest(call, late) if self.plan.ring else []
        link.passed = call
        moment = call + step + 1
        streams = self._may_stream and self._streams(call)
        there = self._expert_ns[first : first + len(needed)]
        quiet = not (late or self._missed or rest or moment in self._at_moments or streams)
        if quiet and self._alone() and self.plan.keep:
            self._owed += busy + sum(there)
            if needed:
                self._owed += self._launch_ns if self._apart_ns is None else self._starts(call, len(needed))
            return
        yield from self._catch_up()
        costs = list(zip(there, self._waits_ns[first : first + len(needed)], strict=True))
        hosted = [i for i in range(first, first + len(needed)) if self.found[i] == HOSTED] if self._host else []
        if hosted:
            costs = [cost for i, cost in enumerate(costs, first) if self.found[i] != HOSTED]
            needed = [expert for i, expert in enumerate(needed, first) if self.found[i] != HOSTED]
        groups = waves(self.cache, needed, link.demanded) if needed else [needed]
        if len(groups) > 1:
            of = dict(zip(needed, costs, strict=True))
            costs = [of[expert] for expert in groups[0]]
            link.awaited.update(expert for group in groups[1:] for expert in group)
        ready, waiting = self._claim(call, groups[0], costs)
        if moment in self._at_moments:
            link.kick()  # demands are on their way before the policy thinks
            yield from self._decide(moment, step)
        if streams:
            self._stream_layer(call + 1)
        link.kick()
        beside = bool(hosted) and self.plan.host is not None and self.plan.host.beside
        host_ends = self._host_ends(hosted) if beside else 0
        yield from self._compute(call, groups[0], busy + ready, waiting, late)
        for group in groups[1:]:
            link.awaited.difference_update(group)
            ready, waiting = self._claim(call, group, [of[expert] for expert in group])
            link.kick()
            yield from self._compute(call, group, ready, waiting, late)
        for transfer in rest:
            if link.transfers.get(transfer.expert) is transfer:
                yield from self._wait(call, transfer, "late", self.stall_late)
        if hosted:
            ends = host_ends if beside else self._host_ends(hosted)
            yield from self._await_host(call, ends, int(self.work.expert[hosted[-1]]))

    def _look_up(self, call: int, needed: list[int], first: int) -> set[int]:
        """Find each needed expert resident, under way or absent; return those under way."""
        cache, link, counters, found = self.cache, self.link, self.counters, self.found
        rules, pool, used, next_call, to_host = cache.rules, cache.pool, cache.used, self._next_call, self._to_host
        late: set[int] = set()
        self._missed = False
        for i, expert in enumerate(needed, first):
            state = cache.state[expert]
            if state == RESIDENT:
                if not used[expert]:
                    found[i] = PREFETCH_HIT
                    used[expert] = 1
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
                    self._missed = True
                    found[i] = HOSTED if to_host[i] else MISS
                    if to_host[i]:
                        continue  # it gets no slot, so its pool's rule hears nothing of it
            rules[pool[expert]].needed(expert, next_call[i])
        return late

    def _rest(self, call: int, late: set[int]) -> list[Transfer]:
        """Insist on what was requested for ``call``, is under way and is not needed; return it."""
        link, wanted = self.link, self.cache.wanted_until
        layer = call % self.work.n_layers * self.work.n_experts
        return [
            link.insist(expert)
            for expert in range(layer, layer + self.work.n_experts)
            if expert not in late and wanted[expert] == call and expert in link.transfers
        ]

    def _claim(
        self, call: int, group: list[int], costs: list[tuple[int, int]]
    ) -> tuple[int, list[tuple[Transfer, int]]]:
        """Pin a wave and demand what it lacks; ``costs`` are what each expert takes if it is there, and if not.

        Returns the time of what is resident, its launch included, and what to wait for with the time of each, those
        under way first.
        """
        pinned, state, link = self.cache.pinned, self.cache.state, self.link
        under_way: list[tuple[Transfer, int]] = []
        absent: list[tuple[Transfer, int]] = []
        ready = 0
        for expert, (cost, wait) in zip(group, costs, strict=True):
            pinned[expert] = 1
            if state[expert] == RESIDENT:
                ready += cost
            else:
                which = under_way if expert in link.transfers else absent
                which.append((link.demand(expert), wait))
                self.waited[call] += wait - cost
        there = len(group) - len(under_way) - len(absent)
        if there:
            ready += self._launch_ns if self._apart_ns is None else self._starts(call, there)
        return ready, under_way + absent

    def _starts(self, call: int, there: int) -> int:
        """What so many experts of a wave that are there take beyond their kernels."""
        assert self._apart_ns is not None
        return self._launch_ns + (self._apart_ns[there] if self._single[call] else 0)

    def _compute(
        self, call: int, group: list[int], busy: int, waiting: list[tuple[Transfer, int]], late: set[int]
    ) -> Generator[Event, None, None]:
        """Run a wave: ``busy`` ns at once, the rest in order as it lands; then let go of its slots."""
        env, cache, link, observer = self.env, self.cache, self.link, self.observer
        for transfer, cost in waiting:
            expert = transfer.expert
            if cache.state[expert] != RESIDENT and busy:
                begin = env.now
                yield env.timeout(busy)
                if observer:
                    observer.compute(begin, env.now, "experts", call)
                busy = 0
            if cache.state[expert] != RESIDENT:
                kind, stalls = ("late", self.stall_late) if expert in late else ("demand", self.stall_demand)
                yield from self._wait(call, transfer, kind, stalls)
            cache.used[expert] = 1
            busy += cost
        if busy:
            begin = env.now
            yield env.timeout(busy)
            if observer:
                observer.compute(begin, env.now, "experts", call)
        for expert in group:
            cache.pinned[expert] = 0
            if not self.plan.keep and expert not in cache.own:
                cache.release(expert)
        link.kick()

    def _wait(self, call: int, transfer: Transfer, kind: str, stalls: list[int]) -> Generator[Event, None, None]:
        """Stand still until ``transfer`` has landed."""
        begin = self.env.now
        transfer.event = self.env.event()
        yield transfer.event
        stalls[call] += self.env.now - begin
        if self.observer:
            self.observer.stall(begin, self.env.now, transfer.expert, call, kind)

    def _host_ends(self, hosted: list[int]) -> int:
        """When the host is done with these look-ups if it begins now."""
        assert self._host is not None
        costs = self._host.shared if self.link.moving else self._host.alone
        return self.env.now + int(costs[hosted].sum())

    def _await_host(self, call: int, ends: int, expert: int) -> Generator[Event, None, None]:
        """Stand still until the host is done."""
        begin = self.env.now
        if ends > begin:
            yield self.env.timeout(ends - begin)
            self.stall_host[call] += ends - begin
            if self.observer:
                self.observer.stall(begin, ends, expert, call, "host")

    # -- the policy ----------------------------------------------------------------------------------------------

    def _decide(self, moment: int, step: int) -> Generator[Event, None, None]:
        """Execute the plan at a moment: new values, the cost of predicting, requests."""
        values, cost, requests = self._at_moments[moment]
        for first, row in values:
            self.cache.valued(first, row)
        if cost and self.plan.prediction.critical:
            yield from self._predicting(step, cost, max(0, moment - step - 1), "predict")
        elif cost:
            self.env.call(cost, ASIDE, lambda _: self._request(requests, aside=True))
            return
        self._request(requests, aside=False)

    def _predicting(self, step: int, cost: int, call: int, what: str) -> Generator[Event, None, None]:
        begin = self.env.now
        yield self.env.timeout(cost)
        self.predict[step] += cost
        if self.observer:
            self.observer.compute(begin, self.env.now, what, call)

    def _request(self, requests: list[tuple[int, int, int]], aside: bool) -> None:
        link = self.link
        for expert, call, priority in requests:
            if call > link.passed:
                link.request(expert, call, priority)
        if aside:
            link.kick()

    def _streams(self, call: int) -> bool:
        """Whether the experts of the call after this one are copied while this one computes."""
        if self.plan.ring:
            return call + 1 < self.work.n_calls
        prefill = self.plan.stream_prefill and self.link.phase == PREFILL
        return prefill and (call + 1) % self.work.n_layers != 0

    def _stream_layer(self, call: int) -> None:
        n_experts = self.work.n_experts
        layer = call % self.work.n_layers
        for expert in range(layer * n_experts, (layer + 1) * n_experts):
            self.link.request(expert, call, call)


_Moment = tuple[list[tuple[int, np.ndarray]], int, list[tuple[int, int, int]]]
"""What is decided at a moment: values from an expert on, ns of prediction, requests (expert, call, priority)."""


def by_moment(plan: Plan, n_experts: int) -> dict[int, _Moment]:
    """The plan by moment."""
    table: dict[int, _Moment] = {}
    if plan.requests is not None:
        r: Requests = plan.requests
        rows = list(zip(r.expert.tolist(), r.call.tolist(), r.priority.tolist(), strict=True))
        bounds = r.offsets.tolist()
        for i, moment in enumerate(r.moment.tolist()):
            table[moment] = ([], 0, rows[bounds[i] : bounds[i + 1]])
    for moment, ns in zip(plan.prediction.moment.tolist(), plan.prediction.ns.tolist(), strict=True):
        _, _, requests = table.get(moment, ([], 0, []))
        table[moment] = ([], ns, requests)
    if plan.values is not None:
        v = plan.values
        layers = v.layer.tolist() if v.by_layer else [0] * len(v.moment)
        for moment, layer, row in zip(v.moment.tolist(), layers, v.index.tolist(), strict=True):
            table.setdefault(moment, ([], 0, []))[0].append((layer * n_experts, v.table[row]))
    return table
