"""The reference to aim at: Belady's MIN with perfect prefetch."""

from itertools import pairwise
from typing import Literal

import numpy as np

from sim.bounds import fewest_loads
from sim.plan import Plan, Requests
from sim.policies.base import Parameters, Policy
from sim.view import View
from sim.workload import Workload


class ClairvoyantParameters(Parameters):
    """Parameters of clairvoyant."""

    loads: Literal["early", "fewest"] = "early"
    """early copies what comes next as far ahead as the slots hold, which hides most of the link where compute counts;
    fewest moves no byte more than MIN must, each as soon as MIN has room for it, which is faster where the link is all
    that counts."""


class Clairvoyant(Policy):
    """Knows every route of the run, evicts by MIN and prefetches in the order of need.

    With loads=fewest it moves exactly the fewest bytes, if experts have one size and calls fit the slots. It is a
    reference, not a proven limit: neither way of loading is the best everywhere, and calls that run in waves lose.
    """

    name = "clairvoyant"
    summary = "reference: knows the future, prefetches in order of need, evicts what is needed last (MIN)"
    takes = ClairvoyantParameters
    parameters: ClairvoyantParameters
    clairvoyant = True

    def plan(self, view: View) -> Plan:
        """Ask for everything that will be needed, in time."""
        work = view.future()
        asked, call, expert = (_early if self.parameters.loads == "early" else _fewest)(work, self.setting.budget)
        moment = np.where(asked < 0, 0, asked + asked // work.n_layers + 1)
        return Plan(eviction="next-use", requests=Requests.build(moment, call, expert))


def _early(work: Workload, budget: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests (asked at the route of this call, for this call, expert): as soon as all up to it fits beside any call.

    Asked at call -1 is at the very beginning.
    """
    ids, sizes, offsets = work.expert.tolist(), work.lookup_bytes.tolist(), work.offsets.tolist()
    room = budget - max(sum(sizes[a:b]) for a, b in pairwise(offsets))
    uses: dict[int, int] = {}
    held = first = 0
    opened = np.zeros(work.n_calls, np.int64)  # the earliest call from which on all that is needed fits
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
    return opened[work.call] - 1, work.call, work.expert


def _fewest(work: Workload, budget: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, where what MIN keeps is wanted from use to use and each load is asked for when its room is left."""
    call, size = work.call, work.lookup_bytes
    loaded = fewest_loads(work.offsets, work.expert, size, budget) > 0
    kept = _kept_after(work, loaded)
    # The n-th byte that is loaded takes the place of the n-th that is left, once the cache is full.
    over = np.cumsum(size[loaded]) - budget
    left = np.flatnonzero(~kept)
    taken = np.searchsorted(np.cumsum(size[left]), over)
    since = np.where(over > 0, call[left[np.minimum(taken, len(left) - 1)]], -1)
    ahead = since < call[loaded]  # in a call of several waves room may come too late: it is demanded
    return (
        np.concatenate([call[kept], since[ahead]]),
        np.concatenate([work.next_call()[kept], call[loaded][ahead]]),
        np.concatenate([work.expert[kept], work.expert[loaded][ahead]]),
    )


def _kept_after(work: Workload, loaded: np.ndarray) -> np.ndarray:
    """Whether each look-up's expert stays until the call that needs it next (N,) bool."""
    order = np.lexsort((work.call, work.expert))
    stays = np.zeros(len(order), bool)
    same = work.expert[order[1:]] == work.expert[order[:-1]]
    stays[order[:-1][same]] = ~loaded[order[1:][same]]
    return stays
