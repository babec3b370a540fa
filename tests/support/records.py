"""Routing records as other tools write them."""

import os
from pathlib import Path

import numpy as np
import pytest

from traces.trace import Trace


def routes(rows: int, layers: int = 2, k: int = 2, experts: int = 8, seed: int = 0) -> np.ndarray:
    """(rows, layers, k) random routes of distinct ids, none of them all zero."""
    return np.random.default_rng(seed).random((rows, layers, experts)).argsort(axis=2)[:, :, :k].astype(np.int16)


def notes(trace: Trace) -> str:
    return "\n".join(trace.meta["notes"])


def published(name: str) -> Path:
    """A routing record that others published, in the folder that MOE_REPLAY_ROUTES names; skips where there is none."""
    folder = os.environ.get("MOE_REPLAY_ROUTES")
    path = Path(folder or ".") / name
    if folder is None or not path.is_file():
        pytest.skip(f"no published {name} (MOE_REPLAY_ROUTES names the folder of published routing records)")
    return path
