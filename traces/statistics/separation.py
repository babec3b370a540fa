"""What traces tell of each other: recall of a token's experts within and across domains, and from layer to layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ground.progress import Watch
from traces.mix import basis_of
from traces.statistics import routing
from traces.statistics.embedding_price import Keyed
from traces.trace import Trace


def keyed_domains(trace: Trace) -> dict[str, tuple[Keyed, np.ndarray]]:
    """For each domain of a trace with embeddings: its decode rows, and the routes (n, L, K) of the row before each."""
    if trace.embeddings is None:
        return {}
    rows = trace.decode_rows
    first = np.zeros(trace.n_rows, bool)
    first[trace.offsets[:-1]] = True
    before = trace.experts[rows - 1]
    before[first[rows]] = -1  # nothing comes before a sequence's first row
    found = {}
    for domain in sorted(set(trace.domain.tolist())):
        mine = (trace.domain == domain)[trace.sequence[rows]]
        is_eval = trace.row_split("eval")[rows[mine]]
        keyed = Keyed(trace.embeddings[mine], trace.experts[rows[mine]], is_eval)
        found[domain] = (keyed, before[mine])
    return found


def separation(traces: Sequence[Trace]) -> dict[str, Any] | str:
    """`routing.statistics` of all domains of the traces together, or in words why it is not defined.

    Similarities are those of the stored embeddings, so they need one basis; a domain needs decode rows of both splits.
    """
    if any(trace.embeddings is None for trace in traces):
        return "not defined: no embeddings"
    forms = {
        (trace.meta["model"]["name"], trace.n_experts, tuple(trace.layers), trace.top_k, basis_of(trace))
        for trace in traces
    }
    if len(forms) > 1:
        return "not defined across these traces: they are of several models or embedding bases"
    domains: dict[str, list[tuple[Keyed, np.ndarray]]] = {}
    for trace in traces:
        for domain, found in keyed_domains(trace).items():
            domains.setdefault(domain, []).append(found)
    keyed: dict[str, Keyed] = {}
    previous: dict[str, np.ndarray] = {}
    for domain, parts in domains.items():
        is_eval = np.concatenate([one.is_eval for one, _ in parts])
        if is_eval.any() and not is_eval.all():
            states, routes = (np.concatenate([getattr(one, name) for one, _ in parts]) for name in ("states", "routes"))
            keyed[domain] = Keyed(states, routes, is_eval)
            previous[domain] = np.concatenate([before for _, before in parts])
    if not keyed:
        return "not defined: no domain has decode rows of both splits"
    with Watch("comparing domains") as watch:
        return routing.statistics(keyed, previous, traces[0].n_experts, watch.at)
