"""One routing table over all domains: the nearest of everything that was profiled vote, whatever the prompt is about.

What DoMoE compares itself with under the name of FMoE: the same entries (``sim.predictors.table``) and the same vote
(``sim.predictors.neighbours``), without domains and so without matching prompts. Domains fill it in turn, a sequence of
each at a time. So which trace is read first does not decide whose occurrences of a token are kept.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ground.errors import InputError
from sim.predictors.matching import Matching
from sim.predictors.neighbours import Keys, Neighbours
from sim.predictors.table import Table
from sim.view import View
from traces.trace import Trace


class GlobalTable:
    """The vote of the nearest entries of a single table."""

    name = "global-table"

    def __init__(self, profile: Sequence[Trace], entries: int = 2000, *, votes: int = 8, keys: Keys = "layer") -> None:
        told = [trace for trace in profile if trace.embeddings is not None]
        if not told:
            raise InputError("no trace of the profile split holds embeddings of decoded tokens; capture one with them")
        shapes = {(trace.embeddings.shape[1:], trace.top_k) for trace in told if trace.embeddings is not None}
        if len(shapes) > 1:
            raise InputError("profiles hold embeddings or routes of different shapes; name those of one model")
        (((levels, dims), top_k),) = shapes
        self.table, _ = Table.empty("all domains", levels, dims, top_k).append(*_in_turn(told), entries)
        level = profile[0].meta.get("embedding", {}).get("prefill_layer", 0)
        self._voters = Neighbours(
            [self.table], Matching([], 1), votes=votes, keys=keys, level=level, n_experts=profile[0].n_experts
        )

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """Votes for each expert (Rd, len(layers), E) float32, see ``Predictor``."""
        level = self._voters.query_level(point)
        query = view.embedding(level)
        return self._voters.vote(query, np.ones((len(query), 1), bool), level, layers)


def _in_turn(profile: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode rows' tokens (n,), embeddings (n, L+1, D) and routes (n, L, K), domains taking turns by sequences.

    The order of the traces changes nothing: they are taken by their content's hash.
    """
    traces = sorted(profile, key=lambda trace: trace.sha256)
    turn: Counter[str] = Counter()
    pieces = []
    for number, trace in enumerate(traces):
        for sequence, domain in enumerate(trace.domain.tolist()):
            pieces.append((turn[domain], domain, number, sequence))
            turn[domain] += 1
    rows = [trace.decode_rows for trace in traces]
    bounds = [
        np.searchsorted(trace.sequence[r], np.arange(trace.n_sequences + 1))
        for trace, r in zip(traces, rows, strict=True)
    ]
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for _, _, number, sequence in sorted(pieces):
        trace, mine = traces[number], slice(bounds[number][sequence], bounds[number][sequence + 1])
        assert trace.embeddings is not None
        chosen = rows[number][mine]
        found.append((trace.token[chosen], trace.embeddings[mine], trace.experts[chosen]))
    token, keys, paths = (np.concatenate(part) for part in zip(*found, strict=True))
    return token, keys, paths
