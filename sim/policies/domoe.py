"""DoMoE: prefetch what the most similar tokens of the prompt's own domains took, predicted at few layers.

"DoMoE: Domain-Aware Semantic Expert Prediction for Efficient MoE Inference Under Expert Offloading". Offline, each
domain of the profile split gets a routing table and prototypes. At each prefill the prompt is matched with domains. In
decode the matched tables are searched at the prediction layers, for the layers up to the next one. The parts are in
``sim.predictors``: table, prototypes, matching, neighbours, adaptive. docs/domoe.md lists what the paper leaves open
and what was decided here. The authors built theirs on MoE-Infinity's; prefetch order and link discipline are this
project's own (nearest layer first, demands overtake).
"""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from sim.plan import Plan, Requests, Values
from sim.policies.base import Policy
from sim.policies.search_order import SearchParameters
from sim.predictors.activations import ActivationMatrices
from sim.predictors.adaptive import SAMPLE, Estimate, estimate, held_out, sampled, shortest
from sim.predictors.base import Predictor, top
from sim.predictors.decode_requests import best_first, each_step
from sim.predictors.domain import Domain
from sim.predictors.growth import Stage, Stages, grown
from sim.predictors.matching import Matching, Reading
from sim.predictors.neighbours import Keys, Neighbours
from sim.predictors.table import Table
from sim.predictors.table import tables as tables_of
from sim.predictors.upkeep import Upkeep
from sim.predictors.vote_values import SCALE, vote_shares, vote_values
from sim.view import View

BEST: Mapping[str, Any] = {"layers": "once", "eviction": "vote", "sure": 0.5, "tables": 1, "top_k": 24}
"""The parameters that ``mode=best`` stands for; each may be given another value."""


class DomoeParameters(SearchParameters):
    """Parameters of DoMoE."""

    entries: int = Field(default=2000, ge=1)
    """most entries of a domain's table."""
    prototypes: int = Field(default=16, ge=1)
    """most prototypes of a domain."""
    clusters: int = Field(default=8, ge=1)
    """most centres of a prompt."""
    top_k: int = Field(default=8, ge=1)
    """nearest entries that vote."""
    tables: int = Field(default=2, ge=1)
    """domain tables consulted at most."""
    margin: float = Field(default=0.05, ge=0)
    """consult a further table only if its score is less than this behind the best; 2 always does."""
    reading: Reading = "A"
    """of the lost matching formula: A the mean over the prompt's centres, B the largest cosine of all."""
    keys: Keys = "layer"
    """layer, one embedding a layer an entry; entry, one at the prompts' level; token, the embedding layer's."""
    layers: str = "adaptive"
    """where to predict: adaptive (least expected time), sampled (as most sampled tokens would), all, every:N, once."""
    chances: Literal["offset", "layer"] = "offset"
    """of a misprediction, on which that choice rests: offset, averaged over layers as in the paper; layer."""
    samples: int = Field(default=SAMPLE, ge=1)
    """tokens on which mispredictions are estimated."""
    mode: Literal["full", "table", "trajectory", "best"] = "full"
    """full; table, a prediction at every layer; trajectory, the same with MoE-Infinity's predictor (the paper's
    ablation); best, the fastest known of what the paper leaves open (layers=once,eviction=vote,sure=0.5,tables=1,
    top_k=24)."""
    fetch: int = Field(default=0, ge=0)
    """experts asked for, a layer; 0 for as many as a token takes."""
    sure: float = Field(default=0, ge=0, le=1)
    """the share of the votes that an expert needs to be asked for; 0 for any."""
    reach: int = Field(default=0, ge=0)
    """layers that a prediction covers at least; 0 for those up to the next prediction."""
    eviction: Literal["lru", "lfu", "perfect-lfu", "score", "vote"] = "score"
    """lru, lfu, perfect-lfu; score: by how often the entries of the matched tables took an expert; vote: by the vote
    for the running token too, until the expert's layer has passed."""
    recency: float = Field(default=0.1, ge=0, le=1)
    """what having been taken by the running token adds to an expert's share of use, with eviction=vote."""
    grow: bool = False
    """let tables grow with what is served, as each prompt comes."""
    room: int = Field(default=0, ge=0)
    """domain tables that GPU memory has room for; 0 for as many as one sequence consults."""

    @field_validator("layers")
    @classmethod
    def _known(cls, layers: str) -> str:
        if not re.fullmatch("adaptive|sampled|all|once|every:0*[1-9][0-9]{0,3}", layers):
            raise ValueError("adaptive, sampled, all, once or every:N")
        return layers

    @model_validator(mode="before")
    @classmethod
    def _best(cls, given: Any) -> Any:
        """What ``mode=best`` stands for, unless a person says otherwise."""
        return {**BEST, **given} if isinstance(given, dict) and given.get("mode") == "best" else given

    @model_validator(mode="after")
    def _ablated(self) -> Self:
        if self.mode in ("table", "trajectory") and self.layers not in ("adaptive", "all"):
            raise ValueError(f"mode full where layers are chosen: mode {self.mode} predicts at all of them")
        if self.mode == "trajectory" and (self.eviction == "vote" or self.grow or self.sure):
            raise ValueError("mode full with eviction vote, grow and sure: mode trajectory has no tables")
        return self


class Domoe(Policy):
    """Predict from domain tables, prefetch up to the next prediction."""

    name = "domoe"
    summary = "DoMoE: search the tables of the prompt's domains, prefetch what the nearest tokens took"
    takes = DomoeParameters
    needs = frozenset({"embeddings", "prefill_embeddings"})
    learns = True
    variants = ("mode=best", "keys=entry", "mode=table", "mode=trajectory", "eviction=lru", "eviction=perfect-lfu")
    table_sizes = ("entries", "keys", "room")
    keeps_plan = True
    ignores = frozenset({"budget"})
    parameters: DomoeParameters

    def plan(self, view: View) -> Plan:
        """Match prompts, predict at the prediction layers, and charge both."""
        if self.parameters.mode == "trajectory":
            return self._trajectory(view)
        given = self.parameters
        learned = self.predictor(view.prompt_level, view.n_experts)
        domains = self.domains(view.prompt_level, view.n_experts)
        predictor = Stages(view, grown(view, domains, learned) if given.grow else [Stage(0, learned)])
        points = self.prediction_layers(view.prompt_level, view.n_experts, view.n_layers)
        most = (given.entries, given.prototypes) if given.grow else None
        upkeep = Upkeep(self.setting, view, predictor, points, given.room or given.tables, most)
        return Plan(
            eviction="score" if given.eviction == "vote" else given.eviction,
            values=self._values(view, predictor),
            requests=self._requests(view, predictor, points),
            prediction=upkeep.prediction(given.before_demands),
            gpu_bytes=upkeep.gpu_bytes,
            stream_prefill=True,
            note=self._note(points, view.n_layers),
        )

    def _trajectory(self, view: View) -> Plan:
        """The ablation's first stage: all as it is, but activation matrices instead of tables, and no matching."""
        predictor = ActivationMatrices(self.setting.profile, seed=self.setting.seed)
        entries, width = predictor.collection.shape
        points = range(view.n_layers)
        taken = predictor.collection.sum(axis=0).astype(np.int64)
        return Plan(
            eviction=self.parameters.eviction,
            values=Values.constant(taken) if self.parameters.eviction == "score" else None,
            requests=self._requests(view, predictor, tuple(points)),
            prediction=each_step(
                view,
                points,
                lambda rows, _: self.setting.search_ns(entries, width, rows),
                before_demands=self.parameters.before_demands,
            ),
            gpu_bytes=self.setting.software.table_bytes(entries * width),
            stream_prefill=True,
            note=f"{entries:,} activation matrices of the profile's requests; predictions at routed layers: all",
        )

    # -- what is learned ---------------------------------------------------------------------------------------------

    @cached_property
    def tables(self) -> list[Table]:
        """A routing table a domain."""
        return tables_of(self.setting.profile, self.parameters.entries)

    @cached_property
    def _made(self) -> dict[tuple[str, int, int], Any]:
        return {}

    def _once(self, what: str, level: int, n_experts: int, make: Callable[[int, int], Any]) -> Any:
        """What was made of that kind: a policy that decides moment by moment is asked for a plan at each."""
        key = (what, level, n_experts)
        if key not in self._made:
            self._made[key] = make(level, n_experts)
        return self._made[key]

    def predictor(self, level: int, n_experts: int) -> Neighbours:
        """The predictor over the tables of the whole profile split."""
        return self._once("predictor", level, n_experts, lambda *to: self._over(self.domains(*to), *to))

    def domains(self, level: int, n_experts: int) -> list[Domain]:
        """Tables and prototypes of the whole profile split."""
        return self._once("domains", level, n_experts, lambda level, _: self._built(self.tables, level))

    def _built(self, among: list[Table], level: int) -> list[Domain]:
        p = self.parameters
        return [Domain.build(table, level, p.entries, p.prototypes, self.setting.seed) for table in among]

    def _over(self, domains: list[Domain], level: int, n_experts: int) -> Neighbours:
        p, seed = self.parameters, self.setting.seed
        matching = Matching([domain.prototypes for domain in domains], p.clusters, p.reading, p.tables, p.margin, seed)
        tables = [domain.table for domain in domains]
        return Neighbours(tables, matching, votes=p.top_k, keys=p.keys, level=level, n_experts=n_experts)

    def estimate(self, level: int, n_experts: int) -> Estimate:
        """How often predictions go wrong, on sequences of the profile that are kept out of the tables."""
        rest, out = held_out(self.setting.profile, self.setting.seed)
        predictor = self._over(self._built(tables_of(rest, self.parameters.entries), level), level, n_experts)
        return estimate(predictor, out, self.fetch, self.setting.seed, self.parameters.samples)

    def miss(self, level: int, n_experts: int) -> np.ndarray:
        """The objective's chances, by offset (L,) or by layer (L, L)."""
        found: Estimate = self._once("estimate", level, n_experts, self.estimate)
        return found.by_layer() if self.parameters.chances == "layer" else found.by_offset()

    def prediction_layers(self, level: int, n_experts: int, n_layers: int) -> tuple[int, ...]:
        """The layers at which predictions are invoked."""
        kind = "all" if self.parameters.mode in ("table", "trajectory") else self.parameters.layers
        if kind == "all":
            return tuple(range(n_layers))
        if kind == "once":
            return (0,)
        if kind.startswith("every:"):
            return tuple(range(0, n_layers, int(kind.removeprefix("every:"))))
        if kind == "sampled":
            found: Estimate = self._once("estimate", level, n_experts, self.estimate)
            return sampled(found, self.predict_ns, self.load_ns)
        return shortest(self.miss(level, n_experts), self.predict_ns, self.load_ns)

    @property
    def fetch(self) -> int:
        """Experts asked for, a layer."""
        return self.parameters.fetch or self.setting.model.top_k

    @property
    def predict_ns(self) -> int:
        """The objective's c_pred: one search of the largest tables that may be consulted."""
        sizes = sorted((len(table) for table in self.tables), reverse=True)
        return self.setting.search_ns(sum(sizes[: self.parameters.tables]), self.setting.model.hidden)

    @property
    def load_ns(self) -> int:
        """The objective's c_load: copying all experts that a token takes in a layer."""
        model = self.setting.model
        return model.top_k * self.setting.hardware.copy_ns(max(model.expert_bytes))

    # -- what is asked for -------------------------------------------------------------------------------------------

    def _requests(self, view: View, predictor: Predictor, points: tuple[int, ...]) -> Requests:
        """The best ``fetch`` experts of each layer that a prediction covers, those of votes enough."""
        guesses, sure = [], self.parameters.sure
        for point, following in zip(points, (*points[1:], view.n_layers), strict=True):
            end = min(max(following, point + self.parameters.reach), view.n_layers)
            scores = predictor.scores(view, point, range(point, end))
            if sure:
                scores = np.where(vote_shares(scores, self.setting.model.top_k) >= sure * SCALE, scores, 0)
            guesses.append((point, point, top(scores, self.fetch)))
        return best_first(view, guesses)

    def _values(self, view: View, predictor: Stages) -> Values | None:
        """By popularity in the tables consulted, or by the vote of a step's beginning and that."""
        if self.parameters.eviction == "score":
            return _popularity(view, predictor)
        if self.parameters.eviction != "vote":
            return None
        votes = vote_shares(predictor.scores(view, 0, range(view.n_layers)), self.setting.model.top_k)
        counts, of_row = predictor.popularity(view)
        shares = vote_shares(counts.reshape(len(counts), view.n_layers, view.n_experts), self.setting.model.top_k)
        return vote_values(view, votes, shares[of_row], self.parameters.recency)

    def _note(self, points: tuple[int, ...], n_layers: int) -> str:
        held = ", ".join(f"{t.domain} {len(t):,} of {sum(t.seen.values()):,} tokens" for t in self.tables)
        where = "all" if len(points) == n_layers else ", ".join(map(str, points))
        return f"routing tables: {held}; predictions at routed layers: {where}"


def _popularity(view: View, predictor: Stages) -> Values:
    """How often the entries of the tables consulted in a step took each expert; in force from its beginning."""
    steps, first = np.unique(view.step[view.decoding], return_index=True)
    union = np.logical_or.reduceat(predictor.chosen[view.sequence[view.decoding]], first)
    distinct, index = np.unique(np.column_stack([predictor.at(steps), union]), axis=0, return_inverse=True)
    index = index.ravel()
    changed = np.diff(index, prepend=-1) != 0
    taken = predictor.taken(view.n_experts)[distinct[:, 0]]
    table = (distinct[:, 1:, None] * taken).sum(axis=1)
    return Values(view.moment(steps[changed], 0), index[changed], table)
