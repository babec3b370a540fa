"""What a call's experts on the host take together, beside what each takes."""

import dataclasses

import numpy as np

from sim.plan import Host, Plan
from tests.support.worlds import handmade, simpy_run


def test_a_call_pays_once_for_all_its_experts_on_the_host() -> None:
    work = handmade([[[0, 1], [0]], [[1], []]], 2, expert_bytes=10, copy_ns=10_000)
    none, each = np.zeros(2, np.int64), np.full(2, 50, np.int64)
    host = Host(none, each, each, none, call_ns=7)
    logs = [simpy_run(work, Plan(host=one), 20).log() for one in (host, dataclasses.replace(host, call_ns=0))]
    assert (logs[0].stall_host - logs[1].stall_host).tolist() == [7, 7, 7, 0]
    assert logs[0].finish[-1] - logs[1].finish[-1] == 21


def test_of_each_call_and_step_so_many_experts_come_in() -> None:
    work = handmade([[[0, 1, 2], [0, 1, 2]]] * 2, 3, expert_bytes=10, copy_ns=1)
    none, each = np.zeros(2, np.int64), np.full(2, 10**6, np.int64)
    for most, of_each, expected in ((9, 1, 2 + 2), (1, 9, 1 + 1), (9, 9, 6), (3, 2, 3 + 3), (9, 0, 0)):
        host = Host(none, each, each, none, stream_from=9, insert=most, insert_each=of_each)
        log = simpy_run(work, Plan(host=host), 60).log()
        assert sum(log.counters.issued) == sum(log.counters.inserted) == expected
