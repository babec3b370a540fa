"""Nearest neighbours by cosine among integer vectors, for whole traces at once and equal to the bit for one row.

Float sums depend on their order, and libraries order them by the number of queries. Here all sums are of integers that
float32 holds exactly: every key is brought to a common length, ``scale``, and rounded, and ``scale`` is so chosen that
no sum with any admissible query reaches 2^24. The cosine is then exact up to that rounding of the keys (an angle of at
most sqrt(D) / 2 / scale). FAISS (Johnson et al., "Billion-scale similarity search with GPUs", 2019) does the search;
where it is not installed NumPy does, with the same bits.
"""

import math

import numpy as np

from ground.errors import InputError

_EXACT = 2**24 - 1
"""Integers up to this are exact in float32, and so are their sums."""
_BLOCK = 2**22
"""Scores in memory at once where ties are settled."""


class Index:
    """Keys (N, D) of any integer type, searched by brute force; the cosine with a vector of zeros is 0.

    ``norm`` is the greatest length that a query may have, by default what its type allows: a tighter one leaves more
    bits to the keys. Raises InputError for keys that are not integers, or no room for even one bit.
    """

    def __init__(self, keys: np.ndarray, norm: float | None = None) -> None:
        self.dims = _checked(keys, "keys").shape[1]
        limit = np.iinfo(keys.dtype)
        self.norm = max(-limit.min, limit.max) * math.sqrt(self.dims) if norm is None else norm
        self.scale = math.floor(_EXACT / max(self.norm, 1.0) - math.sqrt(self.dims) / 2)
        if self.scale < 1:
            raise InputError(f"search: {self.dims} dimensions of {keys.dtype} are too many to be exact; give a norm")
        lengths = _length(keys)[:, None]
        exact = np.divide(keys * float(self.scale), lengths, out=np.zeros(keys.shape), where=lengths > 0)
        self._keys = np.ascontiguousarray(np.rint(exact), np.float32)

    def __len__(self) -> int:
        return len(self._keys)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``min(k, N)`` nearest keys of each query (R, D), best first, ties to the smaller number.

        Returns their numbers (R, k) int64 and cosines (R, k) float32. Raises InputError for queries that are not
        integers, have other dimensions or are longer than ``norm``.
        """
        lengths = _length(_checked(queries, "queries", self.dims))
        if len(lengths) and lengths.max() > self.norm * (1 + 1e-9):
            raise InputError(f"search: a query of length {lengths.max():.1f}; expected at most {self.norm:.1f}")
        k = min(k, len(self))
        if not k or not len(queries):
            return np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32)
        scores, numbers = self._nearest(np.ascontiguousarray(queries, np.float32), k)
        whole = lengths[:, None] * float(self.scale)
        cosine = np.divide(scores, whole, out=np.zeros(scores.shape), where=whole > 0)
        return numbers, np.clip(cosine, -1, 1).astype(np.float32)  # rounding of the keys can lengthen them

    def _nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Exact integer scores and numbers of the nearest, ordered."""
        try:
            import faiss  # here, because every command imports the policies and few search
        except ImportError:
            return self._in_full(queries, k)
        more = min(k + 1, len(self))
        index = faiss.IndexFlatIP(self.dims)
        index.add(self._keys)
        scores, numbers = index.search(queries, more)
        # Which of equal ones FAISS returns is not defined: where they straddle the end, the rows are ordered in full.
        tied = np.flatnonzero(scores[:, k - 1] == scores[:, -1]) if more > k else np.zeros(0, np.int64)
        scores, numbers = scores[:, :k].astype(np.int64), numbers[:, :k]
        order = np.argsort(-(scores * len(self) + (len(self) - 1 - numbers)), axis=1)
        scores, numbers = np.take_along_axis(scores, order, 1), np.take_along_axis(numbers, order, 1)
        scores[tied], numbers[tied] = self._in_full(queries[tied], k)
        return scores, numbers

    def _in_full(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The same by sorting all scores: for ties, and where FAISS is not installed."""
        scores, numbers = np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.int64)
        rows = max(1, _BLOCK // len(self))
        for start in range(0, len(queries), rows):
            block = slice(start, start + rows)
            every = (queries[block] @ self._keys.T).astype(np.int64)
            numbers[block] = np.argsort(-every, axis=1, kind="stable")[:, :k]
            scores[block] = np.take_along_axis(every, numbers[block], 1)
        return scores, numbers


def _checked(vectors: np.ndarray, what: str, dims: int | None = None) -> np.ndarray:
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or dims not in (None, vectors.shape[1]):
        shape = getattr(vectors, "shape", type(vectors).__name__)
        raise InputError(f"search: {what} are {shape}; expected (rows, {dims or 'dimensions'})")
    if vectors.dtype.kind not in "iu":
        strange = vectors.dtype.kind == "f" and not np.isfinite(vectors).all()
        place = f", not finite in row {np.argwhere(~np.isfinite(vectors))[0][0]}" if strange else ""
        raise InputError(f"search: {what} are {vectors.dtype}{place}; expected integers")
    return vectors


def _length(vectors: np.ndarray) -> np.ndarray:
    """Euclidean length of each row, from an exact sum."""
    return np.sqrt(np.square(vectors, dtype=np.int64).sum(axis=1))
