"""What a policy may know, moment by moment.

A policy plans a whole trace at once, but every array that a view hands out belongs to a moment and holds, in each row,
only what a running system would know of that row then: a policy that computes row by row from these cannot peek. On a
real GPU the same policy is given a view of one step. Rows are the rows of all steps in the order in which they run
(R,), prefill rows included; ``step`` tells which step each belongs to.

Points of a step: 0, the embedding layer's output is known; ``1 + l``, routed layer ``l`` has its route.
"""

from typing import Any

import numpy as np

from ground.errors import InputError
from sim.workload import Workload
from traces.probabilities import weights_of
from traces.schema import DECODE, PREDICTED, PREFILL
from traces.trace import Trace

PREDICTING = "`python -m traces predictor predict` writes it"
"""How a person gets the predictions that a trace lacks."""


class View:
    """The causal view of a trace in the order in which a schedule runs it."""

    def __init__(self, trace: Trace, work: Workload, clairvoyant: bool = False, foresight: int = 0) -> None:
        self._trace = trace
        self._work = work
        self._clairvoyant = clairvoyant
        self._foresight = work.n_layers if clairvoyant else foresight
        self._rows = work.schedule.rows
        self.n_layers = work.n_layers
        self.n_experts = work.n_experts
        self.n_steps = work.schedule.n_steps
        self.step = np.repeat(np.arange(self.n_steps), np.diff(work.schedule.offsets))
        """Step of each row (R,)."""
        self.decoding = work.schedule.phase[self.step] == DECODE
        """True for rows of decode steps (R,)."""
        self.sequence = trace.sequence[self._rows]
        """Sequence of each row (R,)."""
        self.token = trace.token[self._rows]
        """Token id of each row (R,), which goes into its step and so is known at point 0; -1 where none is recorded."""

    def moment(self, step: np.ndarray, point: int | np.ndarray) -> np.ndarray:
        """Number of the moment at ``point`` of each step, as ``sim.plan`` counts them."""
        return step * (self.n_layers + 1) + point

    def previous_route(self) -> np.ndarray:
        """Known at point 0: the route of the token before in the same sequence (R, L, K); -1 where there is none.

        In a prefill only the first token's is known to be absent: all of a prompt's tokens run together, so no token
        of it has a predecessor whose route is known, and all are -1.
        """
        rows = self._rows
        before = np.maximum(rows - 1, 0)
        known = self.decoding & (rows > 0) & (self._trace.sequence[before] == self.sequence)
        return np.where(known[:, None, None], self._trace.experts[before], np.int16(-1))

    def route(self, point: int) -> np.ndarray:
        """Known at ``point``: routes of the layers below it (R, point, K); -1 for none."""
        return self._trace.experts[self._rows, :point]

    def foreseen(self, point: int) -> np.ndarray:
        """Told at ``point`` to a policy with foresight: routes of that many more layers (R, up to L, K), as ``route``.

        Raises PermissionError for any other policy.
        """
        if not self._foresight:
            raise PermissionError("only a policy that declares foresight is told a route before it is known")
        return self.route(point + self._foresight)

    def embedding(self, point: int) -> np.ndarray:
        """Known at ``point``: the embedding layer's output (0) or layer ``point - 1``'s router input.

        Decode rows alone (Rd, D) int8.
        """
        embeddings = self._need("embeddings")
        decode_index = np.cumsum(self._trace.phase == DECODE) - 1
        return embeddings[decode_index[self._rows[self.decoding]], point]

    def prompts(self) -> dict[int, np.ndarray]:
        """Embeddings (n, D) int8 of the prompt of each sequence in the view that has one, by sequence.

        They are of the level ``prompt_level``: known at that point of the sequence's prefill, and ever after.
        """
        self._need("prefill_embeddings")
        running = set(self.sequence.tolist())
        return {sequence: prompt for sequence, prompt in prompts(self._trace).items() if sequence in running}

    @property
    def prompt_level(self) -> int:
        """The level of ``prompts``: 0 the embedding layer's output, ``1 + l`` the input of routed layer ``l``."""
        self._need("prefill_embeddings")
        return int(self._trace.meta["embedding"]["prefill_layer"])

    def lookahead(self, point: int) -> np.ndarray:
        """Known at ``point`` >= 1: what the next layer's router says of layer ``point - 1``'s input (R, K), or -1."""
        return self._need("lookahead")[self._rows, point - 1]

    def probs(self, point: int) -> np.ndarray:
        """Known at ``point``: router probabilities x 255 of layers below it (R, point, E) uint8, 0 where not stored."""
        self._need("probs")
        return every_prob(self._trace, self._rows, point)

    def gates(self, point: int) -> np.ndarray | None:
        """Known at ``point``: the weights of the experts of `route` (R, point, K) float32; None where none are kept.

        Where a trace lacks gates they are its router's probabilities, in steps of 1 / 255.
        """
        weights = weights_of(self._trace)
        return None if weights is None else weights[self._rows, :point]

    def predicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Known at point 0: what a path predictor says of each row, the most likely expert first.

        Experts (R, L, M) int16, -1 where it says nothing, and their probabilities x 255 (R, L, M) uint8. It has read
        the prompt and the sequence's tokens up to the row's own, no route.
        """
        experts, probs = (self._need(name)[self._rows] for name in PREDICTED)
        return experts, probs

    @property
    def predictor(self) -> dict[str, Any]:
        """What the trace says of the predictor of ``predicted``; empty where it says nothing."""
        return dict(self._trace.meta.get("predictor", {}))

    def past_sum(self, table: np.ndarray) -> np.ndarray:
        """Known at point 0: ``table`` (L, E, N) summed over all that the sequence's earlier tokens took.

        Decode rows alone (Rd, N). The table holds integers, so that the order of summing does not matter.
        """
        trace, rows = self._trace, self._rows[self.decoding]
        if not len(rows):
            return np.zeros((0, table.shape[2]), table.dtype)
        start = trace.offsets[trace.sequence[rows]]
        first = start.min()
        routes = trace.experts[first : rows.max()]
        padded = np.concatenate([table, np.zeros_like(table[:, :1])], axis=1)  # an id of -1 adds nothing
        until = np.zeros((len(routes) + 1, table.shape[2]), table.dtype)
        for layer in range(self.n_layers):
            for slot in range(routes.shape[2]):
                until[1:] += padded[layer, routes[:, layer, slot]]
        np.cumsum(until, axis=0, out=until)
        return until[rows - first] - until[start - first]

    def domain(self) -> np.ndarray:
        """The label that each sequence of the trace carries (S,): a policy that reads it is told the domain."""
        return self._trace.domain

    def prefill_steps(self) -> np.ndarray:
        """Steps that are prefills."""
        return np.flatnonzero(self._work.schedule.phase == PREFILL)

    def future(self) -> Workload:
        """Everything that will be needed, for clairvoyant policies alone. Raises PermissionError for any other."""
        if not self._clairvoyant:
            raise PermissionError("only a policy that declares itself clairvoyant may see the future")
        return self._work

    def _need(self, name: str) -> np.ndarray:
        array = getattr(self._trace, name)
        if array is None:
            way = PREDICTING if name in PREDICTED else "capture one with it"
            raise InputError(f"{self._trace.source or 'trace'}: no array {name}, which the policy needs; {way}")
        return np.asarray(array)


def every_prob(trace: Trace, rows: np.ndarray, layers: int) -> np.ndarray:
    """Stored probabilities x 255 of ``rows`` in the first ``layers`` (n, layers, E) uint8, 0 where not stored."""
    probs, ids = np.asarray(trace.probs)[rows, :layers], trace.prob_experts
    if ids is None:
        return probs
    dense = np.zeros((*probs.shape[:2], trace.n_experts), np.uint8)
    np.put_along_axis(dense, ids[rows, :layers].astype(np.int64), probs, axis=2)
    return dense


def prompts(trace: Trace) -> dict[int, np.ndarray]:
    """Stored embeddings (n, D) int8 of each prompt of ``trace``, by sequence; one without a prompt is not there."""
    rows, embeddings = trace.prefill_rows, trace.prefill_embeddings
    if embeddings is None or not len(rows):
        return {}
    sequence = trace.sequence[rows]
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    return dict(zip(sequence[starts].tolist(), np.split(embeddings, starts[1:]), strict=True))
