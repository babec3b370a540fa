"""What storing embeddings costs, in bytes a vector and in recall of experts, and the choice of a basis by it."""

import lzma
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from traces.array_library import beside
from traces.embeddings import Basis, fit, narrowed, principal_directions
from traces.statistics.recall import vote_recall

# Candidates of an automatic choice (dims, bits), and the recall that the chosen one may lose.
CANDIDATES = ((48, 2), (64, 2), (80, 2), (96, 2), (128, 2), (192, 2), (48, 3), (64, 3), (96, 3), (128, 3), (64, 4))
MOST_LOSS = 0.015
_WEIGHED_ROWS = 150  # rows a domain whose compressed size is measured


@dataclass(frozen=True)
class Keyed:
    """Decode rows of one domain: states (n, L+1, H) or stored vectors (n, L+1, D), routes (n, L, K), eval rows (n,)."""

    states: Any
    routes: np.ndarray
    is_eval: np.ndarray


@dataclass(frozen=True)
class Price:
    """What storing embeddings as dims x bits costs: bytes a vector, and recall of experts with and without it."""

    dims: int
    bits: int
    recall_full: float
    recall_stored: float
    deflate_bytes: float
    lzma_bytes: float

    @property
    def loss(self) -> float:
        """Recall lost by storing."""
        return self.recall_full - self.recall_stored


def mean_recall(domains: Sequence[Keyed], experts: int) -> float:
    """Recall of eval rows against profile rows of their own domain, mean over layers, then over domains."""
    scores = []
    for domain in domains:
        own, other, recalls = ~domain.is_eval, domain.is_eval, []
        keys, queries = (beside(np.flatnonzero(side), domain.states) for side in (own, other))
        for layer in range(domain.routes.shape[1]) if own.any() and other.any() else ():
            # One level at a time: states may be a file larger than memory.
            level, routes = domain.states[:, 1 + layer], domain.routes[:, layer]
            recalls.append(vote_recall(level[keys], routes[own], level[queries], routes[other], experts))
        if recalls:
            scores.append(np.mean(recalls))
    return float(np.mean(scores)) if scores else float("nan")


def price(domains: Sequence[Keyed], basis: Basis, experts: int, recall_full: float) -> Price:
    """Bytes and recall of ``domains`` stored with ``basis``; ``recall_full`` is :func:`mean_recall` of the states."""
    return prices(domains, [basis], experts, recall_full)[0]


def prices(domains: Sequence[Keyed], bases: Sequence[Basis], experts: int, recall_full: float) -> list[Price]:
    """The :func:`price` of each basis; while recall of one is measured, others are compressed."""
    found = []
    with ThreadPoolExecutor() as pool:
        for basis in bases:
            blocks = [basis.quantise(domain.states) for domain in domains]
            raw = b"".join(block[:_WEIGHED_ROWS].tobytes() for block in blocks)
            packed = [pool.submit(compress, raw) for compress in (zlib.compress, lzma.compress)]
            pairs = zip(domains, blocks, strict=True)
            stored = [replace(one, states=beside(block, one.states)) for one, block in pairs]
            found.append((basis, mean_recall(stored, experts), len(raw) / basis.dims, packed))
        return [
            Price(basis.dims, basis.bits, recall_full, recall, *(len(one.result()) / vectors for one in packed))
            for basis, recall, vectors, packed in found
        ]


def choose_basis(
    keyed: Sequence[Keyed], experts: int, wanted: tuple[int, int] | None, basis: Basis | None, seed: int
) -> tuple[Basis, dict[str, Any]]:
    """The model's basis (given, of the wanted size, or the cheapest that suffices) and what meta says of it."""
    if basis:
        basis.check_for(keyed[0].states.shape[2], keyed[0].routes.shape[1] + 1)
    full = mean_recall(keyed, experts)
    learned = [one.states[~one.is_eval] for one in keyed]
    if not any(len(states) for states in learned):  # a text of one prompt has no profile split
        learned = [one.states for one in keyed]
    if basis:
        one = price(keyed, basis, experts, full)
    elif wanted is None:
        directions = principal_directions(learned)
        sizes = [(dims, bits) for dims, bits in CANDIDATES if dims <= directions.shape[0]] or [(len(directions), 4)]
        bases = [narrowed(directions, learned, dims, bits, seed) for dims, bits in sizes]
        priced = prices(keyed, bases, experts, full)
        show_prices(priced)
        best = min(range(len(priced)), key=lambda i: (max(priced[i].loss - MOST_LOSS, 0), priced[i].deflate_bytes))
        basis, one = bases[best], priced[best]
    else:
        basis = fit(learned, wanted[0], wanted[1], seed)
        one = price(keyed, basis, experts, full)
    numbers = {name: value for name, value in asdict(one).items() if np.isfinite(value)}
    return basis, {
        **{name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()},
        "basis_sha256": basis.sha256,
        "kept": "uncentred principal directions of unit-length states, rotated, one scale a level",
    }


def show_prices(prices: Sequence[Price]) -> None:
    """Print what each way of storing embeddings costs."""
    table = Table(title="stored embeddings: recall of experts by a vote of neighbours, bytes a vector")
    for column in ("dims x bits", "recall, full", "stored", "lost", "deflate", "lzma"):
        table.add_column(column, justify="right")
    for one in prices:
        table.add_row(
            f"{one.dims}x{one.bits}", f"{one.recall_full:.3f}", f"{one.recall_stored:.3f}", f"{one.loss:.4f}",
            f"{one.deflate_bytes:.1f}", f"{one.lzma_bytes:.1f}",
        )  # fmt: skip
    Console(stderr=True).print(table)
