"""ProMoE: a learned predictor a layer, which prefetches a stride ahead in pieces that a miss interrupts.

X. Song et al., arXiv 2410.22134. Each routed layer's input goes through a perceptron of two layers that says which
experts the layer ``stride`` layers on will take (``sim.predictors.stride_net``); those are copied in pieces,
and what is needed at once overtakes them between pieces. Slots are split over layers, each part with LRU. Experts that
are there run first, then those under way, then the others, which is the engine's own order.

Decided here:

* A stride of 1, predicting one layer, as the paper's evaluation has it. ``window`` makes one net predict more layers
  from the stride on. The first layers, which no stride reaches, are predicted from the embedding layer's output.
* As many experts of a layer are fetched as its router takes (``first`` for another number), best first, nearer layers
  before farther ones.
* What is charged are nets of the real size: the model's hidden size to ``width`` units (512 make the paper's two
  million weights a layer of Mixtral) to all experts of the window. They lie, and run, where the software profile says,
  beside the step (``beside=false`` puts them on its critical path).
* A prefill predicts nothing and streams; the paper prefetches by the same predictor there.
* Pieces are those of real runs (``sim.machine.pieces``); the paper's are an expert's three matrices (``--chunks 3``).
* ``eviction`` and ``scope`` put another rule, or one pool of all layers, in the place of LRU a layer. With ``score``
  the expert goes that the nets last gave the smallest chance, which the published code offers too (``nn``).
"""

from typing import Literal

from pydantic import Field

from sim.plan import Plan
from sim.policies.base import Policy
from sim.policies.search_order import SearchParameters
from sim.predictors.base import top
from sim.predictors.decode_requests import best_first, each_step
from sim.predictors.latest_values import latest_scores
from sim.predictors.stride_net import StrideNets
from sim.view import View


class ProMoEParameters(SearchParameters):
    """Parameters of promoe."""

    stride: int = Field(default=1, ge=1, le=1000)
    """layers from the layer whose input is read to the first that it predicts."""
    window: int = Field(default=1, ge=1, le=1000)
    """layers that one net predicts."""
    first: int = Field(default=0, ge=0)
    """experts of a layer to fetch; 0 for as many as the router takes."""
    width: int = Field(default=512, ge=1, le=1_000_000)
    """hidden units of the nets that are charged."""
    epochs: int = Field(default=10, ge=1, le=1000)
    """passes over the profile split in training."""
    beside: bool = True
    """predict beside the step instead of on its critical path."""
    eviction: Literal["lru", "lfu", "perfect-lfu", "score"] = "lru"
    """the paper's lru, lfu, perfect-lfu, or score: by what the nets last said of an expert."""
    scope: Literal["global", "layer"] = "layer"
    """split the slots evenly, a pool a layer, as in the paper, or share them over all layers."""


class ProMoE(Policy):
    """Prefetch what a learned net a layer predicts a stride ahead; LRU in each layer's own slots."""

    name = "promoe"
    summary = "a learned net a layer predicts a stride ahead, beside the step; LRU a layer"
    takes = ProMoEParameters
    variants = ("stride=3",)
    table_sizes = ("width",)
    parameters: ProMoEParameters
    needs = frozenset({"embeddings"})
    learns = True
    keeps_plan = True
    ignores = frozenset({"budget"})

    def plan(self, view: View) -> Plan:
        """Run every net on every decode row; ask for the best experts of its layers."""
        setting, given = self.setting, self.parameters
        last = given.stride + given.window - 2
        horizons = min(last + 1, view.n_layers)
        nets = StrideNets(setting.profile, horizons, epochs=given.epochs, seed=setting.seed)
        # The layers that the net of each point predicts: that of point 0 also those that no stride reaches.
        covered = {
            point: range(point + given.stride - 1 if point else 0, min(point + last + 1, view.n_layers))
            for point in range(max(1, view.n_layers - given.stride + 1))
        }
        scored = [(point, layers[0], nets.scores(view, point, layers)) for point, layers in covered.items()]
        guesses = [(point, first, top(scores, given.first or setting.model.top_k)) for point, first, scores in scored]
        parameters = given.width * (setting.model.hidden + given.window * view.n_experts)

        def network_ns(rows: int, point: int) -> int:
            return setting.software.network_ns(setting.hardware, parameters, rows)

        return Plan(
            eviction=given.eviction,
            values=latest_scores(view, scored) if given.eviction == "score" else None,
            per_layer=given.scope == "layer",
            requests=best_first(view, guesses),
            prediction=each_step(
                view, [*covered], network_ns, critical=not given.beside, before_demands=given.before_demands
            ),
            stream_prefill=True,
            gpu_bytes=setting.software.table_bytes(len(covered) * parameters),
            discipline="preemptive",
            note=f"nets: {len(covered)}, learned from {sum(len(t.decode_rows) for t in setting.profile):,} tokens",
        )
