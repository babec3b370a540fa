"""DoMoE: prefetch what the most similar tokens of the prompt's own domains took, predicted at few layers.

"DoMoE: Domain-Aware Semantic Expert Prediction for Efficient MoE Inference Under Expert Offloading". Offline, a routing
table and prototypes for each domain of the profile split; at each prefill the prompt is matched with domains; in decode
the matched tables are searched at the prediction layers, for the layers up to the next one. The parts are in
``sim.predictors``: table, prototypes, matching, neighbours, adaptive. What the paper leaves open, and what was decided
here, is listed in docs/domoe.md. Its implementation is built on MoE-Infinity's; prefetch order and link discipline are
the project's own (nearest layer first, demands overtake).
"""

import re
from collections import OrderedDict
from functools import cached_property
from typing import Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from sim.hardware import Hardware
from sim.plan import Plan, Prediction, Requests, Values
from sim.policies import base
from sim.policies.base import Policy
from sim.predictors.adaptive import held_out, miss_by_offset, objective, sampled, shortest
from sim.predictors.base import top
from sim.predictors.matching import Matching, Reading
from sim.predictors.neighbours import Keys, Neighbours
from sim.predictors.prototypes import ITERATIONS, Prototypes
from sim.predictors.table import Table, tables
from sim.view import View


class DomoeParameters(base.Parameters):
    """Parameters of DoMoE.

    Attributes:
        entries: most entries of a domain's table.
        prototypes: most prototypes of a domain.
        clusters: most centres of a prompt.
        top_k: nearest entries that vote.
        tables: domain tables consulted at most.
        margin: consult a further table only if its score is less than this behind the best; 2 always does.
        reading: of the lost matching formula: A the mean over the prompt's centres, B the largest cosine of all.
        keys: layer, one embedding a layer an entry; entry, one at the prompts' level; token, the embedding layer's.
        layers: where to predict: adaptive (least expected time), sampled (the best of random sets), all, every:N.
        mode: full; table (the paper's ablation: a prediction at every layer).
        fetch: experts asked for, a layer; 0 for as many as a token takes.
        reach: layers that a prediction covers at least; 0 for those up to the next prediction.
        eviction: score, by how often the entries of the matched tables took an expert; lru; or lfu.
    """

    entries: int = Field(default=2000, ge=1)
    prototypes: int = Field(default=16, ge=1)
    clusters: int = Field(default=8, ge=1)
    top_k: int = Field(default=8, ge=1)
    tables: int = Field(default=2, ge=1)
    margin: float = Field(default=0.05, ge=0)
    reading: Reading = "A"
    keys: Keys = "layer"
    layers: str = "adaptive"
    mode: Literal["full", "table"] = "full"
    fetch: int = Field(default=0, ge=0)
    reach: int = Field(default=0, ge=0)
    eviction: Literal["lru", "lfu", "score"] = "score"

    @field_validator("layers")
    @classmethod
    def _known(cls, layers: str) -> str:
        if not re.fullmatch("adaptive|sampled|all|every:0*[1-9][0-9]{0,3}", layers):
            raise ValueError("adaptive, sampled, all or every:N")
        return layers

    @model_validator(mode="after")
    def _ablated(self) -> Self:
        if self.mode == "table" and self.layers not in ("adaptive", "all"):
            raise ValueError("mode full where layers are chosen: mode table predicts at all of them")
        return self


class Domoe(Policy):
    """Predict from domain tables, prefetch up to the next prediction, evict what these domains use least."""

    name = "domoe"
    summary = "DoMoE: search the tables of the prompt's domains, prefetch what the nearest tokens took"
    takes = DomoeParameters
    needs = frozenset({"embeddings", "prefill_embeddings"})
    learns = True
    variants = ("keys=entry", "mode=table", "eviction=lru")
    dear = True
    ignores = frozenset({"budget"})
    parameters: DomoeParameters

    def plan(self, view: View) -> Plan:
        """Match prompts, predict at the prediction layers, and charge both."""
        predictor = self.predictor(view.prompt_level, view.n_experts)
        chosen = predictor.consulted(view.prompts(), int(view.sequence.max(initial=-1)) + 1)
        points = self.prediction_layers(view.prompt_level, view.n_experts, view.n_layers)
        costs = _Costs(self, view, predictor, chosen, points)
        return Plan(
            eviction=self.parameters.eviction,
            values=_popularity(view, predictor, chosen) if self.parameters.eviction == "score" else None,
            requests=self._requests(view, predictor, points),
            prediction=costs.prediction(),
            gpu_bytes=costs.gpu_bytes,
            stream_prefill=True,
            note=self._note(points),
        )

    # -- what is learned ---------------------------------------------------------------------------------------------

    @cached_property
    def tables(self) -> list[Table]:
        """A routing table a domain."""
        return tables(self.setting.profile, self.parameters.entries)

    def predictor(self, level: int, n_experts: int, among: list[Table] | None = None) -> Neighbours:
        """The predictor over ``among`` (default: the tables of the whole profile split)."""
        p, seed = self.parameters, self.setting.seed
        among = self.tables if among is None else among
        prototypes = [Prototypes.build(table.keys[:, level], p.prototypes, seed) for table in among]
        matching = Matching(prototypes, p.clusters, p.reading, p.tables, p.margin, seed)
        return Neighbours(among, matching, votes=p.top_k, keys=p.keys, level=level, n_experts=n_experts)

    def miss_by_offset(self, level: int, n_experts: int) -> np.ndarray:
        """Chance of a misprediction by offset (L,), on sequences of the profile kept out of the tables."""
        rest, out = held_out(self.setting.profile, self.setting.seed)
        predictor = self.predictor(level, n_experts, tables(rest, self.parameters.entries))
        return miss_by_offset(predictor, out, self.fetch, self.setting.seed)

    def prediction_layers(self, level: int, n_experts: int, n_layers: int) -> tuple[int, ...]:
        """The layers at which predictions are invoked."""
        kind = "all" if self.parameters.mode == "table" else self.parameters.layers
        if kind == "all":
            return tuple(range(n_layers))
        if kind.startswith("every:"):
            return tuple(range(0, n_layers, int(kind.removeprefix("every:"))))
        miss = self.miss_by_offset(level, n_experts)
        if kind == "sampled":
            return sampled(miss, self.predict_ns, self.load_ns, self.setting.seed)
        return shortest(miss, self.predict_ns, self.load_ns)

    def predicted_ns(self, layers: tuple[int, ...], level: int, n_experts: int) -> float:
        """What the paper's objective expects of a token with predictions at ``layers``."""
        return objective(layers, self.miss_by_offset(level, n_experts), self.predict_ns, self.load_ns)

    @property
    def fetch(self) -> int:
        """Experts asked for, a layer."""
        return self.parameters.fetch or self.setting.model.top_k

    @property
    def predict_ns(self) -> int:
        """The objective's c_pred: one search of the largest tables that may be consulted."""
        sizes = sorted((len(table) for table in self.tables), reverse=True)
        return self.search_ns(sum(sizes[: self.parameters.tables]), 1)

    @property
    def load_ns(self) -> int:
        """The objective's c_load: copying all experts that a token takes in a layer."""
        model = self.setting.model
        return model.top_k * self.hardware.copy_ns(max(model.expert_bytes))

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return self.setting.hardware

    def search_ns(self, entries: int, queries: int) -> int:
        """Time of one search at the real model's hidden size."""
        return self.setting.software.search_ns(self.hardware, entries, self.setting.model.hidden, queries)

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _requests(self, view: View, predictor: Neighbours, points: tuple[int, ...]) -> Requests:
        """The best ``fetch`` experts of each layer that a prediction covers: nearer layers first, then by rank."""
        step = view.step[view.decoding]
        columns: list[np.ndarray] = [np.zeros((4, 0), np.int64)]
        for point, following in zip(points, (*points[1:], view.n_layers), strict=True):
            end = min(max(following, point + self.parameters.reach), view.n_layers)
            best = top(predictor.scores(view, point, range(point, end)), self.fetch)
            row, column, rank = np.nonzero(best >= 0)
            layer = point + column
            expert = layer * view.n_experts + best[row, column, rank]
            columns.append(np.stack([view.moment(step[row], point), step[row] * view.n_layers + layer, rank, expert]))
        moment, call, rank, expert = np.concatenate(columns, axis=1)
        order = np.lexsort((expert, rank, call, moment))
        moment, call, expert = moment[order], call[order], expert[order]
        # Rows of a batch ask for the same expert: once, at its best rank, is enough.
        _, first = np.unique(np.stack([moment, call, expert]), axis=1, return_index=True)
        first.sort()
        return Requests.build(moment[first], call[first], expert[first])

    def _note(self, points: tuple[int, ...]) -> str:
        held = ", ".join(f"{t.domain} {len(t):,} of {sum(t.seen.values()):,} tokens" for t in self.tables)
        where = "all" if len(points) > 1 and points == tuple(range(len(points))) else ", ".join(map(str, points))
        return f"routing tables: {held}; predictions at routed layers: {where}"


class _Costs:
    """What matching and predicting cost a run: time at each moment, memory on the GPU."""

    def __init__(
        self, policy: Domoe, view: View, predictor: Neighbours, chosen: np.ndarray, points: tuple[int, ...]
    ) -> None:
        self.policy, self.view, self.predictor, self.chosen = policy, view, predictor, chosen
        # The embedding layer's output is known at once and never changes: one search serves all layers.
        self.points = points[:1] if policy.parameters.keys == "token" else points
        model, software = policy.setting.model, policy.setting.software
        levels = len(self.points) if policy.parameters.keys == "layer" else 1
        paths = 2 * model.routed_layers * model.top_k if software.where == "gpu" else 0
        self.table_bytes = [
            software.table_bytes(len(t) * levels * model.hidden) + len(t) * paths for t in predictor.tables
        ]
        self.prototypes = sum(len(p.centres) for p in predictor.matching.prototypes)
        together = max(np.bincount(view.step[view.decoding]).max(initial=0), 1)
        self.room = min(int(together) * policy.parameters.tables, len(predictor.tables))

    @property
    def gpu_bytes(self) -> int:
        """All prototypes, and room for the largest tables that the sequences of a batch may consult at once."""
        setting = self.policy.setting
        room = sum(sorted(self.table_bytes, reverse=True)[: self.room])
        return setting.software.table_bytes(self.prototypes * setting.model.hidden) + room

    def prediction(self) -> Prediction:
        """Searches in decode steps, matching in prefills: each on the critical path."""
        moments, times = self._searches()
        prompt_moments, prompt_times = self._prompts()
        moment, ns = np.concatenate([moments, prompt_moments]), np.concatenate([times, prompt_times])
        order = np.argsort(moment, kind="stable")[ns[np.argsort(moment, kind="stable")] > 0]
        return Prediction(moment[order], ns[order])

    def _searches(self) -> tuple[np.ndarray, np.ndarray]:
        """A search at every prediction layer, among all tables that a step's sequences consult."""
        view = self.view
        steps, rows = np.unique(view.step[view.decoding], return_counts=True)
        if not len(steps):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        consulted = self.chosen[view.sequence[view.decoding]]
        union = np.logical_or.reduceat(consulted, np.searchsorted(view.step[view.decoding], steps))
        entries = union @ np.array([len(t) for t in self.predictor.tables], np.int64)
        pairs, kind = np.unique(np.stack([entries, rows]), axis=1, return_inverse=True)
        ns = np.array([self.policy.search_ns(*pair) for pair in pairs.T.tolist()], np.int64)[kind.ravel()]
        points = np.array(self.points)
        return view.moment(steps[:, None], points).ravel(), np.repeat(ns, len(points))

    def _prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Clustering a prompt, comparing it with all prototypes, and loading the tables that are not there yet.

        Of tables that no running sequence consults, the one that was consulted longest ago makes room.
        """
        view, setting = self.view, self.policy.setting
        software, hardware, hidden = setting.software, setting.hardware, setting.model.hidden
        clusters = self.policy.parameters.clusters
        prefills = set(view.prefill_steps().tolist())
        loaded: OrderedDict[int, None] = OrderedDict()
        times: dict[int, int] = {}
        starts = np.searchsorted(view.step, np.arange(view.n_steps + 1)).tolist()
        for step in range(view.n_steps):
            mine = slice(starts[step], starts[step + 1])
            wanted = np.flatnonzero(self.chosen[view.sequence[mine]].any(axis=0)).tolist()
            missing = [table for table in wanted if table not in loaded]
            for table in wanted:
                loaded[table] = None
                loaded.move_to_end(table)
            while len(loaded) > self.room:
                loaded.popitem(last=False)
            if step in prefills:
                rows = starts[step + 1] - starts[step]
                times[step] = software.cluster_ns(hardware, rows, hidden, min(clusters, rows), ITERATIONS)
                times[step] += software.search_ns(hardware, self.prototypes, hidden, min(clusters, rows))
                times[step] += software.load_ns(hardware, sum(self.table_bytes[table] for table in missing))
        steps = np.array(list(times), np.int64)
        return view.moment(steps, view.prompt_level), np.array(list(times.values()), np.int64)


def _popularity(view: View, predictor: Neighbours, chosen: np.ndarray) -> Values:
    """How often the entries of the tables consulted in a step took each expert; in force from its beginning."""
    width = view.n_layers * view.n_experts
    counts = np.zeros((len(predictor.tables), width), np.int64)
    for row, table in enumerate(predictor.tables):
        flat = np.arange(view.n_layers)[:, None] * view.n_experts + table.paths
        counts[row] = np.bincount(flat[table.paths >= 0], minlength=width)
    step = view.step[view.decoding]
    steps, first = np.unique(step, return_index=True)
    if not len(steps):
        nothing = np.zeros(0, np.int64)
        return Values(nothing, nothing, np.zeros((0, width), np.int64))
    union = np.logical_or.reduceat(chosen[view.sequence[view.decoding]], first)
    distinct, index = np.unique(union, axis=0, return_inverse=True)
    index = index.ravel()
    changed = np.diff(index, prepend=-1) != 0
    return Values(view.moment(steps[changed], 0), index[changed], distinct.astype(np.int64) @ counts)
