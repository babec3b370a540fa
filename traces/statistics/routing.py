"""How a model's routing behaves: what predicts its experts, and whether domains differ enough to tell apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ground.text import as_is
from traces.statistics.embedding_price import Keyed
from traces.statistics.recall import NEIGHBOURS, recall, vote_recall

# What a small trained model must show before its traces stand in for those of a large one.
LEAST_MARGIN = 0.10  # recall of a domain's own neighbours above the best other domain's, mean over domains
LEAST_ENTROPY = 1.3  # bits, at every layer


@dataclass(frozen=True)
class Check:
    """One requirement: what was found, what is needed."""

    what: str
    found: float
    needed: float

    @property
    def passed(self) -> bool:
        """Whether the requirement is met."""
        return self.found >= self.needed


def statistics(
    domains: Mapping[str, Keyed],
    previous: Mapping[str, np.ndarray],
    experts: int,
    at: Callable[[float], None] = lambda done: None,
) -> dict[str, Any]:
    """Routing statistics as JSON; recalls are of the evaluation rows' experts, means over layers.

    ``previous[domain]`` (n, L, K) holds the routes of the row before each decode row in its sequence (-1: none).
    ``neighbour_recall[a][b]`` looks up rows of domain a among profile rows of domain b, the same number of keys for
    every b; ``entropy_bits`` is that of each layer's share of activations a expert over all domains alike. ``at`` is
    told how much is done.
    """
    fewest = min(int((~domain.is_eval).sum()) for domain in domains.values())
    matrix: dict[str, dict[str, float]] = {one: {} for one in domains}
    for number, one in enumerate(domains):
        for place, other in enumerate(domains):
            matrix[one][other] = _cross_recall(domains[one], domains[other], fewest, experts)
            at((number * len(domains) + place + 1) / len(domains) ** 2)
    shares = {name: _shares(domain.routes, experts) for name, domain in domains.items()}
    return {
        "neighbours": NEIGHBOURS,
        "keys_a_domain": fewest,
        "decode_rows": {name: len(domain.routes) for name, domain in domains.items()},
        "neighbour_recall": matrix,
        "popularity_recall": {name: _popularity_recall(domain, experts) for name, domain in domains.items()},
        "previous_token_recall": {
            name: float(
                np.mean(
                    [
                        recall(previous[name][domain.is_eval, layer], domain.routes[domain.is_eval, layer])
                        for layer in range(domain.routes.shape[1])
                    ]
                )
            )
            for name, domain in domains.items()
        },
        "adjacent_layer_cosine": _adjacent_cosine(list(domains.values())),
        "entropy_bits": _entropy(np.mean(list(shares.values()), axis=0)).round(4).tolist(),
        "domain_entropy_bits": {name: _entropy(share).round(4).tolist() for name, share in shares.items()},
    }


def checks(result: Mapping[str, Any]) -> list[Check]:
    """The requirements, from the output of :func:`statistics`."""
    found = [Check("lowest entropy of a layer, bits", min(result["entropy_bits"]), LEAST_ENTROPY)]
    matrix = result["neighbour_recall"]
    if len(matrix) > 1:
        margins = [matrix[one][one] - max(matrix[one][other] for other in matrix if other != one) for one in matrix]
        found.append(
            Check("recall of own neighbours above the best other domain's", float(np.mean(margins)), LEAST_MARGIN)
        )
    return found


def show_statistics(result: Mapping[str, Any], console: Console) -> None:
    """Print the statistics for a person."""
    domains = list(result["neighbour_recall"])
    title = "recall of experts: rows of a domain (down) in profile rows of another (across)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", *domains, "popularity", "previous token"):
        table.add_column(as_is(column), justify="right", overflow="fold")
    for one in domains:
        cells = [f"{result['neighbour_recall'][one][other]:.3f}" for other in domains]
        table.add_row(
            as_is(one), *cells, *(f"{result[key][one]:.3f}" for key in ("popularity_recall", "previous_token_recall"))
        )
    console.print(table)
    cosine = result["adjacent_layer_cosine"]
    if cosine:
        console.print(f"cosine of adjacent layers' router inputs: {min(cosine):.3f} to {max(cosine):.3f}")
    entropy = result["entropy_bits"]
    bits = f"{min(entropy):.2f} to {max(entropy):.2f} bits a layer"
    console.print(f"entropy of use, decode rows of all domains alike: {bits}")


def show(result: Mapping[str, Any], console: Console) -> bool:
    """Print the statistics and the checks for a person; whether all checks passed."""
    show_statistics(result, console)
    for check in checks(result):
        verdict = "pass" if check.passed else "FAIL"
        console.print(f"{verdict}: {check.what} {check.found:.3f}, needed {check.needed}")
    return all(check.passed for check in checks(result))


def _cross_recall(one: Keyed, other: Keyed, keys: int, experts: int) -> float:
    """Recall of ``one``'s evaluation rows among the first ``keys`` profile rows of ``other``."""
    queries, profile = np.flatnonzero(one.is_eval), np.flatnonzero(~other.is_eval)[:keys]
    return float(
        np.mean(
            [
                vote_recall(
                    other.states[profile, 1 + layer], other.routes[profile, layer],
                    one.states[queries, 1 + layer], one.routes[queries, layer], experts,
                )
                for layer in range(one.routes.shape[1])
            ]
        )
    )  # fmt: skip


def _popularity_recall(domain: Keyed, experts: int) -> float:
    """Recall of always predicting the K experts that the domain's profile rows use most, a layer."""
    top_k = domain.routes.shape[2]
    popular = np.argsort(-_shares(domain.routes[~domain.is_eval], experts), axis=1, kind="stable")[:, :top_k]
    routes = domain.routes[domain.is_eval]
    layers = range(routes.shape[1])
    return float(
        np.mean([recall(np.broadcast_to(popular[l], (len(routes), top_k)), routes[:, l]) for l in layers])  # noqa: E741
    )


def _shares(routes: np.ndarray, experts: int) -> np.ndarray:
    """(L, E): each expert's share of a layer's activations."""
    counts = np.stack([np.bincount(layer[layer >= 0], minlength=experts) for layer in routes.transpose(1, 0, 2)])
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))


def _entropy(shares: np.ndarray) -> np.ndarray:
    """Bits, along the last axis."""
    return -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=-1)


def _adjacent_cosine(domains: list[Keyed]) -> list[float]:
    """Mean cosine of the router inputs of layers l and l+1, one number a pair, over all rows."""
    levels = domains[0].states.shape[1]
    total, count = np.zeros(max(0, levels - 2)), 0
    for domain in domains:
        for start in range(0, len(domain.states), 512):
            block = np.asarray(domain.states[start : start + 512, 1:], np.float32)
            length = np.linalg.norm(block, axis=2)
            dot = np.einsum("nlh,nlh->nl", block[:, :-1], block[:, 1:])
            total += (dot / np.maximum(1e-12, length[:, :-1] * length[:, 1:])).sum(axis=0)
            count += len(block)
    return (total / max(1, count)).round(4).tolist()
