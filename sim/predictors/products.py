"""Products of vectors of small whole numbers, exact in floating point, so that one row and a thousand give equal bits.

BLAS sums in an order that depends on the shapes. Sums of whole numbers do not depend on it, as long as every partial
sum is exact: below 2^24 in float32 and 2^53 in float64. By the inequality of Cauchy and Schwarz no partial sum exceeds
the product of both vectors' lengths.
"""

import numpy as np


def squares(vectors: np.ndarray) -> np.ndarray:
    """Sums of squares along the last axis (..., W) to (...), float64 of whole numbers below 2^53."""
    wide = vectors.astype(np.float64)
    return np.einsum("...i,...i->...", wide, wide)


def exact_product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """``one`` (n, W) times ``other`` (m, W) transposed, (n, m): in the narrower float that is exact for all of them."""
    most = float(squares(one).max(initial=0)) * float(squares(other).max(initial=0))
    if most < 2.0**48:
        return one.astype(np.float32) @ other.astype(np.float32).T
    return one.astype(np.float64) @ other.astype(np.float64).T


def cosines(product: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Cosines (n, m) float64 of ``product`` (n, m) and sums of squares (n,) and (m,); 0 with a vector of zeros."""
    length = np.sqrt(one)[:, None] * np.sqrt(other)
    return np.divide(product, length, out=np.zeros(product.shape), where=length > 0)
