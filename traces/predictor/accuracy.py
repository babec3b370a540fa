"""How often a ranking of experts is right, per token and for the experts that a whole batch needs.

A batch needs the union of what its tokens take, and a prediction for it is the union of theirs. That is how
ExpertFlow's code judges. Of a large batch nearly any guess finds most: unions of many experts overlap by chance. So
both are told, beside a random guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.schema import DECODE
from traces.trace import Trace


@dataclass(frozen=True)
class Accuracy:
    """What a ranking finds, by routed layer (L,): NaN where no row has a route.

    ``recall`` is the share of the tokens' experts among as many first ones of their ranking as a token takes, ``wide``
    that among twice as many. ``union_recall`` is the share of the batches' experts that the batches' predictions hold,
    ``union_precision`` the share of the predictions that a batch needs; ``wide_union_recall`` and
    ``wide_union_precision`` are those of twice as many.
    """

    recall: np.ndarray
    wide: np.ndarray
    union_recall: np.ndarray
    union_precision: np.ndarray
    wide_union_recall: np.ndarray
    wide_union_precision: np.ndarray


def accuracy(experts: np.ndarray, ranked: np.ndarray, group: np.ndarray, n_experts: int) -> Accuracy:
    """Judge a ranking (R, L, M) of rows that took ``experts`` (R, L, K), -1 for none.

    ``group`` (R,) numbers the batch step of each row from 0. Rows without a prediction (-1) find nothing.
    """
    top_k = experts.shape[2]
    narrow, wide = (union_scores(experts, ranked[:, :, :count], group, n_experts) for count in (top_k, 2 * top_k))
    return Accuracy(recall(experts, ranked, top_k), recall(experts, ranked, 2 * top_k), *narrow, *wide)


def recall(experts: np.ndarray, ranked: np.ndarray, first: int) -> np.ndarray:
    """(L,): the share of ``experts`` (R, L, K) among the ``first`` ones of their rankings (R, L, M)."""
    hits, taken = np.zeros(experts.shape[1]), np.zeros(experts.shape[1])
    for slot in range(experts.shape[2]):
        ids = experts[:, :, slot]
        hits += ((ranked[:, :, :first] == ids[:, :, None]).any(axis=2) & (ids >= 0)).sum(axis=0)
        taken += (ids >= 0).sum(axis=0)
    return _share(hits, taken)


def union_scores(
    experts: np.ndarray, ranked: np.ndarray, group: np.ndarray, n_experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Recall and precision (L,) of each group's predicted experts, against those that the group's rows took."""
    both = np.zeros((2, experts.shape[1]))
    found = np.zeros(experts.shape[1])
    for layer in range(experts.shape[1]):
        needed, told = (_union(ids[:, layer], group, n_experts) for ids in (experts, ranked))
        found[layer] = (needed & told).sum()
        both[:, layer] = needed.sum(), told.sum()
    return _share(found, both[0]), _share(found, both[1])


def _union(ids: np.ndarray, group: np.ndarray, n_experts: int) -> np.ndarray:
    """(groups, E) bool: experts among the ids (R, any) of a group's rows."""
    union = np.zeros((int(group.max(initial=-1)) + 1, n_experts + 1), bool)
    union[group[:, None], ids] = True  # -1 is the last column
    return union[:, :n_experts]


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def judged_rows(trace: Trace) -> np.ndarray:
    """The rows that rankings are judged by: decode rows of the evaluation split."""
    return np.flatnonzero(trace.row_split("eval") & (trace.phase == DECODE))


def batch_steps(trace: Trace, rows: np.ndarray, batch: int) -> np.ndarray:
    """The batch step (R,) of each row, from 0: sequences step together, ``batch`` at a time and in order.

    ``rows`` are decode rows. A sequence that ends early leaves its place empty.
    """
    _, sequence = np.unique(trace.sequence[rows], return_inverse=True)
    first = np.searchsorted(sequence, sequence)
    step = np.arange(len(rows)) - first
    _, group = np.unique(np.stack([sequence // batch, step]), axis=1, return_inverse=True)
    return np.asarray(group.reshape(-1))


def same_domain(trace: Trace) -> bool | None:
    """Whether a trace's predictor learnt from all of its domains; None where it does not say."""
    learnt = trace.meta.get("predictor", {}).get("trained_on")
    if not isinstance(learnt, Sequence):
        return None
    told = {domain for one in learnt if isinstance(one, dict) for domain in one.get("domains", [])}
    return set(trace.domain[trace.split == "eval"].tolist()) <= told
