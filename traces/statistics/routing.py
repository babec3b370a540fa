"""How a model's routing behaves: what predicts its experts, and whether domains differ enough to tell apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ground.text import as_is
from traces.array_library import alike, beside, library, numbers, on_host
from traces.statistics.embedding_price import Keyed
from traces.statistics.recall import NEIGHBOURS, recall, vote_recall
from traces.statistics.usage import entropy, expert_counts, shares

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
    for done, (one, other) in enumerate(product(domains, repeat=2), 1):
        matrix[one][other] = _cross_recall(domains[one], domains[other], fewest, experts)
        at(done / len(domains) ** 2)
    used = {name: shares(expert_counts(domain.routes, experts)) for name, domain in domains.items()}
    return {
        "neighbours": NEIGHBOURS,
        "knowna_domain": fewest,
        "decode_rows": {name: len(domain.routes) for name, domain in domains.items()},
        "neighbour_recall": matrix,
        "popularity_recall": {name: _popularity_recall(domain, experts) for name, domain in domains.items()},
        "previous_token_recall": {
            name: _layer_recall(previous[name][domain.is_eval], domain.routes[domain.is_eval])
            for name, domain in domains.items()
        },
        "adjacent_layer_cosine": _adjacent_cosine(list(domains.values())),
        "entropy_bits": entropy(np.mean(list(used.values()), axis=0)).round(4).tolist(),
        "domain_entropy_bits": {name: entropy(share).round(4).tolist() for name, share in used.items()},
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
    domains, tables = list(result["neighbour_recall"]), ("popularity_recall", "previous_token_recall")
    title = "recall of experts: rows of a domain (down) in profile rows of another (across)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", *domains, "popularity", "previous token"):
        table.add_column(as_is(column), justify="right", overflow="fold")
    for one in domains:
        values = [*(result["neighbour_recall"][one][other] for other in domains), *(result[key][one] for key in tables)]
        table.add_row(as_is(one), *(f"{value:.3f}" for value in values))
    console.print(table)
    cosine = result["adjacent_layer_cosine"]
    if cosine:
        console.print(f"cosine of adjacent layers' router inputs: {min(cosine):.3f} to {max(cosine):.3f}")
    bits = result["entropy_bits"]
    use = "entropy of use, decode rows of all domains alike"
    console.print(f"{use}: {min(bits):.2f} to {max(bits):.2f} bits a layer")


def show(result: Mapping[str, Any], console: Console) -> bool:
    """Print the statistics and the checks for a person; whether all checks passed."""
    show_statistics(result, console)
    required = checks(result)
    for check in required:
        verdict = "pass" if check.passed else "FAIL"
        console.print(f"{verdict}: {check.what} {check.found:.3f}, needed {check.needed}")
    return all(check.passed for check in required)


def _cross_recall(one: Keyed, other: Keyed, keys: int, experts: int) -> float:
    """Recall of ``one``'s evaluation rows among the first ``keys`` profile rows of ``other``."""
    queries, profile = np.flatnonzero(one.is_eval), np.flatnonzero(~other.is_eval)[:keys]
    asking, asked = beside(queries, one.states), beside(profile, other.states)
    recalls = []
    for layer in range(one.routes.shape[1]):
        known, sought = other.states[:, 1 + layer][asked], one.states[:, 1 + layer][asking]
        recalls.append(
            vote_recall(known, other.routes[profile, layer], alike(sought, known), one.routes[queries, layer], experts)
        )
    return float(np.mean(recalls))


def _popularity_recall(domain: Keyed, experts: int) -> float:
    """Recall of always predicting the K experts that the domain's profile rows use most, a layer."""
    routes = domain.routes[domain.is_eval]
    counts = expert_counts(domain.routes[~domain.is_eval], experts)
    popular = np.argsort(-counts, axis=1, kind="stable")[:, : routes.shape[2]]
    return _layer_recall(np.broadcast_to(popular, routes.shape), routes)


def _layer_recall(predicted: np.ndarray, routes: np.ndarray) -> float:
    """`recall` of experts (n, L, K), mean over layers."""
    return float(np.mean([recall(predicted[:, layer], routes[:, layer]) for layer in range(routes.shape[1])]))


def _adjacent_cosine(domains: list[Keyed]) -> list[float]:
    """Mean cosine of the router inputs of layers l and l+1, one number a pair, over all rows."""
    levels = domains[0].states.shape[1]
    total, count = np.zeros(max(0, levels - 2)), 0
    for domain in domains:
        for start in range(0, len(domain.states), 512):
            block = numbers(domain.states[start : start + 512, 1:])
            xp = library(block)
            length = xp.linalg.norm(block, axis=2)
            dot = xp.einsum("nlh,nlh->nl", block[:, :-1], block[:, 1:])
            total += on_host((dot / xp.clip(length[:, :-1] * length[:, 1:], 1e-12, None)).sum(axis=0))
            count += len(block)
    return (total / max(1, count)).round(4).tolist()
