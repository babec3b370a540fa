"""What a run has to compute, as integers: the layer calls of a trace and what each costs on the given hardware.

Routes do not depend on simulated time, so the order of steps, the experts of every call and the time of every kernel
are worked out once, before any engine runs; an engine only adds the transfers.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.eviction import NEVER
from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import HostTimes
from sim.machine.pieces import goes_whole, pieces_of
from traces.models.spec import ModelSpec
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

MOST = 2**62
"""Nanoseconds of a run and bytes on its link, at most: every sum of them then fits 64 bits, in any engine."""


@dataclass(frozen=True)
class Schedule:
    """Which trace rows run together, step after step.

    Attributes:
        phase: PREFILL (0) or DECODE (1), a step (S,).
        offsets, rows: step ``s`` runs trace rows ``rows[offsets[s]:offsets[s+1]]``.
        begin: the first step of the round that each belongs to (S,). What is decided of the steps of a round is decided
            together, before it begins. None: every step is a round.
        moved: whether a row's sequence was in another batch before, so that what it has cached moves, one of ``rows``
            each. None: nobody moves.
        goes_on: whether a step goes on with the prompt of the step before it (S,) bool. None: prompts run whole.
    """

    phase: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    begin: np.ndarray | None = None
    moved: np.ndarray | None = None
    goes_on: np.ndarray | None = None

    @property
    def n_steps(self) -> int:
        """Steps of the run, S."""
        return len(self.phase)

    @property
    def part(self) -> np.ndarray:
        """``goes_on``, of whatever schedule."""
        return np.zeros(self.n_steps, bool) if self.goes_on is None else self.goes_on


def sequence_parts(trace: Trace) -> list[tuple[int, int, int]]:
    """Of each sequence its first row, its first decode row and the row after its last one."""
    bounds = trace.offsets
    decode_from = bounds[:-1] + np.add.reduceat(trace.phase == PREFILL, bounds[:-1])
    return list(zip(bounds[:-1].tolist(), decode_from.tolist(), bounds[1:].tolist(), strict=True))


def batched(trace: Trace, batch: int, most_rows: int | None = None) -> Schedule:
    """Closed-loop continuous batching: ``batch`` sequences decode together, and the next prefills as soon as one ends.

    A prefill runs alone, all its tokens passing each layer together, or ``most_rows`` of them at a time, one step after
    the other; sequences start in the order of the trace. Raises InputError if either number is not positive.
    """
    if batch < 1:
        raise InputError(f"batch: {batch} sequences; give at least 1")
    if most_rows is not None and most_rows < 1:
        raise InputError(f"--ubatch {most_rows}; expected at least 1 row")
    waiting = sequence_parts(trace)[::-1]
    phase: list[int] = []
    steps: list[list[int]] = []
    goes_on: set[int] = set()
    active: list[list[int]] = []
    while waiting or active:
        while waiting and len(active) < batch:
            begin, decode, end = waiting.pop()
            for first in range(begin, decode, most_rows or max(1, decode - begin)):
                if first > begin:
                    goes_on.add(len(steps))
                phase.append(PREFILL)
                steps.append(list(range(first, min(decode, first + (most_rows or decode)))))
            if end > decode:
                active.append([decode, end])
        if active:
            phase.append(DECODE)
            steps.append([row for row, _ in active])
            for slot in active:
                slot[0] += 1
            active = [slot for slot in active if slot[0] < slot[1]]
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in steps])])
    rows = np.array([row for s in steps for row in s], np.int64)
    parts = np.isin(np.arange(len(steps)), list(goes_on)) if goes_on else None
    return Schedule(np.array(phase, np.int64), offsets, rows, goes_on=parts)


@dataclass(frozen=True)
class Workload:
    """The calls of a run. S steps, L routed layers, E experts a layer; call ``s * L + l``; expert ``l * E + e``.

    An expert that a call needs is **there** if it is resident when its wave begins, or else it is **awaited**. The two
    may take different GPU time: those that are there are launched together, an awaited one by itself while its copy
    runs. A wave whose experts have one row each is **split** if fewer of them are there than a token takes: these few
    share what else K share.

    Attributes:
        schedule: which rows run when.
        n_layers, n_experts: L and E.
        offsets: look-ups of call c are ``offsets[c]:offsets[c+1]`` (S * L + 1,) int64.
        expert: distinct experts of each call, rising (N,) int64.
        tokens: how many rows each serves (N,) int64.
        layer_ns: GPU time before a call's route is known, a call (S * L,) int64.
        shared_ns: GPU time of shared experts after it, a call (S * L,) int64.
        expert_ns: GPU time of each look-up's expert if it is there (N,) int64.
        head_ns: GPU time after the last routed layer, a step (S,) int64.
        activations: valid (row, layer, expert) triples, a step (S,) int64.
        expert_bytes: bytes of one expert, a routed layer.
        copy_ns: time of copying one expert alone, a routed layer.
        latency_ns: its fixed part.
        chained: whether a copy that follows another at once is spared that part.
        chunks: pieces that a transfer is cut into by default (``sim.machine.pieces``).
        launch_ns: what passes before the experts of a wave that are there begin; nothing before awaited ones. It is
            counted as nobody's compute time.
        awaited_ns: GPU time of each look-up's expert if it is awaited (N,) int64; None: its ``expert_ns``.
        beside_copy_ns: what a call takes beyond its ``layer_ns`` if a copy is under way as that begins.
        split_wave_ns: what those that are there take more in a split wave, awaited ones beside them or not, by their
            number (E + 1,) int64; of calls whose experts have one row each. It is counted as nobody's compute time
            either. None: nothing.
        move_ns: GPU time before a step's first layer, for what is cached of rows that come from another batch (S,)
            int64. None: nothing moves.
        host_thread: what the host's thread takes for each of its acts; None: the host is no resource of its own.
    """

    schedule: Schedule
    n_layers: int
    n_experts: int
    offsets: np.ndarray
    expert: np.ndarray
    tokens: np.ndarray
    layer_ns: np.ndarray
    shared_ns: np.ndarray
    expert_ns: np.ndarray
    head_ns: np.ndarray
    activations: np.ndarray
    expert_bytes: tuple[int, ...]
    copy_ns: tuple[int, ...]
    latency_ns: int
    chunks: int
    chained: bool = False
    launch_ns: int = 0
    awaited_ns: np.ndarray | None = None
    beside_copy_ns: int = 0
    split_wave_ns: np.ndarray | None = None
    move_ns: np.ndarray | None = None
    host_thread: HostTimes | None = None

    @property
    def n_calls(self) -> int:
        """Layer calls of the run, S * L."""
        return len(self.layer_ns)

    @cached_property
    def call(self) -> np.ndarray:
        """The call of each look-up (N,)."""
        return np.repeat(np.arange(self.n_calls), np.diff(self.offsets))

    @cached_property
    def single(self) -> np.ndarray:
        """Whether all experts of a call have one row each, a call (C,) bool."""
        return np.maximum.reduceat(np.append(self.tokens, 0), self.offsets[:-1]) * (np.diff(self.offsets) > 0) == 1

    @cached_property
    def lookup_phase(self) -> np.ndarray:
        """PREFILL or DECODE, a look-up (N,)."""
        return self.schedule.phase[self.call // self.n_layers]

    @cached_property
    def lookup_bytes(self) -> np.ndarray:
        """Bytes of each look-up's expert (N,)."""
        return np.array(self.expert_bytes, np.int64)[self.expert // self.n_experts]

    @property
    def if_awaited_ns(self) -> np.ndarray:
        """GPU time of each look-up's expert if it is awaited (N,), whether or not that is told apart."""
        return self.expert_ns if self.awaited_ns is None else self.awaited_ns

    @property
    def least_ns(self) -> np.ndarray:
        """The least GPU time of each look-up's expert, there or awaited (N,)."""
        return np.minimum(self.expert_ns, self.if_awaited_ns)

    def compute_ns(self, expert_ns: np.ndarray | None = None) -> np.ndarray:
        """GPU time of each step (S,) int64, its experts taking ``expert_ns`` (N,); by default all are resident."""
        each = self.expert_ns if expert_ns is None else expert_ns
        experts = np.add.reduceat(np.append(each, 0), self.offsets[:-1]) * (np.diff(self.offsets) > 0)
        calls = self.layer_ns + self.shared_ns + experts
        moves = 0 if self.move_ns is None else self.move_ns
        return np.asarray(calls.reshape(-1, self.n_layers).sum(1) + self.head_ns + moves)

    def check_size(self, prefetches: int = 0, predicting_ns: int = 0) -> None:
        """Raise InputError if a run could overflow 64 bits, so many prefetches and so much prediction included.

        Every transfer may be interrupted by every demand once, and then pays its latency again.
        """
        work = (self.layer_ns, self.shared_ns, np.maximum(self.expert_ns, self.if_awaited_ns), self.head_ns)
        busy = sum(int(part.max(initial=0)) * len(part) for part in work)
        apart = 0 if self.split_wave_ns is None else int(self.split_wave_ns.max())
        busy += 0 if self.move_ns is None else int(self.move_ns.max(initial=0)) * len(self.move_ns)
        busy += (self.launch_ns + apart) * len(self.expert) + self.beside_copy_ns * self.n_calls
        transfers = 2 * len(self.expert) + prefetches
        if self.host_thread is not None:
            busy += sum(vars(self.host_thread).values()) * 2 * (transfers + self.n_calls)
        ns = busy + predicting_ns + transfers * max(self.copy_ns)
        size = transfers * max(self.expert_bytes)
        if max(ns, size) > MOST:
            raise InputError(
                f"the run is too long: up to {ns:.1e} ns, {size:.1e} bytes on the link (one expert: "
                f"{max(self.expert_bytes):,} bytes, {max(self.copy_ns):,} ns); expected at most {MOST:.1e} of either"
            )

    def next_call(self) -> np.ndarray:
        """The call that needs each look-up's expert next (N,)."""
        return next_calls(self.offsets, self.expert)

    def first_call(self) -> np.ndarray:
        """The first call that needs each expert (L * E,)."""
        return first_calls(self.offsets, self.expert, self.n_layers * self.n_experts)


def next_calls(offsets: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """The call that needs the same expert next, a look-up (N,) int64; NEVER where there is none.

    Call i needs ``experts[offsets[i]:offsets[i+1]]``.
    """
    call = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    # Calls rise already. Small integers are sorted by radix: no comparison, no logarithm.
    order = np.argsort(experts.astype(np.min_scalar_type(experts.max(initial=0))), kind="stable")
    following = np.full(len(experts), NEVER, np.int64)
    same = experts[order[1:]] == experts[order[:-1]]
    following[order[:-1][same]] = call[order[1:][same]]
    return following


def first_calls(offsets: np.ndarray, experts: np.ndarray, total: int) -> np.ndarray:
    """The first call that needs each of ``total`` experts (total,) int64; NEVER for one that is never needed."""
    call = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    first = np.full(total, NEVER, np.int64)
    np.minimum.at(first, experts, call)
    return first


def cached_tokens(trace: Trace, schedule: Schedule) -> np.ndarray:
    """Tokens that the sequences of each step hold keys and values of, the step's own included (S,) int64."""
    held = trace.position[schedule.rows].astype(np.int64) + 1
    sums = np.add.reduceat(held, schedule.offsets[:-1])
    # The rows of a prefill are one sequence's: it holds what its last row says.
    return np.where(schedule.phase == PREFILL, held[schedule.offsets[1:] - 1], sums)


def _gpu_times(
    costs: Costs, schedule: Schedule, context: np.ndarray, tokens: np.ndarray, layer: np.ndarray
) -> dict[str, np.ndarray]:
    """Times of a `Workload`: of steps with ``context`` (S,), of experts by ``tokens`` and ``layer`` (N,)."""
    rows, part = np.diff(schedule.offsets), schedule.part
    return {
        "layer_ns": costs.layer_ns(rows, context, part).reshape(-1),
        "shared_ns": costs.shared_ns(rows).reshape(-1),
        "expert_ns": costs.expert_ns(tokens, layer),
        "head_ns": costs.head_ns(rows, context, part, ~np.append(part[1:], False)),
    }


def without_loop(work: Workload, trace: Trace, model: ModelSpec, hardware: Hardware) -> Workload:
    """``work`` if bytes and arithmetic alone took time, launching and waiting none; by the formula for all blocks."""
    layer, context = work.expert // work.n_experts, cached_tokens(trace, work.schedule)
    bare = Costs(model, hardware.without_loop())
    times: dict[str, Any] = _gpu_times(bare, work.schedule, context, work.tokens, layer)
    return replace(work, **times, launch_ns=0, awaited_ns=None, beside_copy_ns=0, split_wave_ns=None, host_thread=None)


def workload(trace: Trace, model: ModelSpec, hardware: Hardware, schedule: Schedule) -> Workload:
    """Work out the calls of ``schedule`` and their costs.

    Raises InputError if the trace has another number of routed layers, or of experts, than the model, or if the run
    could overflow 64 bits.
    """
    n_layers, n_experts = trace.n_layers, trace.n_experts
    if len(model.expert_bytes) != n_layers or model.experts != n_experts:
        raise InputError(
            f"model {model.name}: {len(model.expert_bytes)} routed layers of {model.experts} experts, but the trace "
            f"{trace.source} has {n_layers} of {n_experts}; name a model of that shape with --model"
        )
    n_steps = schedule.n_steps
    rows_of = np.diff(schedule.offsets)
    step = np.repeat(np.arange(n_steps), rows_of)
    routes = trace.experts[schedule.rows].astype(np.int64)
    valid = routes >= 0
    layer = np.arange(n_layers)[:, None]
    key = ((step[:, None, None] * n_layers + layer) * n_experts + routes)[valid]
    distinct, tokens = np.unique(key, return_counts=True)
    call, expert = np.divmod(distinct, n_experts)
    layer_of = call % n_layers
    activations = np.bincount(step, weights=valid.sum((1, 2)), minlength=n_steps).astype(np.int64)
    costs = Costs(model, hardware)
    context = cached_tokens(trace, schedule)
    thread = costs.host_thread
    if thread is not None and not goes_whole(max(model.expert_bytes)):
        thread = replace(thread, copies_ahead=0)  # pieces are handed over ahead then, and those are short
    work = Workload(
        schedule=schedule,
        n_layers=n_layers,
        n_experts=n_experts,
        offsets=np.searchsorted(call, np.arange(n_steps * n_layers + 1)),
        expert=layer_of * n_experts + expert,
        tokens=tokens.astype(np.int64),
        **_gpu_times(costs, schedule, context, tokens, layer_of),
        activations=activations,
        expert_bytes=tuple(model.expert_bytes),
        copy_ns=tuple(hardware.copy_ns(size) + costs.handover_ns for size in model.expert_bytes),
        latency_ns=min(map(hardware.startup_ns, model.expert_bytes)),
        chunks=pieces_of(max(model.expert_bytes), model.expert_matrices),
        chained=hardware.link.queued is not None,
        launch_ns=costs.launch_ns,
        awaited_ns=costs.awaited_ns(tokens, layer_of),
        beside_copy_ns=costs.beside_copy_ns,
        split_wave_ns=costs.split_wave_ns(),
        host_thread=thread,
    )
    work.check_size()
    return work
