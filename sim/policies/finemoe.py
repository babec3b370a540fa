"""FineMoE: prefetch what the most similar expert map says, the more of it the less similar it is.

H. Yu et al., arXiv 2502.05370, EuroSys 2026 (first version: fMoE), as the paper defines it. The first ``distance``
layers are predicted at a step's beginning by semantic search, every later one ``distance`` layers before its turn by
trajectory search (``sim.predictors.expert_maps``). Of a layer's probabilities p the smallest set is fetched whose sum
reaches clip(1 - similarity, 0, 1), but never fewer than the router takes; priority is p over the layers still to go.
The cache evicts the largest 1 / (p * frequency). Searches run beside the step; a miss stops all prefetches.

Where the published demo (commit 5c58468) and the paper differ, this is the paper: the demo predicts all later layers at
once, queues every expert of them, lets priority fall linearly, takes one expert fewer, and truncates p * frequency to
whole numbers, which makes most of them 0.

Decided here:

* Distances are those of the paper's section 6.7 (3 for Mixtral, 4 for Phi-3.5, 6 for Qwen1.5; section 6.1 says three
  for all), and 3 for any other model.
* Probabilities are shares of what the trace stores of a layer, in steps of 1 / 255. An expert stored as 0 is not
  fetched, although the router's number of experts might ask for it: which one it would be is not known.
* p of eviction is that of the search that last spoke of the layer; where sequences decode together, the largest of
  theirs. An expert that a prefetch brought counts as used once (``score-lfu``).
* The semantic search compares embeddings of the real model's width, the trajectory search all probabilities so far. The
  store takes GPU memory where the software profile searches there; the paper keeps it on the host.
* A prefill predicts nothing and streams.
"""

import numpy as np
from pydantic import Field

from sim.plan import Plan, Requests
from sim.policies.base import Policy
from sim.policies.search_order import SearchParameters
from sim.predictors.decode_requests import each_step
from sim.predictors.expert_maps import ExpertMaps
from sim.predictors.latest_values import latest_values
from sim.view import View

DISTANCES = {"mixtral-8x7b": 3, "phi-3.5-moe": 4, "qwen1.5-moe-a2.7b": 6}
OTHER_DISTANCE = 3
SCALE = 2**20
"""Priorities are whole numbers: probabilities x 255 times this, over the layers to go."""


class FineMoEParameters(SearchParameters):
    """Parameters of finemoe."""

    capacity: int = Field(default=1000, ge=1, le=1_000_000)
    """maps in the store."""
    distance: int = Field(default=0, ge=0, le=10_000)
    """layers from a trajectory search to the layer that it predicts; 0 for the paper's of the model."""
    beside: bool = True
    """search beside the step, as the paper has it, instead of on its critical path."""


class FineMoE(Policy):
    """Prefetch and evict by the most similar expert map, found by embedding, then by trajectory."""

    name = "finemoe"
    summary = "expert maps: semantic, then trajectory search beside the step; the less similar, the more it fetches"
    takes = FineMoEParameters
    table_sizes = ("capacity",)
    parameters: FineMoEParameters
    needs = frozenset({"probs", "embeddings"})
    learns = True
    keeps_plan = True
    ignores = frozenset({"budget", "seed"})

    def plan(self, view: View) -> Plan:
        """Search at the step's beginning and after each layer; ask for, and value, what is found."""
        setting = self.setting
        distance = self.parameters.distance or DISTANCES.get(setting.model.name, OTHER_DISTANCE)
        store = ExpertMaps(setting.profile, self.parameters.capacity, distance)
        entries, tokens = len(store.maps), sum(len(trace.decode_rows) for trace in setting.profile)
        points, found, score = _searched(store, view, distance)
        row, layer = np.nonzero(found >= 0)
        step, probs = view.step[view.decoding][row], store.maps[found[row, layer], layer]
        which, expert = np.nonzero(chosen(probs, score[row, layer], setting.model.top_k))
        call, ahead = step * view.n_layers + layer, layer + 1 - points[layer]
        moment = view.moment(step, points[layer])
        weight = probs[which, expert].astype(np.int64) * SCALE // ahead[which]

        def searching_ns(rows: int, point: int) -> int:
            width = point * view.n_experts or setting.model.hidden
            return setting.search_ns(entries, width, rows)

        return Plan(
            eviction="score-lfu",
            values=latest_values(view.n_layers, moment, layer, probs),
            requests=Requests.merged(moment[which], call[which], layer[which] * view.n_experts + expert, -weight),
            prediction=each_step(
                view, np.unique(points).tolist(), searching_ns, critical=not self.parameters.beside,
                before_demands=self.parameters.before_demands,
            ),
            stream_prefill=True,
            gpu_bytes=setting.software.table_bytes(entries * (setting.model.hidden + view.n_layers * view.n_experts)),
            note=f"expert maps: {entries:,} of {tokens:,} tokens",
        )


def _searched(store: ExpertMaps, view: View, distance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each layer the point at which it is predicted (L,), and for each row the map found and its similarity."""
    points = np.maximum(np.arange(view.n_layers) - distance + 1, 0)
    near, likeness = store.semantic(view)
    later, trust = store.trajectory(view, points[distance:].tolist())
    first = min(distance, view.n_layers)
    found = np.concatenate([np.repeat(near[:, None], first, axis=1), later], axis=1)
    return points, found, np.concatenate([np.repeat(likeness[:, None], first, axis=1), trust], axis=1)


def chosen(probs: np.ndarray, score: np.ndarray, least: int) -> np.ndarray:
    """Which experts of ``probs`` (N, E) uint8 to fetch at a similarity of ``score`` (N,): (N, E) bool.

    The fewest of the largest, at least ``least``, whose share of the sum reaches clip(1 - score, 0, 1); none of 0.
    """
    order = np.argsort(-probs.astype(np.int64), axis=1, kind="stable")
    largest = np.take_along_axis(probs, order, axis=1).astype(np.int64)
    sums = np.cumsum(largest, axis=1)
    short = sums < np.clip(1 - score, 0, 1)[:, None] * sums[:, -1:]
    taken = np.arange(probs.shape[1]) < np.maximum(short.sum(axis=1) + 1, least)[:, None]
    result = np.zeros(probs.shape, bool)
    np.put_along_axis(result, order, taken & (largest > 0), axis=1)
    return result
