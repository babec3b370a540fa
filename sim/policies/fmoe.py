"""FMoE as DoMoE's authors re-implemented it: one table over all domains, searched at every layer before it goes on.

"DoMoE: Domain-Aware Semantic Expert Prediction for Efficient MoE Inference Under Expert Offloading", section 4: its
semantic baseline is fMoE (arXiv 2502.05370). The authors wrote it anew on MoE-Infinity's code, because they knew of no
published one. They say only this of it: profiled data of all domains are aggregated into a single repository "under the
same table size", experts are predicted by semantic similarity and retrieval of expert paths, and predictions are
frequent and costly. ``finemoe`` is the system of the original paper.

Decided here:

* Entries are chosen, keyed, searched and let vote as DoMoE's are (``domoe`` with ``mode=table``), so that the domain is
  all that differs: ``top_k`` nearest entries vote; 1 takes the path of the most similar one, as fMoE itself does.
* A search for the next layer at every layer, on the critical path: fMoE's own runs beside the step.
* The same table size may mean as many entries as one table of DoMoE's has (``entries=2000``), as it searches (twice
  that), or as it stores (domains times that). A comparison shows all three.
* Eviction is the one of ``domoe``, from this table: who is taken least on the paths of its entries goes first. The link
  is the same. The table takes GPU memory where the software profile searches there: an embedding of the real model's
  width a level, and a path.
"""

from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from sim.plan import Plan, Values
from sim.policies.base import Policy
from sim.policies.search_order import SearchParameters
from sim.predictors.base import top
from sim.predictors.decode_requests import best_first, each_step
from sim.predictors.global_table import GlobalTable
from sim.predictors.neighbours import Keys
from sim.view import View


class FMoEParameters(SearchParameters):
    """Parameters of fmoe."""

    entries: int = Field(default=2000, ge=1)
    """most entries of the table."""
    top_k: int = Field(default=8, ge=1)
    """nearest entries that vote."""
    keys: Keys = "layer"
    """layer, one embedding a layer an entry; entry, one at the prompts' level; token, the embedding layer's."""
    fetch: int = Field(default=0, ge=0)
    """experts asked for, a layer; 0 for as many as a token takes."""
    eviction: Literal["lru", "lfu", "perfect-lfu", "score"] = "score"
    """lru, lfu, perfect-lfu, or score: by how often the entries of the table took an expert."""


class FMoE(Policy):
    """Predict each layer from one table of all domains, on the critical path; keep what its entries take most."""

    name = "fmoe"
    summary = "DoMoE's semantic baseline: one table of all domains, searched at every layer on the critical path"
    takes = FMoEParameters
    variants = ("entries=4000", "entries=10000", "eviction=perfect-lfu")
    table_sizes = ("entries", "keys")
    parameters: FMoEParameters
    needs = frozenset({"embeddings"})
    learns = True
    keeps_plan = True
    ignores = frozenset({"budget", "seed"})

    def plan(self, view: View) -> Plan:
        """Search at every layer; ask for the best experts of the next one."""
        given, software, model = self.parameters, self.setting.software, self.setting.model
        table = self._predictor.table
        entries = len(table)
        # The embedding layer's output never changes in a step: one search serves all layers.
        points = range(1 if given.keys == "token" else view.n_layers)
        levels = len(points) if given.keys == "layer" else 1
        paths = 2 * entries * view.n_layers * model.top_k if software.where == "gpu" else 0
        return Plan(
            eviction=given.eviction,
            values=Values.constant(table.taken(view.n_experts)) if given.eviction == "score" else None,
            requests=best_first(view, ((layer, layer, self._best(view, layer)) for layer in range(view.n_layers))),
            prediction=each_step(
                view,
                points,
                lambda rows, _: self.setting.search_ns(entries, model.hidden, rows),
                before_demands=given.before_demands,
            ),
            stream_prefill=True,
            gpu_bytes=software.table_bytes(entries * levels * model.hidden) + paths,
            note=f"one table of all domains: {entries:,} of {sum(table.seen.values()):,} tokens",
        )

    @cached_property
    def _predictor(self) -> GlobalTable:
        given = self.parameters
        return GlobalTable(self.setting.profile, given.entries, votes=given.top_k, keys=given.keys)

    def _best(self, view: View, layer: int) -> np.ndarray:
        """The best experts of ``layer`` (Rd, 1, n), as soon as the one before it has its route."""
        return top(self._predictor.scores(view, layer, [layer]), self.parameters.fetch or self.setting.model.top_k)
