"""What no policy can beat: the time to compute with everything resident, and the bytes that must cross the link.

A policy that computes experts elsewhere than on the GPU is outside these bounds. It has others (`joint_bounds`):
whatever is not kept must cross the link or be computed on the host, and both together do only so much in a second.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from sim.compiled.availability import SHORT, available
from sim.eviction import NEVER
from sim.workload import Workload, next_calls
from traces.schema import DECODE


def fewest_loads(
    offsets: np.ndarray, experts: np.ndarray, sizes: np.ndarray, capacity: int, at_once: int | None = None,
    compiled: bool | None = None,
) -> np.ndarray:  # fmt: skip
    """Bytes that each look-up loads (N,) int64 where a run of the calls moves the fewest bytes in all.

    Call i needs ``experts[offsets[i]:offsets[i+1]]``; the cache begins empty and has ``capacity`` bytes. Keeping an
    expert from one call to the next that needs it saves its bytes and fills its room between them. What is kept across
    a call must fit beside the call's own experts, of which at least ``at_once`` are there at once (the rest may follow
    in further waves; by default as many as fit into the whole cache); wherever it does not, dropping those needed
    farthest in the future saves most (Belady, IBM Systems J. 5(2), 1966). ``sizes`` are bytes, one a look-up, equal
    within a call; where they differ an expert may be dropped in part, which can only lower the bound. Compiled code
    does it if ``compiled`` says so; by default if it can and there are many look-ups.
    """
    if len(sizes) and sizes.min() == sizes.max():
        capacity -= capacity % int(sizes[0])  # whole experts alone are kept
    if compiled is None:
        compiled = len(experts) >= SHORT and available()
    if compiled:
        from sim.compiled.fewest import fewest_loads as compiled_loads

        return compiled_loads(offsets, experts, sizes, capacity, at_once)
    following = next_calls(offsets, experts).tolist()
    ids, size, bounds = experts.tolist(), sizes.tolist(), offsets.tolist()
    kept: dict[int, int] = {}  # bytes of each expert that are kept for its next use
    farthest: list[tuple[int, int]] = []  # (-that call, expert); entries of calls gone by sink below all others
    held = 0
    loads: list[int] = []

    def shrink(held: int, room: int) -> int:
        while held > room:
            expert = farthest[0][1]
            cut = min(kept[expert], held - room)
            held -= cut
            kept[expert] -= cut
            if not kept[expert]:
                del kept[expert]
                heappop(farthest)
        return held

    for call in range(len(bounds) - 1):
        span = range(bounds[call], bounds[call + 1])
        for i in span:
            have = kept.pop(ids[i], 0)
            held -= have
            loads.append(size[i] - have)
        if span:
            one = size[span[0]]
            wave = capacity // one if at_once is None else at_once
            held = shrink(held, capacity - one * min(len(span), wave))
        for i in span:
            if following[i] != NEVER:
                kept[ids[i]] = size[i]
                held += size[i]
                heappush(farthest, (-following[i], ids[i]))
        held = shrink(held, capacity)
    return np.array(loads, np.int64)


def experts_at_once(work: Workload, capacity: int) -> int:
    """How many experts of a call (or all of them, if fewer) are there at once, whatever pools share ``capacity`` bytes.

    With a pool a layer a large call runs in waves of that pool, and other layers' experts stay meanwhile. A policy's
    tables may take any part of ``capacity``: where one pool is all that it allows and sizes are unequal, a few bytes
    less can cost a wave one expert and leave room for a smaller one.
    """
    slots = capacity // max(work.expert_bytes)
    if slots >= work.n_layers:
        return slots // work.n_layers
    return slots if len(set(work.expert_bytes)) == 1 else max(1, slots - 1)


def fewest_decode_bytes(work: Workload, capacity: int, beside: int = 0) -> int:
    """Fewest bytes that the decode steps of a run must load.

    A stretch of decode steps begins with a warm cache, which saves at most its capacity, and at most what it needs.
    ``beside`` are bytes more through which experts may pass one by one, as `joint_loads` has it.
    """
    phase, n_layers, sizes = work.schedule.phase, work.n_layers, work.lookup_bytes
    if len(set(work.expert_bytes)) == 1:
        capacity -= capacity % work.expert_bytes[0]
    wave = 1 if beside else experts_at_once(work, capacity)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], phase == DECODE, [0]])))
    total, compiled = 0, len(work.expert) >= SHORT and available()
    for begin, end in zip(edges[::2] * n_layers, edges[1::2] * n_layers, strict=True):
        first, last = work.offsets[begin], work.offsets[end]
        experts, size = work.expert[first:last], sizes[first:last]
        _, once = np.unique(experts, return_index=True)
        cold = fewest_loads(work.offsets[begin : end + 1] - first, experts, size, capacity + beside, wave, compiled)
        total += max(0, int(cold.sum()) - min(capacity, int(size[once].sum())))
    return total


@dataclass(frozen=True)
class Bounds:
    """Bounds of a run at a capacity.

    Attributes:
        compute_ns: the least GPU time of all steps, whether experts are there or waited for.
        link_bytes: fewest bytes that the whole run must load from a cold cache.
        decode_compute_ns, decode_link_bytes: the same of decode alone, from a warm cache.
        bytes_per_s: the most that the link can move.
        decode_bare_ns: ``decode_compute_ns`` if launching and waiting took no time; None where nobody worked it out.
        decode_hit_ratio: the share of decode's look-ups whose bytes such a run of fewest loads has there already,
            nothing being loaded ahead of need: the hit ratio of Belady's MIN. None without look-ups.
        idle_bytes, decode_idle_bytes: what a host that computes experts could read while it waits for routes.
    """

    compute_ns: int
    link_bytes: int
    decode_compute_ns: int
    decode_link_bytes: int
    bytes_per_s: float
    decode_hit_ratio: float | None = None
    decode_bare_ns: int | None = None
    idle_bytes: float = 0.0
    decode_idle_bytes: float = 0.0

    @property
    def loop_share(self) -> float | None:
        """What launches and waits, not bytes and arithmetic, are of decode's compute bound, 0 to 1."""
        if self.decode_bare_ns is None or not self.decode_compute_ns:
            return None
        return max(0.0, 1 - self.decode_bare_ns / self.decode_compute_ns)

    @property
    def ns(self) -> float:
        """The whole run takes at least this."""
        return max(self.compute_ns, (self.link_bytes + self.idle_bytes) / self.bytes_per_s * 1e9)

    @property
    def decode_ns(self) -> float:
        """All decode steps together take at least this."""
        return max(self.decode_compute_ns, (self.decode_link_bytes + self.decode_idle_bytes) / self.bytes_per_s * 1e9)


def bounds(work: Workload, capacity: int, bytes_per_s: float) -> Bounds:
    """Bounds of ``work`` at ``capacity`` bytes for experts, the policy's own tables included."""
    compute = work.compute_ns(work.least_ns)
    decode, size = work.schedule.phase == DECODE, work.lookup_bytes
    loads = fewest_loads(work.offsets, work.expert, size, capacity, experts_at_once(work, capacity))
    decoding = work.lookup_phase == DECODE
    return Bounds(
        compute_ns=int(compute.sum()),
        link_bytes=int(loads.sum()),
        decode_compute_ns=int(compute[decode].sum()),
        decode_link_bytes=fewest_decode_bytes(work, capacity),
        bytes_per_s=bytes_per_s,
        decode_hit_ratio=1 - int(loads[decoding].sum()) / int(size[decoding].sum()) if decoding.any() else None,
    )


def joint_loads(work: Workload, capacity: int) -> tuple[int, int]:
    """Fewest bytes that link and host together must take on, of the whole run and of decode alone.

    Whoever computes some look-ups on the host loads, for the others, what a run without them loads. Were the former
    loaded too, each for its use alone and through one slot more, it would be a run on the GPU of all look-ups. So what
    crosses the link and what the host computes are together no less than what such a run loads.
    """
    one = max(work.expert_bytes)
    whole = fewest_loads(work.offsets, work.expert, work.lookup_bytes, capacity + one, 1)
    return int(whole.sum()), fewest_decode_bytes(work, capacity, one)


def joint_bounds(
    work: Workload, loads: tuple[int, int], bytes_per_s: float, alone_ns: np.ndarray, chosen: np.ndarray
) -> Bounds:
    """Bounds of a run whose look-ups may be computed on the host.

    Args:
        work: the calls.
        loads: of `joint_loads`.
        bytes_per_s: the most that the link can move.
        alone_ns: the least time of each look-up on the host (N,).
        chosen: which look-ups may be computed there (N,) bool.

    In ``compute_ns`` no expert is on the GPU, and ``bytes_per_s`` is the most that link and host do together: the link
    at its best, beside the host at the rate of the look-up on which it is fastest. The host begins when a route is
    known and ends with the call: so it rests while attention and head are computed.
    """
    compute = work.compute_ns(np.zeros_like(work.expert_ns))
    waits = compute - work.shared_ns.reshape(-1, work.n_layers).sum(axis=1)
    with np.errstate(divide="ignore"):
        rates = work.lookup_bytes[chosen] / alone_ns[chosen] * 1e9
    host = float(rates.max(initial=0.0))
    idle = waits * (host / 1e9 if host < float("inf") else 0.0)
    decode = work.schedule.phase == DECODE
    return Bounds(
        compute_ns=int(compute.sum()),
        link_bytes=loads[0],
        decode_compute_ns=int(compute[decode].sum()),
        decode_link_bytes=loads[1],
        bytes_per_s=bytes_per_s + host,
        idle_bytes=float(idle.sum()),
        decode_idle_bytes=float(idle[decode].sum()),
    )
