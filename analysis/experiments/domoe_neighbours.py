"""Are recorded tokens of one's own domain more similar than those of another, and do they take the same experts?

The paper's Figure 1 says so. Here every domain offers the same number of recorded tokens, so that a larger table is not
mistaken for a better one.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from analysis.entries import having
from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import Sheet, notes, number, percent
from analysis.published import domoe
from analysis.runs import spread
from analysis.workloads import ModelTraces, loaded
from ground.errors import InputError
from traces.statistics.recall import NEIGHBOURS, recall, unit_vectors, vote

_QUERIES = 256
MEASURED = {"cosine": number, "same": percent, "voted": percent}
"""What tables are compared by (see `agreement`), and how it is shown."""


class Tokens(NamedTuple):
    """Decode tokens of one domain at one level: embeddings (n, D) and the routes (n, K) of the layer that they meet."""

    domain: str
    embeddings: np.ndarray
    routes: np.ndarray


def nearest(keys: np.ndarray, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` keys (n, D) most similar (cosine) to each query (m, D): similarities and indices (m, count).

    Best first, ties to the smaller index; all keys if there are fewer. A zero vector is similar to nothing (0).
    """
    units = unit_vectors(keys)
    count = min(count, len(keys))
    similarity, index = np.empty((len(queries), count), np.float32), np.empty((len(queries), count), np.int64)
    for start in range(0, len(queries), _QUERIES):
        part = slice(start, start + _QUERIES)
        all_of_it = unit_vectors(queries[part]) @ units.T
        index[part] = np.argsort(-all_of_it, axis=1, kind="stable")[:, :count]
        similarity[part] = np.take_along_axis(all_of_it, index[part], axis=1)
    return similarity, index


def agreement(table: Tokens, asking: Tokens, experts: int) -> Data:
    """How similar the table's tokens are to those looked up, and how well their routes predict.

    ``cosine`` is the mean of the NEIGHBOURS most similar. ``same`` is the share of a token's experts that the most
    similar one took. ``voted`` is the share found by a vote of the NEIGHBOURS, weighted by similarity, which names as
    many experts.
    """
    similarity, index = nearest(table.embeddings, asking.embeddings, NEIGHBOURS)
    return {
        "cosine": float(similarity.mean()),
        "same": recall(table.routes[index[:, 0]], asking.routes),
        "voted": recall(vote(table.embeddings, table.routes, asking.embeddings, experts), asking.routes),
    }


def _at_level(job: tuple[ModelTraces, int]) -> list[Data]:
    """The tokens of every domain looked up in the table of every domain, for the routed layer ``level``."""
    model, level = job
    tables, asking, experts = _tokens(model, level)
    return [
        {"level": level, "own": one.domain == table.domain, "table": table.domain, "asking": one.domain}
        | agreement(table, one, experts)
        for one, table in product(asking, tables)
    ]


def _tokens(model: ModelTraces, level: int) -> tuple[list[Tokens], list[Tokens], int]:
    """Equally large tables of all domains, the tokens that are looked up in them, and the number of experts.

    Before routed layer ``level`` has its route, the embedding at ``level`` is known: the embedding layer's output for
    the first, the router input of the layer before for all others.
    """
    whole = [loaded(source.path) for source in model.sources]
    found: dict[str, dict[str, Tokens]] = {"profile": {}, "eval": {}}
    for trace in whole:
        if trace.embeddings is None:
            continue
        for domain in sorted(set(trace.domain.tolist())):
            for split in found:
                mine = ((trace.domain == domain) & (trace.split == split))[trace.sequence[trace.decode_rows]]
                if mine.any():
                    routes = trace.experts[trace.decode_rows[mine], level]
                    found[split][domain] = Tokens(domain, trace.embeddings[mine, level], routes)
    both = sorted(set(found["profile"]) & set(found["eval"]))
    size = min((len(found["profile"][domain].routes) for domain in both), default=0)
    tables = [Tokens(domain, *(array[:size] for array in found["profile"][domain][1:])) for domain in both]
    return tables, [found["eval"][domain] for domain in both], whole[0].n_experts


def measure(options: ExperimentOptions) -> Data:
    """Tables of the own and of other domains, for each model with several. Raises InputError if none has."""
    models: list[Data] = []
    for model in options.models:
        tables, asking, _ = _tokens(model, 0)
        if len(tables) < 2:
            continue
        layers = loaded(model.sources[0].path).n_layers
        jobs = [(model, level) for level in range(layers)]
        answers = [a for one in spread(_at_level, jobs, options.processes, f"neighbours, {model.name}") for a in one]
        domains = [table.domain for table in tables]
        models.append(
            {
                "model": model.name,
                "domains": domains,
                "entries": len(tables[0].routes),
                "asked": {one.domain: len(one.routes) for one in asking},
                "matrix": {what: _matrix(answers, domains, what) for what in MEASURED},
                "by_layer": {what: _by_layer(answers, layers, what) for what in MEASURED},
            }
        )
    if not models:
        raise InputError("neighbours of other domains: no model has embeddings of two domains in both splits")
    return {"models": models, "made": options.made()}


def _matrix(answers: Sequence[Data], domains: Sequence[str], what: str) -> list[list[float]]:
    """Means over layers: a row for the tokens of a domain, a column for a domain's table."""
    return [[_mean(having(answers, asking=one, table=other), what) for other in domains] for one in domains]


def _by_layer(answers: Sequence[Data], layers: int, what: str) -> dict[str, list[float]]:
    """Means over domains for each layer, of the own table and of those of others."""
    own, other = ([_mean(having(answers, level=n, own=own), what) for n in range(layers)] for own in (True, False))
    return {"own": own, "other": other}


def _mean(answers: Sequence[Data], what: str) -> float:
    return round(float(np.mean([answer[what] for answer in answers])), 4)


def _own_and_other(matrix: Sequence[Sequence[float]]) -> tuple[float, float]:
    table = np.array(matrix)
    own = np.eye(len(table), dtype=bool)
    return float(table[own].mean()), float(table[~own].mean())


def sheets(data: Data) -> list[Sheet]:
    """Own and other tables of each model, and the whole matrix of the vote."""
    rows = []
    for entry in data["models"]:
        cells = [entry["model"], f"{len(entry['domains'])} x {entry['entries']:,}"]
        for what, shown in MEASURED.items():
            own, other = _own_and_other(entry["matrix"][what])
            cells += [shown(own), shown(other), f"{own / other:.2f}"]
        rows.append(cells)
    columns = ["model", "tables", f"cosine of {NEIGHBOURS} nearest, own", "other", "ratio",
               "nearest takes the same, own", "other", "ratio",
               f"vote of {NEIGHBOURS} finds, own", "other", "ratio"]  # fmt: skip
    below = notes("neighbours", says=domoe().said("Figure 1").says)
    result = [Sheet("Figure 1: neighbours of one's own domain and of another", columns, rows, below)]
    for entry in data["models"]:
        matrix = entry["matrix"]["voted"]
        lines = [[one, *map(percent, line)] for one, line in zip(entry["domains"], matrix, strict=True)]
        title = f"{entry['model']}: experts that a vote of each domain's table finds"
        result.append(Sheet(title, ["tokens of", *entry["domains"]], lines))
    return result


def draw(data: Data, figure: Figure) -> None:
    """Similarity and agreement by layer, own against other, a column a model."""
    titles = [f"{entry['model']} (small, trained)" for entry in data["models"]]
    below, beside = "routed layer that is predicted", ["cosine of 8 nearest", "experts found by vote"]
    axes = panels(figure, titles, 2.6, 6, below, beside, sharex="col", sharey="row")
    for column, entry in zip(axes, data["models"], strict=True):
        for ax, what in zip(column, ("cosine", "voted"), strict=True):
            for whose, colour in (("own", "tab:blue"), ("other", "tab:orange")):
                ax.plot(entry["by_layer"][what][whose], color=colour, label=f"{whose} domain")
            ax.set_ylim(0, 1)


TITLE = "Figure 1: in-domain against cross-domain neighbours"
EXPERIMENT = Experiment(60, "domoe-neighbours", TITLE, __doc__, measure, sheets, draw)
