"""The rules of one layer call, for every engine: what is found, waited for, pinned and let go of.

All of it changes state of cache, link and counters, and nothing else: no clock, no event, no device. An engine supplies
the time. Once the route of a call is known it

1. calls `begin`, which looks all experts of the call up;
2. splits those that run on the GPU into waves (`split`), and for each wave in turn claims its slots (`claim`), runs
   what is ready, runs each of the others once its copy has landed, tells the cache that it was used, and lets go of the
   slots when the last kernel has ended (`let_go`);
3. while the first wave runs, executes what the policy decides at this moment, and asks for the next layer's experts if
   that `streams`;
4. waits for the others under way that `begin` named, and for the experts on the host.

The link is kicked by the engine, after each of these.
"""

import sys

from sim.eviction import NEVER, foresees
from sim.log import HOSTED, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFETCH_HIT
from sim.plan import Plan
from sim.run.host_costs import HostCosts
from sim.run.link_queue import LinkQueue, Transfer
from sim.run.slots import LOADING, RESIDENT, waves
from sim.workload import Workload
from traces.schema import PREFILL


class LayerCalls:
    """The layer calls of a run, one after another.

    Args:
        plan: the policy's decisions.
        link: its cache and counters are the run's.
        n_layers, n_experts: routed layers, and experts a layer.
        work: all calls of the run; None where they become known one by one (`expect`).
        host: what its experts cost on the host, where any may run there.

    Attributes:
        found: what each look-up found (N,), in the order of ``Workload.expert``.
        late: experts of the running call that its look-up found queued or under way.
        missed: whether the running call needs an expert that was absent and is copied.
        hosted: look-ups of the running call whose experts run on the host.
        others: what the running call waits for although it does not need it, in a ring or where a plan insists.
    """

    def __init__(
        self, plan: Plan, link: LinkQueue, n_layers: int, n_experts: int, work: Workload | None = None,
        host: HostCosts | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.link, self.cache, self.counters = plan, link, link.cache, link.counters
        link.most_issued, link.only_idle, link.write_back = plan.most_issued, plan.only_idle, plan.write_back
        self.n_layers, self.n_experts = n_layers, n_experts
        self.found = bytearray()  # REUSE_HIT is 0
        self.late: set[int] = set()
        self.missed = False
        self.hosted: list[int] = []
        self.others: list[Transfer] = []
        self._calls = sys.maxsize
        self._next_call: list[int] = []
        self._to_host = bytearray()
        self._copied = plan.host.copied.tolist() if plan.host is not None and plan.host.copied is not None else None
        self._insert, self._each = (plan.host.insert, plan.host.insert_each) if plan.host is not None else (0, 0)
        self._inserted = 0
        if work is None:
            return
        self.expect(len(work.expert))
        self._calls = work.n_calls
        if foresees(plan.eviction):
            self._next_call = work.next_call().tolist()
        if host is not None:
            self._to_host[:] = host.chosen.tobytes()

    def expect(self, lookups: int) -> None:
        """So many more look-ups are to come."""
        self.found.extend(bytes(lookups))
        self._to_host.extend(bytes(lookups))
        self._next_call.extend([NEVER] * lookups)

    def begin(self, call: int, needed: list[int], first: int) -> None:
        """The route of ``call`` is known: look up the experts that it needs, rising, from look-up ``first`` on."""
        cache, link, found = self.cache, self.link, self.found
        rules, group, state, used, next_call = cache.rules, cache.group, cache.state, cache.used, self._next_call
        if call % self.n_layers == 0:
            self._inserted = 0
        late: set[int] = set()
        hosted: list[int] = []
        missed = False
        to_copy = 0 if self._copied is None else self._copied[call % self.n_layers][self._absent(call, needed, first)]
        for i, expert in enumerate(needed, first):
            if state[expert] == RESIDENT:
                if not used[expert]:
                    found[i] = PREFETCH_HIT
                    cache.use(expert)
                    self.counters.useful_prefetch(expert)
            else:
                link.forget_if_passed(expert, call)
                transfer = link.transfers.get(expert)
                if transfer is not None:
                    found[i] = LATE_IN_FLIGHT if state[expert] == LOADING else LATE_QUEUED
                    self.counters.late[transfer.phase] += 1
                    late.add(expert)
                    link.demand(expert)
                elif self._to_host[i] and not to_copy:
                    found[i] = HOSTED
                    hosted.append(i)
                    continue  # it gets no slot, so its pool's rule hears nothing of it
                else:
                    to_copy -= bool(to_copy and self._to_host[i])
                    found[i] = MISS
                    missed = True
            rules[group[expert]].needed(expert, next_call[i])  # as cache.needed: a look-up is no place for a call more
        self.late, self.missed, self.hosted = late, missed, hosted
        self.others = self._insist(call) if self.plan.ring or self.plan.insist else []
        link.passed = call

    def _absent(self, call: int, needed: list[int], first: int) -> int:
        """How many of these experts are absent and would run on the host."""
        count = 0
        for i, expert in enumerate(needed, first):
            if self._to_host[i] and self.cache.state[expert] != RESIDENT:
                self.link.forget_if_passed(expert, call)
                count += expert not in self.link.transfers
        return count

    def inserts(self, needed: list[int], first: int) -> list[int]:
        """Those of the running call's experts on the host that are to be requested for their next visit."""
        if not self._insert:
            return []
        chosen = [needed[i - first] for i in self.hosted[: min(self._insert - self._inserted, self._each)]]
        self._inserted += len(chosen)
        return chosen

    def insert(self, call: int, experts: list[int]) -> None:
        """Ask for these experts of ``call`` for the next visit of its layer."""
        issued, phase = self.counters.issued, self.link.phase
        before = issued[phase]
        self.link.request_all([(expert, call + self.n_layers, call) for expert in experts])
        self.counters.inserted[phase] += issued[phase] - before

    def _insist(self, call: int) -> list[Transfer]:
        """Wait for what was requested for ``call``, is under way and is not needed; return it."""
        link, late, wanted = self.link, self.late, self.cache.wanted_until
        layer = call % self.n_layers * self.n_experts
        return [
            link.insist(expert)
            for expert in range(layer, layer + self.n_experts)
            if expert not in late and wanted[expert] == call and expert in link.transfers
        ]

    def split(self, needed: list[int], first: int) -> list[list[int]]:
        """Those of the running call that run on the GPU, in waves that fit its slots: one at least, maybe empty."""
        if self.hosted:
            needed = [expert for i, expert in enumerate(needed, first) if self.found[i] != HOSTED]
        if not needed or len(needed) <= self.cache.fit[needed[0]]:
            return [needed]
        groups = waves(self.cache, needed, self.link.demanded)
        for group in groups[1:]:
            self.link.awaited.update(group)
        return groups

    def claim(self, group: list[int]) -> tuple[list[int], list[Transfer]]:
        """Pin a wave and demand what it lacks: what is resident, and what to wait for, those under way first."""
        link, state = self.link, self.cache.state
        ready: list[int] = []
        under_way: list[Transfer] = []
        absent: list[Transfer] = []
        if link.awaited:
            link.awaited.difference_update(group)
        self.cache.pin(group)
        for expert in group:
            if state[expert] == RESIDENT:
                ready.append(expert)
            else:
                (under_way if expert in link.transfers else absent).append(link.demand(expert))
        return ready, under_way + absent

    def let_go(self, group: list[int]) -> None:
        """The last kernel of a wave has ended: its slots may be taken."""
        cache = self.cache
        cache.unpin(group)
        if not self.plan.keep:
            for expert in group:
                if expert not in cache.reserved:
                    cache.release(expert)

    def still_under_way(self) -> list[Transfer]:
        """Of ``others``, what has not landed yet."""
        return [transfer for transfer in self.others if self.link.transfers.get(transfer.expert) is transfer]

    def streams(self, call: int) -> bool:
        """Whether the experts of the call after ``call`` are copied while that one computes."""
        if self.plan.ring:
            return call + 1 < self._calls
        prefill = self.plan.stream_prefill and self.link.phase == PREFILL
        return prefill and (call + 1) % self.n_layers != 0

    def stream(self, call: int) -> None:
        """Ask for all experts of the layer of ``call``."""
        first = call % self.n_layers * self.n_experts
        self.link.request_all([(expert, call, call) for expert in range(first, first + self.n_experts)])
