"""What a policy decides, as data that any engine can execute.

Decisions are taken at **moments**. Step ``s`` of a model with ``L`` routed layers has ``L + 1`` of them: moment
``s * (L + 1)`` when the step begins and the embedding layer's output is known, and moment ``s * (L + 1) + 1 + l`` when
routed layer ``l`` has its route. A **call** is one routed layer of one step, numbered ``s * L + l``.

Nothing here depends on simulated time, so a plan is made once for a trace, reused by every design that shares it, and
executed by the SimPy engine, by a compiled one, or by a real GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sim.eviction import Eviction
from traces.errors import InputError


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
        """Group requests given one a row (all (N,)) in any order; ``priority`` defaults to the call."""
        order = np.argsort(moment, kind="stable")
        moment, call, expert = (np.asarray(a, np.int64)[order] for a in (moment, call, expert))
        ranks = call if priority is None else np.asarray(priority, np.int64)[order]
        distinct, first = np.unique(moment, return_index=True)
        return Requests(distinct, np.append(first, len(moment)), call, expert, ranks)

    def check(self, n_layers: int, n_experts: int, n_steps: int) -> None:
        """Raise InputError if a request is for a call that has passed, or for an expert of another layer."""
        moment = np.repeat(self.moment, np.diff(self.offsets))
        step, point = np.divmod(moment, n_layers + 1)
        late = np.flatnonzero(self.call < step * n_layers + point)
        if len(late):
            i = late[0]
            raise InputError(
                f"plan: request {i} at step {step[i]}, point {point[i]} is for call {self.call[i]}, which has passed"
            )
        stray = np.flatnonzero((self.expert // n_experts != self.call % n_layers) | (self.expert < 0))
        if len(stray):
            i = stray[0]
            raise InputError(
                f"plan: request {i} for call {self.call[i]} (routed layer {self.call[i] % n_layers}) names expert "
                f"{self.expert[i]}, of layer {self.expert[i] // n_experts}"
            )
        beyond = np.flatnonzero(self.call >= n_steps * n_layers)
        if len(beyond):
            raise InputError(
                f"plan: request {beyond[0]} is for call {self.call[beyond[0]]}; the run has {n_steps * n_layers}"
            )


@dataclass(frozen=True)
class Values:
    """How much each expert is worth keeping, for eviction rules that ask (``score``).

    ``table`` (V, L * E) int64; at ``moment[i]`` the row ``index[i]`` comes into force. Moments rise strictly.
    """

    moment: np.ndarray
    index: np.ndarray
    table: np.ndarray


@dataclass(frozen=True)
class Prediction:
    """What predicting costs: ``ns`` of each moment in ``moment`` (rising), on the critical path or beside it.

    On the critical path the step waits; beside it, the requests of that moment are made ``ns`` later. ``prompt_ns`` is
    charged at the beginning of every prefill (loading tables, matching the prompt) and so to TTFT.
    """

    moment: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    critical: bool = True
    prompt_ns: int = 0


Discipline = Literal["fifo", "demand-first", "preemptive"]


@dataclass(frozen=True)
class Plan:
    """Everything that an engine needs to know of a policy.

    Attributes:
        eviction: name of a rule in ``sim.eviction.EVICTIONS``, or a class like those (SimPy engine only).
        per_layer: split the slots evenly over layers, a pool each, instead of sharing one.
        keep: False lets no expert outlive its call: pure streaming.
        requests: prefetches, or None.
        values: values for the ``score`` rule, or None.
        prediction: what predicting costs.
        stream_prefill: while a layer of a prefill computes, copy the next layer's experts behind this layer's demands.
        everything_resident: all experts are on the GPU from the start, whatever the budget.
        gpu_bytes: GPU memory that tables and predictors take away from expert slots.
        discipline: order of the link's queue; a run may override it.
        chunks: pieces that a transfer is cut into, 0 for the matrices of one expert; a run may override it.
    """

    eviction: str | Callable[[np.ndarray], Eviction] = "lru"
    per_layer: bool = False
    keep: bool = True
    requests: Requests | None = None
    values: Values | None = None
    prediction: Prediction = field(default_factory=Prediction)
    stream_prefill: bool = False
    everything_resident: bool = False
    gpu_bytes: int = 0
    discipline: Discipline = "preemptive"
    chunks: int = 0
