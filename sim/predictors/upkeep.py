"""What domain tables cost a run: matching prompts, loading tables and searching them, and the memory that they take."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sim.plan import Prediction
from sim.policies.base import Setting
from sim.predictors.neighbours import Neighbours
from sim.predictors.prototypes import ITERATIONS
from sim.view import View


class Upkeep:
    """Time at each moment and memory on the GPU, at the real model's hidden size, by the setting's software profile.

    ``chosen`` (sequences, D) bool are the tables that each sequence consults, ``points`` where searches are made,
    ``room`` how many tables the GPU has room for.
    """

    def __init__(
        self, setting: Setting, view: View, predictor: Neighbours, chosen: np.ndarray, points: Sequence[int], room: int
    ) -> None:
        self.setting, self.view, self.chosen, self.keys, self.room = setting, view, chosen, predictor.keys, room
        # The embedding layer's output is known at once and never changes: one search serves all layers.
        self.points = np.array(points[:1] if self.keys == "token" else points)
        self.entries = np.array([len(table) for table in predictor.tables], np.int64)
        self.clusters = predictor.matching.clusters
        self.prototypes = sum(len(p.centres) for p in predictor.matching.prototypes)

    @property
    def gpu_bytes(self) -> int:
        """All prototypes, and the largest of the tables that there is room for."""
        prototypes = self.setting.software.table_bytes(self.prototypes * self.setting.model.hidden)
        return prototypes + int(np.sort(self._table_bytes())[::-1][: self.room].sum())

    def _table_bytes(self) -> np.ndarray:
        """What each table takes: keys of the levels that are searched, and paths in 16 bits an expert."""
        model, software = self.setting.model, self.setting.software
        levels = len(self.points) if self.keys == "layer" else 1
        paths = 2 * model.routed_layers * model.top_k if software.where == "gpu" else 0
        return self.entries * (software.table_bytes(levels * model.hidden) + paths)

    def prediction(self, before_demands: bool = False) -> Prediction:
        """Matching in prefills, loading of tables, searches in decode steps: each on the critical path."""
        view, loading = self.view, self._loading()
        prefills = view.prefill_steps()
        times = [(view.moment(prefills, view.prompt_level), self._matching(prefills) + loading[prefills])]
        steps, rows = np.unique(view.step[view.decoding], return_counts=True)
        if len(steps):
            search = self._searches(steps, rows)
            for point in self.points:
                times.append((view.moment(steps, point), search + (loading[steps] if point == 0 else 0)))
        moment, ns = (np.concatenate(part) for part in zip(*times, strict=True))
        order = np.argsort(moment)
        return Prediction(moment[order], ns[order], before_demands=before_demands)

    def _searches(self, steps: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """One search for the ``rows`` of each decode step among all tables that they consult."""
        view = self.view
        consulted = self.chosen[view.sequence[view.decoding]]
        union = np.logical_or.reduceat(consulted, np.searchsorted(view.step[view.decoding], steps))
        pairs, kind = np.unique(np.stack([union @ self.entries, rows]), axis=1, return_inverse=True)
        hidden = self.setting.model.hidden
        ns = [self.setting.search_ns(entries, hidden, queries) for entries, queries in pairs.T.tolist()]
        return np.array(ns, np.int64)[kind.ravel()]

    def _matching(self, prefills: np.ndarray) -> np.ndarray:
        """Clustering each prompt and comparing its centres with all prototypes."""
        setting, hidden, ns = self.setting, self.setting.model.hidden, []
        for rows in np.bincount(self.view.step, minlength=self.view.n_steps)[prefills].tolist():
            centres = min(self.clusters, rows)
            clustering = setting.software.cluster_ns(setting.hardware, rows, hidden, centres, ITERATIONS)
            ns.append(clustering + setting.search_ns(self.prototypes, hidden, centres))
        return np.array(ns, np.int64)

    def _loading(self) -> np.ndarray:
        """Loading what a step consults and is not there (S,): the tables consulted longest ago make room."""
        view, setting = self.view, self.setting
        size = self._table_bytes().tolist()
        loaded: OrderedDict[int, None] = OrderedDict()
        ns = np.zeros(view.n_steps, np.int64)
        starts = np.searchsorted(view.step, np.arange(view.n_steps + 1)).tolist()
        for step, (first, last) in enumerate(itertools.pairwise(starts)):
            wanted = np.flatnonzero(self.chosen[view.sequence[first:last]].any(axis=0)).tolist()
            absent = sum(size[table] for table in wanted if table not in loaded)
            ns[step] = setting.software.load_ns(setting.hardware, absent)
            for table in wanted:
                loaded[table] = None
                loaded.move_to_end(table)
            while len(loaded) > self.room:
                loaded.popitem(last=False)
        return ns
