"""What a trace consists of: its arrays, their types, and the sizes that follow from them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

PREFILL, DECODE = 0, 1
"""The phases of a token: of a prompt, read all at once, or generated one by one."""
SPLITS = ("profile", "eval")
ROW_ARRAYS = ("experts", "token", "sequence", "position", "phase")
SEQUENCE_ARRAYS = ("domain", "split", "sequence_id")
PREDICTED = ("predicted_experts", "predicted_probs")
OPTIONAL_ROW_ARRAYS = ("gates", "probs", "prob_experts", "lookahead", *PREDICTED)
OPTIONAL = (*OPTIONAL_ROW_ARRAYS, "embeddings", "embedding_scale", "prefill_embeddings")
DTYPES = {
    "layers": np.int32, "experts": np.int16, "token": np.int32, "sequence": np.int32, "position": np.int32,
    "phase": np.uint8, "gates": np.float16, "probs": np.uint8, "prob_experts": np.int16, "embeddings": np.int8,
    "embedding_scale": np.float32, "prefill_embeddings": np.int8, "lookahead": np.int16, "predicted_experts": np.int16,
    "predicted_probs": np.uint8,
}  # fmt: skip
FILE_ARRAYS = frozenset({"meta", *DTYPES, *SEQUENCE_ARRAYS})


@dataclass(frozen=True, eq=False)
class TraceArrays:
    """Routes of T tokens (rows) of S sequences over L routed layers, top K of E experts.

    Rows are ordered by (sequence, position), each sequence's together and without gaps, its prefill before its decode.
    Arrays marked None are optional. `traces.validation.validate` states every rule.
    """

    meta: dict[str, Any]  # strict JSON: schema, model {name, experts, top_k, ...}, captured, text, decoding, notes, ...
    layers: np.ndarray  # (L,) int32: model layer number of each routed layer, increasing
    experts: np.ndarray  # (T, L, K) int16: ids in router order, -1 none (dropped, or fewer than K)
    token: np.ndarray  # (T,) int32: token id, -1 unknown
    sequence: np.ndarray  # (T,) int32: index into the sequence arrays
    position: np.ndarray  # (T,) int32: place in the sequence
    phase: np.ndarray  # (T,) uint8: PREFILL or DECODE
    domain: np.ndarray  # (S,) text
    split: np.ndarray  # (S,) text: profile or eval
    sequence_id: np.ndarray  # (S,) text, unique
    gates: np.ndarray | None = None  # (T, L, K) float16: weights as the model used them, 0 where the expert is -1
    probs: np.ndarray | None = None  # (T, L, E) uint8: router probability x 255, rounded; (T, L, M) with prob_experts
    prob_experts: np.ndarray | None = None  # (T, L, M) int16: ids of the largest M, where M < E
    embeddings: np.ndarray | None = None  # (Td, L+1, D) int8, decode rows: embedding layer's output, then router inputs
    embedding_scale: np.ndarray | None = None  # (L+1,) float32: stored x scale is the projected embedding
    prefill_embeddings: np.ndarray | None = None  # (Tp, D) int8, prefill rows, at level meta.embedding.prefill_layer
    lookahead: np.ndarray | None = None  # (T, L, K) int16: what layer l+1's router says of layer l's input; last -1
    predicted_experts: np.ndarray | None = None  # (T, L, M) int16: a path predictor's ranking, -1 where it says nothing
    predicted_probs: np.ndarray | None = None  # (T, L, M) uint8: its probabilities x 255, rounded
    source: str = ""  # the file it was loaded from, not stored
    sha256: str = ""  # of that file's bytes, not stored

    @property
    def n_rows(self) -> int:
        """T, tokens."""
        return len(self.sequence)

    @property
    def n_layers(self) -> int:
        """L, routed layers."""
        return len(self.layers)

    @property
    def top_k(self) -> int:
        """K, slots of a route."""
        return int(self.experts.shape[2])

    @property
    def n_experts(self) -> int:
        """E, routed experts of a layer."""
        return int(self.meta["model"]["experts"])

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.sequence_id)

    @property
    def decode_rows(self) -> np.ndarray:
        """(Td,) indices of the decode rows, the order of ``embeddings``."""
        return np.flatnonzero(self.phase == DECODE)

    @property
    def prefill_rows(self) -> np.ndarray:
        """(Tp,) indices of the prefill rows, the order of ``prefill_embeddings``."""
        return np.flatnonzero(self.phase == PREFILL)

    @property
    def offsets(self) -> np.ndarray:
        """(S+1,) int64: sequence s has the rows offsets[s] to offsets[s+1]-1."""
        return np.searchsorted(self.sequence, np.arange(self.n_sequences + 1))

    def row_split(self, split: str) -> np.ndarray:
        """(T,) bool: the row's sequence is of this split, profile or eval."""
        return (self.split == split)[self.sequence]
