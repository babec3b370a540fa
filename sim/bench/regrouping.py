"""How long the token scheduler takes: splitting the tokens of two batches, at the sizes that ExpertFlow's paper has."""

import time
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from sim.schedules.grouping import kmeans

SHAPES = {
    "Switch-32": (6, 32, 1), "Switch-64": (6, 64, 1), "Switch-128": (6, 128, 1), "Mixtral": (32, 8, 2),
    "Qwen1.5-MoE": (24, 60, 4), "DeepSeek-MoE": (27, 64, 6),
}  # fmt: skip
"""Routed layers, experts of one and experts a token, of the decoder where there is an encoder."""
BATCHES = (4, 8, 16, 32)
TIMES = 50


@dataclass(frozen=True)
class RegroupTime:
    """Milliseconds of one split: the median of some, and what nine of ten stay below."""

    model: str
    layers: int
    experts: int
    batch: int
    tokens: int
    median_ms: float
    p90_ms: float


def measure_regrouping(times: int = TIMES) -> list[RegroupTime]:
    """Split tokens of two kinds, whose routes are drawn at random about their kind's, so many ``times`` each."""
    return [_measured(model, batch, times) for model in SHAPES for batch in BATCHES]


def _measured(model: str, batch: int, times: int) -> RegroupTime:
    layers, experts, top_k = SHAPES[model]
    rng, tokens = np.random.default_rng(0), 2 * batch
    present = np.arange(tokens) < batch
    took = []
    for number in range(times):
        kinds = rng.gumbel(size=(2, layers, experts))[rng.integers(0, 2, tokens)]
        paths = np.zeros(kinds.shape, bool)
        taken = np.argsort(-kinds - rng.gumbel(size=kinds.shape), axis=2)[:, :, :top_k]
        np.put_along_axis(paths, taken, True, axis=2)
        flat = paths.reshape(tokens, -1)
        begin = time.perf_counter()
        kmeans(flat, batch, np.random.default_rng([0, number]), present)
        took.append(1e3 * (time.perf_counter() - begin))
    return RegroupTime(model, layers, experts, batch, tokens, float(np.median(took)), float(np.percentile(took, 90)))


def regrouping_view(rows: list[RegroupTime]) -> RenderableType:
    """The measurements as a table."""
    table = Table(title="splitting the tokens of two batches (ms, on this machine)", title_justify="left")
    for name in ("model", "layers x experts", "batch", "tokens", "median", "p90"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            row.model, f"{row.layers} x {row.experts}", str(row.batch), str(row.tokens), f"{row.median_ms:.2f}",
            f"{row.p90_ms:.2f}",
        )  # fmt: skip
    return table


def regrouping_json(rows: list[RegroupTime]) -> dict[str, list[dict[str, object]]]:
    """The measurements as data."""
    return {"regrouping": [asdict(row) for row in rows]}
