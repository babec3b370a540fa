"""What a policy decides, as data that any engine can execute.

Decisions are taken at **moments**. Step ``s`` of a model with ``L`` routed layers has ``L + 1`` of them: moment
``s * (L + 1)`` when the step begins and the embedding layer's output is known, and moment ``s * (L + 1) + 1 + l`` when
routed layer ``l`` has its route. A **call** is one routed layer of one step, numbered ``s * L + l``.

Nothing here depends on simulated time, so a plan is made once for a trace, reused by every design that shares it, and
executed by the SimPy engine, by the compiled one, or by a real GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ground.errors import InputError
from sim.eviction import Eviction, goes_by_values, largest_factor
from sim.plan_checks import PlanError, at_fault, check_integers, check_number, check_switch
from sim.scorer import Scorer
from sim.shares import Shares

SWITCHES = (
    "per_layer", "keep", "stream_prefill", "ring", "insist", "write_back", "everything_resident", "only_idle",
)  # fmt: skip
"""Fields of a plan that are True or False."""
MOST_CHUNKS = 1_000_000
"""Pieces of a transfer; more is a slip of the keyboard."""


def _columns(**given: Any) -> list[np.ndarray]:
    """Columns that a policy gives, as int64; what an engine is given is checked by ``_integers``.

    A policy may have whole numbers as floats. A fraction that was cut off would be another request without a word.
    """
    columns = {name: np.asarray(column) for name, column in given.items()}
    for name, column in columns.items():
        if column.shape != columns["moment"].shape or column.ndim != 1:
            raise at_fault(f"requests.{name}", column.shape, f"as many as moments, {columns['moment'].shape}")
        if column.size and column.dtype.kind not in "iuf":
            raise at_fault(f"requests.{name}", column.dtype.name, "whole numbers")
        if column.dtype.kind in "uf" and column.size:
            odd = ~((column == np.floor(column)) & (np.abs(column) < 2.0**63))
            if odd.any():
                i = int(odd.argmax())
                raise at_fault(f"requests.{name}[{i}]", column[i].item(), "a whole number of 64 bits")
    return [column.astype(np.int64, copy=False) for column in columns.values()]


@dataclass(frozen=True)
class Requests:
    """Prefetches that a policy asks for, grouped by moment.

    ``moment`` (M,) int64 rises strictly; requests ``offsets[i]:offsets[i+1]`` are made at ``moment[i]``, in that order.
    ``call`` (N,) int64 is the call that each is for, ``expert`` (N,) int64 the flat number ``layer * E + expert`` and
    ``priority`` (N,) int64 its place in the queue, smaller sooner; equal ones keep the order in which they were made.

    A request for a resident expert moves nothing: it keeps the expert from being evicted for another prefetch until
    that call has passed. One for an expert already queued keeps the better of both priorities and the later call.
    """

    moment: np.ndarray
    offsets: np.ndarray
    call: np.ndarray
    expert: np.ndarray
    priority: np.ndarray

    @staticmethod
    def build(
        moment: np.ndarray, call: np.ndarray, expert: np.ndarray, priority: np.ndarray | None = None
    ) -> "Requests":
        """Group requests given one a row (all (N,)) in any order; ``priority`` defaults to the call.

        Raises PlanError, naming the field, unless all are whole numbers and equally many.
        """
        moment, call, expert, ranks = _columns(
            moment=moment, call=call, expert=expert, priority=call if priority is None else priority
        )
        order = np.argsort(moment, kind="stable")
        moment, call, expert, ranks = moment[order], call[order], expert[order], ranks[order]
        distinct, first = np.unique(moment, return_index=True)
        return Requests(distinct, np.append(first, len(moment)), call, expert, ranks)

    @staticmethod
    def merged(moment: np.ndarray, call: np.ndarray, expert: np.ndarray, priority: np.ndarray) -> "Requests":
        """Requests of several rows of a step (all (N,)) in any order: one an expert and moment, at its best priority.

        At equal priority the smaller expert goes first. All that a moment asks of one expert is for one call.
        """
        columns = _columns(moment=moment, call=call, expert=expert, priority=priority)
        order = np.lexsort((columns[2], columns[3], columns[0]))
        moment, call, expert, priority = (column[order] for column in columns)
        width = int(expert.max(initial=0)) + 1
        # The best stand first, so the first of each expert and moment is its best.
        _, first = np.unique(moment * width + expert, return_index=True)
        best = np.sort(first)
        return Requests.build(moment[best], call[best], expert[best], priority[best])

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise PlanError for wrong arrays, a call that has passed or never comes, or an expert of another layer."""
        check_integers("requests.moment", self.moment, end=n_steps * (n_layers + 1), rising=True)
        check_integers("requests.offsets", self.offsets, length=len(self.moment) + 1)
        check_integers("requests.call", self.call, end=n_steps * n_layers)
        check_integers("requests.expert", self.expert, length=len(self.call), end=n_layers * n_experts)
        check_integers("requests.priority", self.priority, length=len(self.call))
        falls = np.any(self.offsets[1:] < self.offsets[:-1])
        if falls or self.offsets[0] != 0 or self.offsets[-1] != len(self.call):
            raise at_fault("requests.offsets", self.offsets.tolist()[:8], f"rising from 0 to {len(self.call)}")
        step, point = np.divmod(np.repeat(self.moment, np.diff(self.offsets)), n_layers + 1)
        if len(late := np.flatnonzero(self.call < step * n_layers + point)):
            i = late[0]
            raise PlanError(
                f"plan: request {i} at step {step[i]}, point {point[i]} is for call {self.call[i]}, which has passed"
            )
        if len(stray := np.flatnonzero(self.expert // n_experts != self.call % n_layers)):
            i = stray[0]
            raise PlanError(
                f"plan: request {i} for call {self.call[i]} (routed layer {self.call[i] % n_layers}) names expert "
                f"{self.expert[i]}, of layer {self.expert[i] // n_experts}"
            )


@dataclass(frozen=True)
class Values:
    """How much each expert is worth keeping, for eviction rules that go by it (their names begin with ``score``).

    ``table`` (V, L * E) of integers; at ``moment[i]`` the row ``index[i]`` comes into force. Moments rise strictly.
    Rows that come back are named again, not stored again.

    A policy that learns something new of one layer at a time names it in ``layer`` (M,): the table then has a row of E
    values (V, E), and ``index[i]`` is in force for routed layer ``layer[i]`` alone. Moments may then repeat, with
    rising layers. All experts are worth 0 until something is said of them.
    """

    moment: np.ndarray
    index: np.ndarray
    table: np.ndarray
    layer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def constant(worth: np.ndarray) -> "Values":
        """What each expert is worth (L * E,), in force from the beginning."""
        return Values(np.zeros(1, np.int64), np.zeros(1, np.int64), worth[None])

    @property
    def by_layer(self) -> bool:
        """Whether a row is of one layer."""
        return len(self.layer) > 0

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise PlanError for wrong arrays, a row that the table lacks, or a table that is not one value an expert."""
        check_integers("values.layer", self.layer)
        check_integers("values.moment", self.moment, end=n_steps * (n_layers + 1), rising=not self.by_layer)
        if self.by_layer:
            check_integers("values.layer", self.layer, length=len(self.moment), end=n_layers)
            check_integers("values.moment x layers + layer", self.moment * n_layers + self.layer, rising=True)
        check_integers("values.table", self.table, dimensions=2)
        check_integers("values.index", self.index, length=len(self.moment), end=len(self.table))
        columns = n_experts if self.by_layer else n_layers * n_experts
        if len(self.moment) and self.table.shape[1] != columns:
            raise at_fault("values.table", self.table.shape, f"{columns} columns, one an expert")

    def largest(self) -> int:
        """The largest absolute value in the table."""
        return max(int(self.table.max(initial=0)), -int(self.table.min(initial=0)))


@dataclass(frozen=True)
class Prediction:
    """What predicting costs: ``ns`` of each moment in ``moment`` (rising), on the critical path or beside it.

    On the critical path the step waits; beside it, values and requests of that moment come ``ns`` later. ``prompt_ns``
    is charged at the beginning of every prefill (loading tables, matching the prompt) and so to TTFT.
    ``before_demands``: when a layer's route is known, all that is decided then (values, prediction, requests) comes
    before the layer's experts are looked up and demanded, instead of after; a slow prediction then holds the demands
    up.

    ``ahead``: what is predicted as steps begin needs the tokens of the step and nothing else. So it is made beside the
    steps, by what `sim.schedules.pipeline` calls the predictor, and the step waits until it is there: how long that is
    the run's pipeline says. Real runs predict when the step begins.
    """

    moment: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    critical: bool = True
    prompt_ns: int = 0
    before_demands: bool = False
    ahead: bool = False

    def check(self, n_layers: int, n_steps: int) -> None:
        """Raise PlanError for wrong arrays or a time below 0."""
        check_integers("prediction.moment", self.moment, end=n_steps * (n_layers + 1), rising=True)
        check_integers("prediction.ns", self.ns, length=len(self.moment), end=2**62)
        check_number("prediction.prompt_ns", self.prompt_ns)
        check_switch("prediction.critical", self.critical)
        check_switch("prediction.before_demands", self.before_demands)
        check_switch("prediction.ahead", self.ahead)

    def total_ns(self, prefills: int) -> int:
        """Time of all predictions of a run with so many prefills."""
        return sum(self.ns.tolist()) + int(self.prompt_ns) * prefills


@dataclass(frozen=True)
class Host:
    """Absent experts may run on the host, where their weights lie, instead of crossing the link.

    An expert over n rows takes ``fixed_ns + max(read_ns, n * row_ns)`` there, each (L,) int64, one a routed layer;
    ``shared_ns`` stands for ``read_ns`` where the link moves something when the host begins: both read host memory,
    and the link, whose reads do not wait for a processor, keeps its speed. An expert that its look-up finds absent runs
    on the host if that takes less (by ``read_ns``) than to copy it and run it on the GPU; otherwise it is demanded.
    The host takes a call's experts one after another, ``beside`` what GPU and link do for the call, or after that, and
    ``call_ns`` more for the first of them.

    With ``stream_from`` it is the rows of the step that decide: those of a step of so many rows or more are demanded,
    all others run on the host. ``copied`` (L, E + 1) int64 splits a call: of n experts that would run on the host, the
    first ``copied[layer, n]`` are demanded. ``insert`` is how many experts that ran on the host are requested in each
    step, ``insert_each`` how many in each call of it, for the next visit of their layer.

    Experts in ``reserved`` (N,) int64, flat and rising, have a slot each in the budget, which no other expert is given.
    They come there as all experts do, by request or demand.
    """

    fixed_ns: np.ndarray
    read_ns: np.ndarray
    shared_ns: np.ndarray
    row_ns: np.ndarray
    reserved: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    beside: bool = True
    stream_from: int | None = None
    copied: np.ndarray | None = None
    insert: int = 0
    insert_each: int = 2**31 - 1
    call_ns: int = 0

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise PlanError for wrong arrays, times below 0 or above 2^40, or experts that do not exist."""
        for name in ("fixed_ns", "read_ns", "shared_ns", "row_ns"):
            check_integers(f"host.{name}", getattr(self, name), length=n_layers, end=2**40 + 1)
        check_integers("host.reserved", self.reserved, end=n_layers * n_experts, rising=True)
        check_switch("host.beside", self.beside)
        for name in ("stream_from", "insert", "insert_each", "call_ns"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**31):
                raise PlanError(f"host.{name} is {value!r:.40}; expected a whole number from 0 on")
        if self.copied is not None:
            split = self.copied
            if not isinstance(split, np.ndarray) or split.dtype != np.int64 or split.shape != (n_layers, n_experts + 1):
                raise PlanError(f"host.copied: expected int64 ({n_layers}, {n_experts + 1})")
            if (split < 0).any() or (split > np.arange(n_experts + 1)).any():
                raise PlanError("host.copied: of n experts 0 to n are copied; found others")


Discipline = Literal["fifo", "demand-first", "preemptive"]


class Decision(NamedTuple):
    """What a plan decides at one moment."""

    values: list[tuple[int, np.ndarray]]
    """New values, (the first expert that they are of, one value an expert from there on)."""
    predict_ns: int
    """Time of predicting."""
    requests: list[tuple[int, int, int]]
    """(expert, call, priority)."""
    shares: list[int] | None = None
    """New shares, slots of each layer; None where they stay."""


@dataclass(frozen=True)
class Plan:
    """Everything that an engine needs to know of a policy.

    Attributes:
        eviction: name of a rule in ``sim.eviction.EVICTIONS``, or a class like those (which the compiled engine
            leaves to the SimPy engine).
        per_layer: split the slots evenly over layers, a pool each, instead of sharing one.
        shares: how many slots of the one pool each layer should have, or None; then who leaves is the first by the
            layer's own order, of the layer that holds most beyond its share.
        keep: False lets no expert outlive its call, but for those with reserved slots: pure streaming.
        requests: prefetches, or None.
        most_issued: the most copies that the requests of one moment issue: those of the first that are neither in a
            slot nor on their way. The others are left out. 0 for no such limit.
        only_idle: requests made while the link moves something issue no copy.
        values: values for the rules that go by them, or None.
        scorer: what reckons worths while the run goes, for the rule ``scored``, or None.
        prediction: what predicting costs.
        stream_prefill: while a layer of a prefill computes, copy the next layer's experts behind this layer's demands.
        ring: begin with a copy of the first layer as a whole, while any layer computes copy the whole next one (after
            the last, the next step's first), and let a call wait until all that was asked for it is there, needed or
            not.
        insist: let every call wait until all that was asked for it is there, needed or not, as in a ring.
        write_back: copy whoever is evicted to the host, over the link and before the copy that takes the slot.
        host: where absent experts may run on the host, what that costs; or None.
        everything_resident: all experts are on the GPU from the start, whatever the budget.
        gpu_bytes: GPU memory that tables and predictors take away from expert slots.
        most_bytes: the most memory that slots may take, where the design has no use for more; 0 for no such limit.
        least_bytes: the memory that slots take even where the cache has less: a reference, not a system of equal
            memory.
        discipline: order of the link's queue; a run may override it.
        chunks: pieces that a transfer is cut into, 0 for those of a real run (``sim.machine.pieces``); a run may
            override it.
        note: what a person should know of it (what it learned from, where it fell short), for the report.
    """

    eviction: str | Callable[[np.ndarray], Eviction] = "lru"
    per_layer: bool = False
    shares: Shares | None = None
    keep: bool = True
    requests: Requests | None = None
    most_issued: int = 0
    only_idle: bool = False
    values: Values | None = None
    scorer: Scorer | None = None
    prediction: Prediction = field(default_factory=Prediction)
    stream_prefill: bool = False
    ring: bool = False
    insist: bool = False
    write_back: bool = False
    host: Host | None = None
    everything_resident: bool = False
    gpu_bytes: int = 0
    most_bytes: int = 0
    least_bytes: int = 0
    discipline: Discipline = "preemptive"
    chunks: int = 0
    note: str = ""

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise PlanError, naming the field, for anything that no engine could execute in a run of that shape."""
        for name in SWITCHES:
            check_switch(name, getattr(self, name))
        for name, kind in (("requests", Requests), ("values", Values), ("host", Host), ("shares", Shares)):
            part = getattr(self, name)
            if not isinstance(part, kind | None):
                raise at_fault(name, type(part).__name__, f"{kind.__name__} or None")
            if part is not None:
                part.check(n_layers, n_experts, n_steps)
        if not isinstance(self.prediction, Prediction):
            raise at_fault("prediction", type(self.prediction).__name__, "a Prediction")
        self.prediction.check(n_layers, n_steps)
        self._check_eviction(n_layers, n_steps)
        if self.discipline not in get_args(Discipline):
            raise at_fault("discipline", self.discipline, f"one of {', '.join(get_args(Discipline))}")
        if self.host is not None and (self.everything_resident or self.ring):
            raise at_fault("host", "a Host", "None where everything is resident, or in a ring")
        if self.shares is not None and (self.per_layer or self.host is not None):
            raise at_fault("shares", "Shares", "None where layers have pools, or experts may run on the host")
        if self.shares is not None and self.eviction in ("lru", "fifo"):
            raise at_fault("eviction", self.eviction, "a rule that ranks experts where layers have shares")
        if self.everything_resident and not self.keep:
            raise at_fault("keep", self.keep, "True where everything is resident")
        check_number("gpu_bytes", self.gpu_bytes)
        check_number("most_bytes", self.most_bytes)
        check_number("least_bytes", self.least_bytes)
        check_number("most_issued", self.most_issued)
        check_number("chunks", self.chunks, most=MOST_CHUNKS)
        if not isinstance(self.note, str):
            raise at_fault("note", self.note, "a text")

    def _check_eviction(self, n_layers: int, n_steps: int) -> None:
        if not isinstance(self.eviction, str) and not callable(self.eviction):
            raise at_fault("eviction", self.eviction, "the name of a rule, or a class")
        try:
            by_values, factor = goes_by_values(self.eviction), largest_factor(self.eviction, n_steps)
        except InputError as unknown:
            raise PlanError(f"plan: {unknown}") from None
        largest = 0 if self.values is None else self.values.largest()
        if (self.scorer is not None) != (self.eviction == "scored"):
            raise at_fault("scorer", type(self.scorer).__name__, "a Scorer with eviction 'scored', and with no other")
        if self.scorer is not None:
            self.scorer.check(n_steps * n_layers)
        if self.values is None and by_values:
            raise at_fault("values", None, f"Values, which eviction {self.eviction!r} goes by")
        if factor > 1 and largest * factor >= 2**63:
            raise at_fault("values.table", largest, f"at most {2**63 // factor - 1}: times {factor}, 64 bits")

    def by_moment(self, n_experts: int) -> dict[int, Decision]:
        """The moments at which anything is decided, and what that is; ``n_experts`` a layer."""
        table: dict[int, Decision] = {}
        if self.requests is not None:
            asked = self.requests
            rows = list(zip(asked.expert.tolist(), asked.call.tolist(), asked.priority.tolist(), strict=True))
            bounds = asked.offsets.tolist()
            for i, moment in enumerate(asked.moment.tolist()):
                table[moment] = Decision([], 0, rows[bounds[i] : bounds[i + 1]])
        for moment, ns in zip(self.prediction.moment.tolist(), self.prediction.ns.tolist(), strict=True):
            table[moment] = Decision([], ns, table[moment].requests if moment in table else [])
        if self.values is not None:
            worth = self.values
            layers = worth.layer.tolist() if worth.by_layer else [0] * len(worth.moment)
            for moment, layer, row in zip(worth.moment.tolist(), layers, worth.index.tolist(), strict=True):
                values = table.setdefault(moment, Decision([], 0, [])).values
                values.append((layer * n_experts, worth.table[row]))
        if self.shares is not None:
            for moment, row in zip(self.shares.moment.tolist(), self.shares.table.tolist(), strict=True):
                table[moment] = table.get(moment, Decision([], 0, []))._replace(shares=row)
        return table
