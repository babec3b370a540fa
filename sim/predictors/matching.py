"""Which domains a prompt belongs to, from its embeddings alone.

The prompt's embeddings are clustered; its centres C are compared with each domain's prototypes P by cosine. The formula
of the score is lost from DoMoE's paper; its words ("the max operator captures the strongest semantic evidence") allow

* reading A: ``S(d) = mean over c in C of max over p in P_d of cos(c, p)``, every part of the prompt has its say;
* reading B: ``S(d) = max over c in C, p in P_d of cos(c, p)``, the one strongest agreement decides.

The best domain is consulted, and of the next ones those whose score is less than ``margin`` behind it, up to
``most`` in all. There is no table of all domains to fall back on: a prompt without any direction (none, or zeros alone)
matches nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sim.predictors.prototypes import Prototypes, cluster
from sim.view import prompts
from traces.trace import Trace

Reading = Literal["A", "B"]


@dataclass(frozen=True)
class Matching:
    """Scores prompts against the prototypes of D domains; remembers prompts that it has seen.

    Attributes:
        prototypes: of each domain.
        clusters: most centres of a prompt.
        reading: A or B, above.
        most: domains consulted at most.
        margin: how far behind the best a further one may be; 2 or more always consults ``most``.
        seed: of the clustering.
    """

    prototypes: Sequence[Prototypes]
    clusters: int
    reading: Reading = "A"
    most: int = 2
    margin: float = 2.0
    seed: int = 0
    _known: dict[bytes, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def scores(self, prompt: np.ndarray) -> np.ndarray:
        """Score of each domain (D,) float64 for a prompt's embeddings (n, dims); -inf where nothing can be compared."""
        key = np.ascontiguousarray(prompt).tobytes()
        if key not in self._known:
            self._known[key] = self._score(cluster(prompt, self.clusters, self.seed))
        return self._known[key]

    def _score(self, centres: np.ndarray) -> np.ndarray:
        found = np.full(len(self.prototypes), -np.inf)
        for domain, prototypes in enumerate(self.prototypes):
            if len(centres) and len(prototypes.centres):
                strongest = (centres @ prototypes.centres.T).max(axis=1)
                found[domain] = strongest.mean() if self.reading == "A" else strongest.max()
        return found

    def consulted(self, prompt: np.ndarray) -> np.ndarray:
        """Domains to consult (at most ``most``,) int64, best first, ties to the first; none if nothing matches."""
        scores = self.scores(prompt)
        best = np.argsort(-scores, kind="stable")[: self.most]
        close = np.isfinite(scores[best]) & ((np.arange(len(best)) == 0) | (scores[best] > scores.max() - self.margin))
        return best[close]


def confusion(matching: Matching, domains: Sequence[str], trace: Trace) -> dict[str, np.ndarray]:
    """How often prompts of each label of ``trace`` matched each of ``domains``: label to (2, D) int64.

    Row 0 counts the best match, row 1 every domain consulted.
    """
    counts: dict[str, np.ndarray] = {}
    for sequence, prompt in prompts(trace).items():
        count = counts.setdefault(str(trace.domain[sequence]), np.zeros((2, len(domains)), np.int64))
        chosen = matching.consulted(prompt)
        count[0, chosen[:1]] += 1
        count[1, chosen] += 1
    return counts
