"""How similar are a token's embeddings at different layers? The paper's Figure 2 gives their cosines.

If they are similar, a prediction made at one layer still holds some layers later.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure
from analysis.pages.sheets import Sheet, notes, number
from analysis.published import domoe
from analysis.workloads import ModelTraces, loaded
from ground.errors import InputError
from traces.statistics.recall import unit_vectors

_ROWS = 512  # decode rows at a time: bounds memory at _ROWS x (L + 1)^2 floats
_APART = (2, 4, 8, 16, 31)


def layer_cosines(embeddings: np.ndarray) -> np.ndarray:
    """Mean cosine of a token's embeddings at each two levels, (L + 1, L + 1), from (Td, L + 1, D) integers.

    Level 0 is the embedding layer's output, level ``1 + l`` routed layer ``l``'s router input. Rows where either vector
    is zero are left out of that pair's mean; NaN where none is left.
    """
    levels = embeddings.shape[1]
    total, count = np.zeros((levels, levels)), np.zeros((levels, levels))
    for start in range(0, len(embeddings), _ROWS):
        rows = embeddings[start : start + _ROWS]
        units = unit_vectors(rows.reshape(-1, rows.shape[2])).reshape(rows.shape)
        there = units.any(axis=2).astype(float)
        total += np.einsum("tad,tbd->ab", units, units, optimize=True)
        count += there.T @ there
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def measure(options: ExperimentOptions) -> Data:
    """The matrix of each model whose traces hold embeddings. Raises InputError if none does."""
    models = [entry for model in options.models if (entry := _measured(model))]
    if not models:
        raise InputError("no trace holds the array embeddings, whose similarity is asked for; capture one with them")
    return {"models": models, "made": options.made()}


def _measured(model: ModelTraces) -> Data | None:
    held = [trace for source in model.sources if (trace := loaded(source.path)).embeddings is not None]
    if not held:
        return None
    matrix = layer_cosines(np.concatenate([trace.embeddings for trace in held if trace.embeddings is not None]))
    about = held[0].meta.get("embedding", {})
    record = _record(model)
    return {
        "model": model.name,
        "rows": int(sum(len(trace.decode_rows) for trace in held)),
        "stored_as": f"{about.get('dims', '?')} principal directions of {about.get('bits', '?')} bits",
        "cosine": [[round(float(v), 4) for v in row] for row in matrix],
        "adjacent_in_full": None if record is None else record["routing"]["adjacent_layer_cosine"],
    }


def _record(model: ModelTraces) -> Data | None:
    """The capture's own statistics (``capture --statistics``), from whole embeddings, if there are any of this model.

    They are looked for beside the traces and among the bundled ones, by the hash of the model's checkpoint.
    """
    checkpoint = loaded(model.sources[0].path).meta.get("captured", {}).get("checkpoint_sha256")
    bundled = Path(str(resources.files("traces")))
    for folder in (Path(model.sources[0].path).parent, bundled, bundled / "records"):
        for path in sorted(folder.glob("*_routing.json")):
            record = json.loads(path.read_text("utf-8"))
            if checkpoint and record.get("captured", {}).get("checkpoint_sha256") == checkpoint:
                return dict(record)
    return None


def sheets(data: Data) -> list[Sheet]:
    """Cosine by how far layers lie apart, of router inputs alone (levels from 1 on)."""
    says = domoe().said("Figure 2")
    rows = [["published", number(says.value), "", "> 0.99", *[""] * len(_APART)]]
    for entry in data["models"]:
        matrix = np.array(entry["cosine"])[1:, 1:]
        far = [number(_mean(np.diagonal(matrix, d))) for d in _APART]
        rows.append([f"{entry['model']}, stored", *_adjacent(np.diagonal(matrix, 1)), *far])
        if entry["adjacent_in_full"] is not None:
            whole = np.array(entry["adjacent_in_full"])
            rows.append([f"{entry['model']}, in full", *_adjacent(whole), *[""] * len(_APART)])
    stored = "; ".join(f"{entry['model']}: {entry['stored_as']}" for entry in data["models"])
    columns = ["embeddings", "adjacent, mean", "least", "most", *(f"{d} apart" for d in _APART)]
    title = "Figure 2: cosine of one token's embeddings at two layers"
    return [Sheet(title, columns, rows, notes("similarity", stored=stored))]


def _adjacent(pairs: np.ndarray) -> list[str]:
    return [number(_mean(pairs)), number(float(np.nanmin(pairs))), number(float(np.nanmax(pairs)))]


def _mean(values: np.ndarray) -> float | None:
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else None


def draw(data: Data, figure: Figure) -> None:
    """One matrix a model."""
    figure.set_size_inches(3.4 * len(data["models"]) + 1, 4.2)
    axes: Any = figure.subplots(1, len(data["models"]), squeeze=False)[0]
    image: Any = None
    for ax, entry in zip(axes, data["models"], strict=True):
        image = ax.imshow(np.array(entry["cosine"]), vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
        ax.set_title(f"{entry['model']}\n(small, trained)", fontsize=9)
        ax.set_xlabel("level (0: embedding layer)")
    axes[0].set_ylabel("level")
    figure.colorbar(image, ax=list(axes), label="mean cosine of a token's embeddings", fraction=0.03)


TITLE = "Figure 2: layer-to-layer similarity of embeddings"
EXPERIMENT = Experiment(70, "domoe-similarity", TITLE, __doc__, measure, sheets, draw)
