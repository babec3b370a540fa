"""What domain tables cost a run: matching prompts, loading tables, searching and growing them, and their memory."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sim.plan import Prediction
from sim.policies.base import Setting
from sim.predictors.growth import Stage, Stages
from sim.predictors.prototypes import ITERATIONS
from sim.view import View


class Upkeep:
    """Time at each moment and memory on the GPU, at the real model's hidden size, by the setting's software profile.

    Args:
        setting: what the policy knows.
        view: of the run.
        predictor: the tables, and which of them each sequence consults.
        points: where searches are made.
        room: how many tables the GPU has room for.
        most: entries and prototypes that a table may grow to; None where tables stay as they are.
    """

    def __init__(
        self, setting: Setting, view: View, predictor: Stages, points: Sequence[int], room: int,
        most: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.setting, self.view, self.stages, self.room = setting, view, predictor, room
        first = predictor.stages[0].predictor
        self.chosen, self.keys, self.clusters = predictor.chosen, first.keys, first.matching.clusters
        # The embedding layer's output is known at once and never changes: one search serves all layers.
        self.points = np.array(points[:1] if self.keys == "token" else points)
        stages = [stage.predictor for stage in predictor.stages]
        self.entries = np.array([[len(table) for table in one.tables] for one in stages], np.int64)
        """Of each table at each stage (V, D)."""
        self.prototypes = np.array([[len(p.centres) for p in one.matching.prototypes] for one in stages], np.int64)
        self.most = most

    @property
    def gpu_bytes(self) -> int:
        """All prototypes, and the largest of the tables that there is room for, at the size that they may grow to."""
        entries, prototypes = self.entries[0], self.prototypes[0]
        if self.most:
            entries, prototypes = np.full_like(entries, self.most[0]), np.full_like(prototypes, self.most[1])
        centres = self.setting.software.table_bytes(int(prototypes.sum()) * self.setting.model.hidden)
        return centres + int(np.sort(entries * self._entry_bytes)[::-1][: self.room].sum())

    @property
    def _entry_bytes(self) -> int:
        """What an entry takes: keys of the levels that are searched, and a path in 16 bits an expert."""
        model, software = self.setting.model, self.setting.software
        levels = len(self.points) if self.keys == "layer" else 1
        paths = 2 * model.routed_layers * model.top_k if software.where == "gpu" else 0
        return software.table_bytes(levels * model.hidden) + paths

    def prediction(self, before_demands: bool = False) -> Prediction:
        """Growing and matching in prefills, loading of tables, searches in decode steps: all on the critical path."""
        view, loading = self.view, self._loading()
        prefills = view.prefill_steps()
        grown = {stage.step: self._growing_ns(stage) for stage in self.stages.stages}
        growing = np.array([grown.get(step, 0) for step in prefills.tolist()], np.int64)
        times = [(view.moment(prefills, view.prompt_level), growing + self._matching(prefills) + loading[prefills])]
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
        entries = (union * self.entries[self.stages.at(steps)]).sum(axis=1)
        pairs, kind = np.unique(np.stack([entries, rows]), axis=1, return_inverse=True)
        hidden = self.setting.model.hidden
        ns = [self.setting.search_ns(entries, hidden, queries) for entries, queries in pairs.T.tolist()]
        return np.array(ns, np.int64)[kind.ravel()]

    def _matching(self, prefills: np.ndarray) -> np.ndarray:
        """Clustering each prompt and comparing its centres with all prototypes."""
        setting, hidden, ns = self.setting, self.setting.model.hidden, []
        prototypes = self.prototypes.sum(axis=1)[self.stages.at(prefills)]
        prompts = np.bincount(self.view.step, minlength=self.view.n_steps)[prefills]
        for rows, among in zip(prompts.tolist(), prototypes.tolist(), strict=True):
            centres = min(self.clusters, rows)
            clustering = setting.software.cluster_ns(setting.hardware, rows, hidden, centres, ITERATIONS)
            ns.append(clustering + setting.search_ns(among, hidden, centres))
        return np.array(ns, np.int64)

    def _growing_ns(self, stage: Stage) -> int:
        """What a stage's beginning takes, as if every row got a place and another entry lost it.

        Both are compared with all prototypes of their table, which may be clustered anew, and the rows are loaded.
        """
        setting, hidden, ns = self.setting, self.setting.model.hidden, 0
        for number, what in stage.appended.items():
            centres = len(stage.predictor.matching.prototypes[number].centres)
            ns += setting.search_ns(centres, hidden, 2 * what.rows)
            ns += setting.software.cluster_ns(setting.hardware, what.clustered, hidden, centres, ITERATIONS)
            ns += setting.software.load_ns(setting.hardware, what.rows * self._entry_bytes)
        return ns

    def _loading(self) -> np.ndarray:
        """Loading what a step consults and is not there (S,): the tables consulted longest ago make room."""
        view, setting = self.view, self.setting
        sizes, stage = (self.entries * self._entry_bytes).tolist(), self.stages.at(np.arange(view.n_steps)).tolist()
        loaded: OrderedDict[int, None] = OrderedDict()
        ns = np.zeros(view.n_steps, np.int64)
        starts = np.searchsorted(view.step, np.arange(view.n_steps + 1)).tolist()
        for step, (first, last) in enumerate(itertools.pairwise(starts)):
            wanted = np.flatnonzero(self.chosen[view.sequence[first:last]].any(axis=0)).tolist()
            absent = sum(sizes[stage[step]][table] for table in wanted if table not in loaded)
            ns[step] = setting.software.load_ns(setting.hardware, absent)
            for table in wanted:
                loaded[table] = None
                loaded.move_to_end(table)
            while len(loaded) > self.room:
                loaded.popitem(last=False)
        return ns
