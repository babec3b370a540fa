"""What the path rule has learned of a model's routes, and the file that holds it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_of
from safetensors.numpy import save as as_safetensors

from ground.errors import InputError
from ground.files import atomic_path, check_regular
from traces.paths.state import FEATURES, HEADS, LEARNED, lags_of
from traces.weight_files import record_of

_RECORD = "paths"
_HALF = ("path", "path_sums", "topic_in", "topic_out")
"""Fields stored in 16 bits."""
_LARGEST = 65504


@dataclass(frozen=True)
class PathModel:
    """``learned`` fields of `traces.paths.state.Paths`, and a ``record`` of what they were learned from."""

    learned: Mapping[str, np.ndarray]
    record: Mapping[str, Any]
    sha256: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts a layer."""
        layers, experts = self.learned["share"].shape
        return layers, experts

    @staticmethod
    def of(learned: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> "PathModel":
        """A model as it is read back from its file."""
        return PathModel({name: _widened(name, _stored(name, learned[name])) for name in LEARNED}, record)

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, whole or not at all."""
        about = json.dumps(dict(self.record), allow_nan=False, sort_keys=True)
        arrays = {name: _stored(name, array) for name, array in self.learned.items()}
        with atomic_path(path) as part:
            part.write_bytes(as_safetensors(arrays, metadata={_RECORD: about}))

    @staticmethod
    def load(path: str | Path) -> "PathModel":
        """Read a file. Raises InputError for one that is none, OSError."""
        check_regular(path)
        data = Path(path).read_bytes()
        try:
            stored = arrays_of(data)
            record = record_of(data, _RECORD)
            if fault := _fault(stored):
                raise ValueError(fault)
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            why = str(error).split("\n")[0] or type(error).__name__
            raise InputError(f"{path}: not what `python -m traces learn` writes ({why:.200})") from None
        learned = {name: _widened(name, stored[name]) for name in LEARNED}
        return PathModel(learned, record, hashlib.sha256(data).hexdigest())


def _stored(name: str, array: np.ndarray) -> np.ndarray:
    if name in _HALF:
        array = np.clip(array, -_LARGEST, _LARGEST).astype(np.float16)
    return np.ascontiguousarray(array)


def _widened(name: str, stored: np.ndarray) -> np.ndarray:
    return stored if name == "lags" else stored.astype(np.float32)


def _fault(stored: Mapping[str, np.ndarray]) -> str | None:
    """What keeps arrays of a file from being a model's, in a few words."""
    if set(stored) != set(LEARNED):
        return f"lacks or does not know array {min(set(stored) ^ set(LEARNED))!r}"
    if stored["share"].ndim != 2 or stored["topic_in"].ndim != 4:
        return "share and topic_in have other dimensions"
    (layers, experts), rank = stored["share"].shape, stored["topic_in"].shape[3]
    lags, path = stored["lags"], (layers, experts, len(stored["lags"]), experts)
    shapes = {
        "lags": lags_of(layers).shape, "heads": (HEADS, FEATURES), "head_sums": (HEADS, FEATURES), "reach": lags.shape,
        "reach_sums": lags.shape, "path": path, "path_sums": path, "share": (layers, experts), "visits": (layers,),
        "topic_in": (3, layers, experts, rank), "topic_out": (HEADS, layers, rank, experts),
        "topic_mean": (3, layers, rank),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = stored[name]
        if array.shape != shape:
            return f"{name} is {array.shape}, expected {shape}"
        if name != "lags" and array.dtype not in (np.float16, np.float32):
            return f"{name} is {array.dtype}, expected floats"
        if not np.isfinite(array).all() or (name.endswith("_sums") and (array <= 0).any()):
            return f"{name} holds numbers that it cannot"
    if lags.dtype != np.int64 or not np.array_equal(lags, lags_of(layers)):
        return "its lags are others"
    return None
