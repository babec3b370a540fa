"""How evenly a model's experts are used, and how far domains part in what they use.

All functions take ``share`` (D, L, E): of the activations of domain d at layer l, the share that expert e takes, as
`usage.shares` gives it. Domains count alike, however many rows each has.
"""

import numpy as np

from traces.statistics.usage import entropy, shares


def evenness(share: np.ndarray) -> np.ndarray:
    """(L,) entropy of the use of a layer's experts by all domains alike, over the most possible: 1 is even."""
    experts = share.shape[2]
    return entropy(shares(share.sum(axis=0))) / np.log2(experts) if experts > 1 else np.ones(share.shape[1])


def most_over_least(share: np.ndarray) -> np.ndarray:
    """(L,) use of a layer's most used expert over that of its least used; infinite where one is never used."""
    used = share.sum(axis=0)
    least = used.min(axis=1)
    return np.divide(used.max(axis=1), least, out=np.full(len(used), np.inf), where=least > 0)


def divergence(share: np.ndarray) -> float:
    """Jensen-Shannon divergence of two domains' use in bits, mean over pairs and layers that both use; NaN: none."""
    own, takes = entropy(share), share.sum(axis=2) > 0
    parted = [
        (entropy((one + share[at + 1 :]) / 2) - (own[at] + own[at + 1 :]) / 2)[takes[at] & takes[at + 1 :]]
        for at, one in enumerate(share)
    ]
    pairs = np.concatenate(parted) if parted else np.zeros(0)
    return float(pairs.mean()) if len(pairs) else float("nan")


def own_over_other(share: np.ndarray, top_k: int) -> float:
    """Activations in the own domain's ``top_k`` most used experts of a layer over those in another domain's.

    Both are means over domains (or pairs of them) and layers; NaN with one domain. Of equally used experts the lower
    numbers count.
    """
    if len(share) < 2:
        return float("nan")
    table = np.argsort(-share, axis=2, kind="stable")[:, :, :top_k]
    # taken[a, b]: the share of domain a's activations that the table of domain b takes, mean over layers.
    tables = [np.broadcast_to(one, (len(share), *one.shape)) for one in table]
    taken = np.stack([np.take_along_axis(share, one, axis=2).sum(axis=2).mean(axis=1) for one in tables], axis=1)
    others = taken[~np.eye(len(taken), dtype=bool)].mean()
    return float(np.diag(taken).mean() / others) if others else float("inf")
