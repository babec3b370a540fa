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
