"""A policy driven step by step: the trace of a sequence grows, and each moment shows what is known then.

A policy plans from a view of one step, whose trace holds the whole sequence so far. What a moment does not know yet
(routes, scores and embeddings of later layers) stands in the arrays as what nothing is: -1, 0. A policy that decides a
moment by what that moment knows, as all must (``sim.run.blindness``), decides the same then as it does with a whole
trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.foreign_code import errors_name
from sim.machine.pieces import pieces_of
from sim.plan import Decision, Plan
from sim.policies import Policy
from sim.workload import Schedule, Workload
from traces.capture.batches import prefill_level
from traces.embeddings import Basis
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

ONLINE = frozenset({"gates", "probs", "lookahead", "embeddings", "prefill_embeddings"})
"""Optional arrays that can be had while a model runs."""
EMBEDDED = frozenset({"embeddings", "prefill_embeddings"})
"""Those of them that take an embedding basis."""


def check_online(kind: type[Policy]) -> None:
    """Raise InputError for a policy that only a replay can run: for what it must be told, or where experts run."""
    if kind.clairvoyant or kind.foresight:
        raise InputError(f"policy {kind.name}: it is told what comes, which only a trace can tell; replay one")
    if kind.hosts:
        raise InputError(f"policy {kind.name}: it runs experts on the host, which only a replay does")
    if missing := sorted(kind.needs - ONLINE):
        raise InputError(f"policy {kind.name}: it needs the array {missing[0]}, which a running model does not give")


def check_basis(kind: type[Policy], basis: Basis | None, profile: Sequence[Trace]) -> None:
    """Raise InputError if a policy reads embeddings, and there is no basis, or one that a profile was not made with."""
    if not kind.needs & EMBEDDED:
        return
    if basis is None:
        raise InputError(
            f"policy {kind.name}: it needs embeddings, and the checkpoint has no embedding_basis.npz: capture a trace "
            f"of it"
        )
    for trace in profile:
        made = trace.meta.get("embedding", {}).get("basis_sha256")
        if made != basis.sha256:
            raise InputError(
                f"--profile {trace.source}: embedding basis {str(made)[:8]}; expected that of the checkpoint, "
                f"{basis.sha256[:8]}"
            )


@dataclass(frozen=True)
class StackShape:
    """Of one stack of a model: L routed layers, E experts a layer, K a token, bytes of an expert and its matrices."""

    name: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    expert_bytes: int
    matrices: int


class LiveTrace:
    """The rows of one sequence so far, in arrays that grow.

    Args:
        shape: of the model.
        needs: the optional arrays to keep.
        basis: the model's embedding basis, if embeddings are among them.

    What it cannot keep is refused beforehand (:func:`check_online`, :func:`check_basis`).
    """

    def __init__(self, shape: StackShape, needs: frozenset[str], basis: Basis | None) -> None:
        self.shape, self.needs = shape, needs
        self.basis = basis if needs & EMBEDDED else None
        self.rows = self.decode = 0
        self._room = 64
        self.level = prefill_level(len(shape.layers))
        self._arrays = self._new(self._room)

    def _new(self, room: int) -> dict[str, np.ndarray]:
        layers, top_k, experts = len(self.shape.layers), self.shape.top_k, self.shape.experts
        dims = self.basis.dims if self.basis else 0
        shapes: dict[str, tuple[tuple[int, ...], type, int]] = {
            "experts": ((layers, top_k), np.int16, -1),
            "gates": ((layers, top_k), np.float16, 0),
            "lookahead": ((layers, top_k), np.int16, -1),
            "probs": ((layers, experts), np.uint8, 0),
            "embeddings": ((layers + 1, dims), np.int8, 0),
            "prefill_embeddings": ((dims,), np.int8, 0),
        }
        kept = {"experts", *self.needs}
        return {
            name: np.full((room, *shape), empty, kind) for name, (shape, kind, empty) in shapes.items() if name in kept
        }

    def begin(self, rows: int, phase: int) -> None:
        """A step of so many rows begins; nothing of it is known."""
        while self.rows + rows > self._room:
            self._room *= 2
            larger = self._new(self._room)
            for name, array in self._arrays.items():
                larger[name][: len(array)] = array
            self._arrays = larger
        self.first, self.first_decode, self.phase = self.rows, self.decode, phase
        self.rows += rows
        self.decode += rows if phase == DECODE else 0

    def know(self, layer: int, **known: np.ndarray) -> None:
        """Routed layer ``layer`` is known: ``experts``, ``gates``, ``lookahead`` (n, K), ``probs`` (n, E)."""
        for name, rows in known.items():
            if name in self._arrays:
                self._arrays[name][self.first : self.rows, layer, : rows.shape[1]] = rows

    def wants_state(self, level: int) -> bool:
        """Whether states of this level of this step's rows are kept."""
        if self.basis is None:
            return False
        return "embeddings" in self.needs if self.phase == DECODE else level == self.level

    def know_state(self, level: int, states: np.ndarray) -> None:
        """States (n, H) of a level: 0 the embedding layer's output, 1 + l the router input of routed layer l."""
        assert self.basis is not None
        stored = self.basis.quantise(states, level)
        if self.phase == DECODE:
            self._arrays["embeddings"][self.first_decode : self.decode, level] = stored
        elif "prefill_embeddings" in self.needs:
            self._arrays["prefill_embeddings"][self.first : self.rows] = stored

    def trace(self) -> Trace:
        """The sequence so far. Its arrays are those that grow: not to be kept."""
        rows, shape = self.rows, self.shape
        prompt = rows - self.decode
        optional: dict[str, Any] = {
            name: self._arrays[name][:rows] for name in self.needs & {"gates", "probs", "lookahead"}
        }
        if "embeddings" in self.needs:
            optional["embeddings"] = self._arrays["embeddings"][: self.decode]
        if "prefill_embeddings" in self.needs:
            optional["prefill_embeddings"] = self._arrays["prefill_embeddings"][:prompt]
        if self.basis is not None:
            optional["embedding_scale"] = self.basis.scale
        meta: dict[str, Any] = {
            "schema": 1,
            "model": {"name": shape.name, "experts": shape.experts, "top_k": shape.top_k},
        }
        if self.basis is not None:
            meta["embedding"] = {
                "prefill_layer": self.level,
                "basis_sha256": self.basis.sha256,
                "dims": self.basis.dims,
            }
        return Trace(
            meta=meta,
            layers=np.array(shape.layers, np.int32),
            experts=self._arrays["experts"][:rows],
            token=np.full(rows, -1, np.int32),
            sequence=np.zeros(rows, np.int32),
            position=np.arange(rows, dtype=np.int32),
            phase=np.repeat(np.array([PREFILL, DECODE], np.uint8), [prompt, self.decode]),
            domain=np.array(["prompt"]),
            split=np.array(["eval"]),
            sequence_id=np.array(["prompt"]),
            **optional,
        )


def one_step(shape: StackShape, rows: Sequence[int], phase: int) -> Workload:
    """A workload of one step of these rows whose look-ups are not known: what a view of one step is made with."""
    layers = len(shape.layers)
    none = np.zeros(0, np.int64)
    return Workload(
        schedule=Schedule(np.array([phase], np.int64), np.array([0, len(rows)]), np.array(rows, np.int64)),
        n_layers=layers,
        n_experts=shape.experts,
        offsets=np.zeros(layers + 1, np.int64),
        expert=none,
        tokens=none,
        layer_ns=np.zeros(layers, np.int64),
        shared_ns=np.zeros(layers, np.int64),
        expert_ns=none,
        head_ns=np.zeros(1, np.int64),
        activations=np.zeros(1, np.int64),
        expert_bytes=(shape.expert_bytes,) * layers,
        copy_ns=(1,) * layers,
        latency_ns=0,
        chunks=pieces_of(shape.expert_bytes, shape.matrices),
    )


class Planner:
    """What a policy decides at each moment of a sequence that runs.

    ``plan`` is the policy's plan at the very beginning, from which eviction, pools, discipline and the like are taken
    for the whole run. The policy must be one that :func:`check_online` lets pass.
    """

    def __init__(self, policy: Policy, live: LiveTrace) -> None:
        self.policy, self.live = policy, live
        self.step = -1
        self.plan: Plan | None = None
        self._always_silent = False

    def begin(self, rows: int, phase: int) -> None:
        """A step begins."""
        self.live.begin(rows, phase)
        self.step += 1

    def decide(self, point: int) -> Decision | None:
        """What is decided at a point of the running step; None for nothing. Calls are numbered through all steps."""
        if self._always_silent:
            return None
        live, layers = self.live, len(self.live.shape.layers)
        work = one_step(live.shape, range(live.first, live.rows), live.phase)
        with errors_name(f"policy {self.policy.name}: plan"):
            plan = self.policy.plan(self.policy.view(live.trace(), work))
        plan.check(layers, live.shape.experts, 1)
        if self.plan is None:
            if plan.scorer is not None:
                raise InputError(f"policy {self.policy.name}: its plan has a scorer, which only a replay runs")
            self.plan = plan
            # A rule that neither asks nor learns at a first step, whose values and predictions are none, never does.
            self._always_silent = plan.requests is None and plan.values is None and not len(plan.prediction.moment)
        decided = plan.by_moment(live.shape.experts).get(point)
        if decided is None:
            return None
        requests = [(expert, call + self.step * layers, rank) for expert, call, rank in decided.requests]
        return decided._replace(requests=requests)
