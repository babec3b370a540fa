"""Keep the experts that were most popular when profiled, over all domains or for the domain at hand."""

from typing import Literal

import numpy as np

from sim.plan import Plan, Requests, Values
from sim.policies.base import Parameters, Policy
from sim.predictors.popularity import counts_by_domain
from sim.view import View


class PopularityParameters(Parameters):
    """Parameters of popularity."""

    by: Literal["all", "domain"] = "all"
    """counts over the whole profile split, or over the sequences that carry the same domain label as the running ones
    (so this variant is told the domain; a domain without a profile falls back to the whole)."""


class Popularity(Policy):
    """Prefetch the most popular experts once and evict the least popular."""

    name = "popularity"
    summary = "keep the experts most used in the profile split (by=domain: in the domain at hand)"
    takes = PopularityParameters
    variants = ("by=domain",)
    parameters: PopularityParameters
    learns = True

    def plan(self, view: View) -> Plan:
        """Value experts by their counts; ask for the most valuable whenever the values change."""
        groups = self._groups(view)
        changed = [step for step, group in enumerate(groups) if step == 0 or group != groups[step - 1]]
        distinct = sorted({groups[step] for step in changed})
        row_of = {group: row for row, group in enumerate(distinct)}
        index = np.array([row_of[groups[step]] for step in changed], np.int64)
        counts = counts_by_domain(self.setting.profile)
        whole = np.sum([*counts.values()], axis=0)
        own = [sum((counts[name] for name in group if name in counts), np.zeros_like(whole)) for group in distinct]
        table = np.stack([total if total.any() else whole for total in own])
        unknown = {name for group, total in zip(distinct, own, strict=True) if not total.any() for name in group}
        begin = np.array(changed, np.int64)
        return Plan(
            eviction="score",
            values=Values(view.moment(begin, 0), index, table),
            requests=self._requests(view, begin, np.append(begin[1:], view.n_steps), table[index]),
            stream_prefill=True,
            note=f"nothing profiled of {', '.join(sorted(unknown))}: all domains stand for it" if unknown else "",
        )

    def _groups(self, view: View) -> list[tuple[str, ...]]:
        """The domains that run in each step; nothing where all are counted alike."""
        if self.parameters.by == "all":
            return [()] * view.n_steps
        running: list[set[str]] = [set() for _ in range(view.n_steps)]
        for step, sequence in zip(view.step.tolist(), view.sequence.tolist(), strict=True):
            running[step].add(str(view.domain()[sequence]))
        return [tuple(sorted(names)) for names in running]

    def _requests(self, view: View, begin: np.ndarray, end: np.ndarray, values: np.ndarray) -> Requests:
        """The experts that fit, most valuable first, asked for at ``begin`` and wanted until the values change.

        Nothing that an engine does before that change depends on when it comes: the last call of a request is a
        withdrawal at that moment, not foresight.
        """
        sizes = np.repeat(np.array(self.setting.model.expert_bytes, np.int64), view.n_experts)
        columns: list[np.ndarray] = []
        for first, last, value in zip(begin.tolist(), end.tolist(), values, strict=True):
            order = np.lexsort((np.arange(len(value)), -value))
            chosen = order[(np.cumsum(sizes[order]) <= self.setting.budget) & (value[order] > 0)]
            call = (last - 1) * view.n_layers + chosen // view.n_experts
            moment = np.full(len(chosen), view.moment(first, 0))
            columns.append(np.stack([moment, call, chosen, np.arange(len(chosen))]))
        return Requests.build(*np.concatenate(columns, axis=1))
