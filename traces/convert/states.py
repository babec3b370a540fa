"""Router inputs that a record brings, stored as a capture stores them: projected, in a few bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.capture.batches import prefill_level
from traces.embeddings import Basis
from traces.schema import DECODE
from traces.spool import Spool, give_back_pages
from traces.statistics.embedding_price import Keyed, choose_basis
from traces.trace import Trace, validate

# The basis is chosen by so many rows, spread evenly: its price is a search of all of them for each layer. Copies of
# them lie in memory.
_TRIED = 2000
_TRIED_BYTES = 2**25
_ROWS = 64


def embedded(trace: Trace, states: np.ndarray, folder: Path | None = None) -> Trace:
    """The trace with the embeddings of ``states`` (T, L, H), the router inputs of all of its rows.

    The embedding layer's output, level 0, is zero: engines do not record it. Embeddings wait in files without a name in
    ``folder``.
    """
    levels, level = trace.n_layers + 1, prefill_level(trace.n_layers)
    basis, about = _chosen(trace, states)
    about |= {"prefill_layer": level, "level_0": "not recorded, zero"}
    decode, prefill = np.flatnonzero(trace.phase == DECODE), trace.prefill_rows
    stored, early = Spool(np.int8, folder), Spool(np.int8, folder)
    for some in _blocks(decode):
        stored.add(basis.quantise(_levels(states[some])))
        give_back_pages()
    for some in _blocks(prefill):
        early.add(basis.quantise(np.asarray(states[some, level - 1]), level))
        give_back_pages()
    made = replace(
        trace,
        meta=trace.meta | {"embedding": about, "notes": [*trace.meta["notes"], _NOTE]},
        embeddings=stored.read() if len(stored) else np.empty((0, levels, basis.dims), np.int8),
        prefill_embeddings=early.read() if len(early) else np.empty((0, basis.dims), np.int8),
        embedding_scale=basis.scale,
    )
    validate(made)
    return made


def _chosen(trace: Trace, states: np.ndarray) -> tuple[Basis, dict[str, Any]]:
    """The basis by some of the rows, and what meta says of it."""
    tried = trace.decode_rows if len(trace.decode_rows) else np.arange(trace.n_rows)
    most = min(len(tried), _TRIED, max(_TRIED_BYTES // states[:1].nbytes, 16))
    tried = tried[np.linspace(0, len(tried) - 1, most).astype(int)]
    keyed = Keyed(_levels(states[tried]), trace.experts[tried], (trace.split == "eval")[trace.sequence[tried]])
    return choose_basis([keyed], trace.n_experts, None, None, 0)


_NOTE = "the embedding layer's output is not recorded: level 0 of the embeddings is zero"


def _levels(states: np.ndarray) -> np.ndarray:
    """(n, L+1, H) of (n, L, H): a level of zeros before them."""
    return np.concatenate([np.zeros_like(states[:, :1]), states], axis=1)


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
