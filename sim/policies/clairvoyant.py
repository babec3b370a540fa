"""The reference to aim at: Belady's MIN with perfect prefetch."""

from itertools import pairwise

import numpy as np

from sim.plan import Plan, Requests
from sim.policies.base import Policy
from sim.view import View
from sim.workload import Workload


class Clairvoyant(Policy):
    """Knows every route of the run: prefetches what comes next, as far ahead as the slots hold, and evicts by MIN.

    A reference, not a proven ceiling: it spends no thought on the order of transfers beyond first needed, first copied.
    """

    name = "clairvoyant"
    summary = "reference: knows the future, prefetches in order of need, evicts what is needed last (MIN)"
    clairvoyant = True

    def plan(self, view: View) -> Plan:
        """Ask for each call as soon as all that is needed up to it fits beside the call that then runs."""
        work = view.future()
        opened = _opened(work, self.setting.budget)[work.call]
        step, layer = np.divmod(opened - 1, work.n_layers)
        moment = np.where(opened == 0, 0, step * (work.n_layers + 1) + layer + 1)
        return Plan(eviction="next-use", requests=Requests.build(moment, work.call, work.expert))


def _opened(work: Workload, budget: int) -> np.ndarray:
    """For each call t the earliest call c such that the experts of c to t fit beside any one call (S * L,) int64."""
    ids, sizes, offsets = work.expert.tolist(), work.lookup_bytes.tolist(), work.offsets.tolist()
    room = budget - max(sum(sizes[a:b]) for a, b in pairwise(offsets))
    uses: dict[int, int] = {}
    held = first = 0
    opened = np.zeros(work.n_calls, np.int64)
    for call in range(work.n_calls):
        for i in range(offsets[call], offsets[call + 1]):
            uses[ids[i]] = uses.get(ids[i], 0) + 1
            held += sizes[i] if uses[ids[i]] == 1 else 0
        while held > room and first < call:
            for i in range(offsets[first], offsets[first + 1]):
                uses[ids[i]] -= 1
                held -= sizes[i] if uses[ids[i]] == 0 else 0
            first += 1
        opened[call] = first
    return opened
