"""Runs of workloads written by hand, with everything that was seen of them."""

import numpy as np

from sim.plan import Plan, Requests
from sim.workload import Workload
from tests.support.runs import simpy_run
from tests.support.worlds import MS


def asked(*requests: tuple[int, int, int], priority: list[int] | None = None) -> Requests:
    """Requests of (moment, call, flat expert)."""
    moment, call, expert = np.array(requests, np.int64).T
    return Requests.build(moment, call, expert, None if priority is None else np.array(priority))


class Scene:
    """A run of a handmade workload with everything that was seen of it."""

    def __init__(self, work: Workload, plan: Plan, slots: int, size: int = 1_000_000, **link: object) -> None:
        self.events: list[tuple[object, ...]] = []
        run = simpy_run(work, plan, slots * size, observer=self, **link)  # type: ignore[arg-type]
        self.run = run
        self.log = run.log()
        self.counters = self.log.counters

    def transfer(self, begin: int, end: int, expert: int, kind: str, whole: bool) -> None:
        self.events.append(("transfer", begin / MS, end / MS, expert, kind, whole))

    def written_back(self, begin: int, end: int, expert: int) -> None:
        self.events.append(("back", begin / MS, end / MS, expert))

    def evicted(self, now: int, victims: list[int], by: int) -> None:
        self.events.append(("evicted", now / MS, victims, by))

    def stall(self, begin: int, end: int, expert: int, call: int, kind: str) -> None:
        self.events.append(("stall", begin / MS, end / MS, expert, kind))

    def requested(self, now: int, expert: int, call: int, outcome: str) -> None:
        self.events.append(("requested", now / MS, expert, outcome))

    def compute(self, begin: int, end: int, what: str, call: int) -> None: ...

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None: ...

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]
