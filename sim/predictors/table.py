"""Routing tables: for each domain, tokens that were generated, with their embeddings and the paths that they took.

A table holds at most N entries, a miniature of what its domain generates: the N places are given to token ids in
proportion to their frequency (Sainte-Lague's method, each next place to the largest f / (2 r + 1) of a token that was
seen f times and has r places). A token's places go to its occurrences in the order in which they came. So frequent
tokens have many contexts, and rare ones come last. None crowds out the rest, as the most frequent tokens would if all
of their occurrences were taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ground.errors import InputError
from traces.trace import Trace


@dataclass(frozen=True, eq=False)
class Table:
    """Entries of one domain, in the order in which they came.

    Attributes:
        domain: its label.
        token: id of each entry (n,) int64.
        keys: embeddings of each entry at every level (n, L + 1, D) int8: the embedding layer's output, then each routed
            layer's input.
        paths: experts that it took (n, L, K) int16, -1 for none.
        seen: how often each token id was ever given to this table, kept or not.
    """

    domain: str
    token: np.ndarray
    keys: np.ndarray
    paths: np.ndarray
    seen: dict[int, int]

    def __len__(self) -> int:
        return len(self.token)

    def taken(self, n_experts: int) -> np.ndarray:
        """How often its entries took each expert (L * E,) int64."""
        layers = self.paths.shape[1]
        flat = np.arange(layers)[:, None] * n_experts + self.paths
        return np.bincount(flat[self.paths >= 0], minlength=layers * n_experts)

    @classmethod
    def empty(cls, domain: str, levels: int, dims: int, top_k: int) -> Self:
        """A table without entries."""
        keys = np.zeros((0, levels, dims), np.int8)
        return cls(domain, np.zeros(0, np.int64), keys, np.zeros((0, levels - 1, top_k), np.int16), {})

    def append(self, token: np.ndarray, keys: np.ndarray, paths: np.ndarray, most: int) -> tuple[Self, np.ndarray]:
        """Take in new tokens (m,) with keys (m, L + 1, D) and paths (m, L, K), and keep at most ``most`` entries.

        Also returns which of the entries there were, and then which of the new ones, are kept (n + m,) bool. Each token
        id gets as many entries as in a table built anew from everything; where nothing was ever left out they are the
        very same entries. (A place that a token gains is filled by one of its new occurrences: it never gains more.)
        """
        seen = dict(self.seen)
        ids, times = np.unique(token, return_counts=True)
        for name, count in zip(ids.tolist(), times.tolist(), strict=True):
            seen[name] = seen.get(name, 0) + count
        everyone = np.concatenate([self.token, np.asarray(token, np.int64)])
        kept = apportioned(everyone, np.array([seen[t] for t in everyone.tolist()], np.int64), most)
        table = replace(
            self,
            token=everyone[kept],
            keys=np.concatenate([self.keys, keys])[kept],
            paths=np.concatenate([self.paths, paths])[kept],
            seen=seen,
        )
        return table, kept


def apportioned(token: np.ndarray, frequency: np.ndarray, most: int) -> np.ndarray:
    """Which rows (n,) bool get one of ``most`` places; ``frequency`` is that of each row's token.

    Ties go to the smaller id, so that how many places a token gets depends on frequencies alone.
    """
    order = np.argsort(token, kind="stable")
    first = np.searchsorted(token[order], token[order])
    place = np.empty(len(token), np.int64)
    place[order] = np.arange(len(token)) - first
    # Quotients of integers are compared as floats: equal ones give equal floats, so a tie is a tie.
    best = np.lexsort((token, -(frequency / (2 * place + 1))))[:most]
    kept = np.zeros(len(token), bool)
    kept[best] = True
    return kept


def tables(profile: Sequence[Trace], most: int) -> list[Table]:
    """A table for each domain of the profile split, ordered by label, from the decode rows of traces with embeddings.

    A domain of prompts alone has an empty one. Raises InputError if no trace has embeddings, or their shapes differ.
    """
    found: dict[str, Table] = {}
    for trace in profile:
        if trace.embeddings is None:
            continue
        rows, (levels, dims) = trace.decode_rows, trace.embeddings.shape[1:]
        label = trace.domain[trace.sequence[rows]]
        for domain in np.unique(trace.domain).tolist():
            table = found.get(domain, Table.empty(domain, levels, dims, trace.top_k))
            if table.keys.shape[1:] != (levels, dims) or table.paths.shape[2] != trace.top_k:
                raise InputError(f"{trace.source}: embeddings or routes of another shape than the other profiles'")
            mine = label == domain
            chosen = rows[mine]
            found[domain], _ = table.append(trace.token[chosen], trace.embeddings[mine], trace.experts[chosen], most)
    if not found:
        raise InputError("no trace of the profile split holds embeddings of decoded tokens; capture one with them")
    return [found[domain] for domain in sorted(found)]
