"""Domain tables that grow with what is served: DoMoE's incremental maintenance, as a running system would do it.

"To keep prototypes consistent with evolving table contents, DoMoE supports incremental prototype maintenance when new
tokens are appended to an expert routing table" (DoMoE, section 3.2; "periodically or in the background"). Here it is
done as each prompt comes: the tokens that were decoded since the last one are appended, with the embeddings and paths
that they had, to the table that their own prompt matched best. Nobody tells the domain. A table takes what
``Table.append`` gives places to, and prototypes follow (``Prototypes.changed``). What a token is predicted from was
decoded in steps before its own, so nothing is known too early.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.predictors.domain import Domain
from sim.predictors.neighbours import Neighbours
from sim.view import View


@dataclass(frozen=True)
class Appended:
    """What one table took in: so many rows; and the entries that its prototypes were clustered anew from, or 0."""

    rows: int
    clustered: int


@dataclass(frozen=True)
class Stage:
    """Tables and prototypes as they are from ``step`` on, and what that took by domain's number."""

    step: int
    predictor: Neighbours
    appended: dict[int, Appended] = field(default_factory=dict)


class Stages:
    """The predictor of a run in which tables may change: that of every step is the one in force there.

    Args:
        view: of the run.
        stages: by rising step; the first is in force from the beginning.
    """

    name = "domain-tables"

    def __init__(self, view: View, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self._first = np.array([stage.step for stage in stages])
        sequences = int(view.sequence.max(initial=-1)) + 1
        self.chosen = np.zeros((sequences, len(stages[0].predictor.tables)), bool)
        """Which tables each sequence consults (S, D): matched once, as its prompt comes."""
        of_sequence = np.zeros(sequences, np.int64)
        known, first = np.unique(view.sequence, return_index=True)
        of_sequence[known] = self.at(view.step[first])
        for sequence, prompt in view.prompts().items():
            stage = self.stages[of_sequence[sequence]]
            self.chosen[sequence, stage.predictor.matching.consulted(prompt)] = True
        rows = np.flatnonzero(view.decoding)
        self._of_row = self.at(view.step[rows])
        self._consulted = self.chosen[view.sequence[rows]]

    def taken(self, n_experts: int) -> np.ndarray:
        """How often the entries of each table took each expert, at each stage: (V, D, L * E) int64."""
        return np.stack([[table.taken(n_experts) for table in stage.predictor.tables] for stage in self.stages])

    def popularity(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """The same added over the tables that rows consult, (N, L * E) int64, and of each decode row which (Rd,)."""
        asked = np.column_stack([self._of_row, self._consulted])
        distinct, of_row = np.unique(asked, axis=0, return_inverse=True)
        taken = self.taken(view.n_experts)[distinct[:, 0]]
        return (distinct[:, 1:, None] * taken).sum(axis=1), of_row.ravel()

    def at(self, step: np.ndarray) -> np.ndarray:
        """The number of the stage in force in each step."""
        return np.searchsorted(self._first, step, side="right") - 1

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """As ``sim.predictors.base.Predictor`` says, of the view that it was made for."""
        level = self.stages[0].predictor.query_level(point)
        queries = view.embedding(level)
        parts = []
        for number, stage in enumerate(self.stages):
            rows = slice(*np.searchsorted(self._of_row, [number, number + 1]))  # rows are in the order of steps
            parts.append(stage.predictor.vote(queries[rows], self._consulted[rows], level, layers))
        return np.concatenate(parts)


def grown(view: View, domains: Sequence[Domain], predictor: Neighbours) -> list[Stage]:
    """The stages of a run that begins with ``domains``, which ``predictor`` searches: one more at prompts that come."""
    stages, now = [Stage(0, predictor)], list(domains)
    rows = np.flatnonzero(view.decoding)
    step, sequence = view.step[rows], view.sequence[rows]
    keys, paths = None, view.route(view.n_layers)[rows]
    owner: dict[int, int] = {}  # of each sequence, the table that its prompt matched best
    prompts, done = view.prompts(), 0
    for begin in view.prefill_steps().tolist():
        served = slice(done, done := int(np.searchsorted(step, begin)))
        mine = np.array([owner.get(one, -1) for one in sequence[served].tolist()], np.int64)
        if (mine >= 0).any():
            if keys is None:
                keys = np.stack([view.embedding(level) for level in range(view.n_layers + 1)], axis=1)
            appended = {}
            for number in np.unique(mine[mine >= 0]).tolist():
                some = np.arange(served.start, served.stop)[mine == number]
                before = now[number]
                now[number] = before.append(view.token[rows[some]], keys[some], paths[some])
                anew = now[number].prototypes.times != before.prototypes.times
                appended[number] = Appended(len(some), len(now[number].table) if anew else 0)
            matching = replace(
                stages[-1].predictor.matching, prototypes=[domain.prototypes for domain in now], _known={}
            )
            searched = stages[-1].predictor.changed([domain.table for domain in now], matching)
            stages.append(Stage(begin, searched, appended))
        for one in np.unique(view.sequence[view.step == begin]).tolist():
            if one in prompts:
                best = stages[-1].predictor.matching.consulted(prompts[one])[:1]
                owner.update((one, number) for number in best.tolist())
    return stages
