"""Experts that run on the host: which, for how long, and which of them come in beside (``sim.plan.Host``)."""

from typing import Any

from sim.compiled.clock import advance
from sim.compiled.host_thread import issued, requests
from sim.compiled.jit import inner
from sim.compiled.link import request
from sim.compiled.machine import NOBODY, byte_at, counts_at, number_at, slot_at, transfer_at
from sim.log import HOSTED
from sim.run.slots import ABSENT


@inner
def to_copy(m: Any, call: int) -> int:
    """How many of the call's experts that would run on the host are copied instead."""
    absent = 0
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        expert = number_at(m.expert, i).n
        there = slot_at(m.slots, expert).state != ABSENT or transfer_at(m.transfers, expert).live
        absent += 0 if there else number_at(m.to_host, i).n
    return number_at(m.copied, call % m.n_layers * (m.n_experts + 1) + absent).n


@inner
def host_ns(m: Any, call: int) -> int:
    """Time of the call's experts that run on the host, if it begins now."""
    costs, total = m.host_alone if m.running == NOBODY else m.host_shared, m.host_call
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        if byte_at(m.found, i).n == HOSTED:
            total += number_at(costs, i).n
    return total


@inner
def wait_for_host(m: Any, call: int, ends: int) -> None:
    """Stand still until the host is done."""
    if ends > m.now:
        number_at(m.stall_host, call).n += ends - m.now
        advance(m, ends)


@inner
def insert(m: Any, call: int) -> None:
    """Ask for experts that run on the host now for the next visit of their layer, as many a step as the plan says."""
    if call % m.n_layers == 0:
        m.inserted = 0
    count, before = 0, issued(m)
    for i in range(number_at(m.offsets, call).n, number_at(m.offsets, call + 1).n):
        if byte_at(m.found, i).n == HOSTED and m.inserted < m.insert and count < m.insert_each:
            request(m, number_at(m.expert, i).n, call + m.n_layers, call)
            m.inserted += 1
            count += 1
    if count:
        counts_at(m.counts, m.phase).inserted += issued(m) - before
        requests(m, count, before)
