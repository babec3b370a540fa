"""Learned predictors: a small net a layer that reads the layer's input and says which experts the next layers take.

ProMoE (X. Song et al., arXiv 2410.22134): for every routed layer a perceptron of two layers, trained on profiled
tokens, predicts experts a stride ahead from the hidden state that the layer's router reads.

Decided here:

* A trace holds projected embeddings, so these nets are narrower than the real ones. ``sim.policies.promoe`` charges for
  the real size. Inputs are brought to one length, which makes them independent of a trace's scale.
* A net's outputs are the next ``horizons`` layers, E experts each. It learns whether each is taken, with Adam (D. P.
  Kingma and J. Ba, arXiv 1412.6980) and a rate that falls to 0, in mini-batches from a seed. Layers beyond the last
  count for nothing. A score is p(z) = (1 + z / sqrt(4 + z^2)) / 2 of an output z, as steep at 0 as the logistic
  function, and the loss is the one whose slope is p - t for a target t, as cross-entropy is for the logistic function.
* The same bits come out whatever the number of threads, of rows, or the kind of processor. Operands of every product
  are rounded to whole multiples of a power of two, few enough bits that float64 sums them exactly in any order, and all
  else takes nothing but sums, products, quotients and roots, which are defined to the last bit.
* A trained net is rounded to whole numbers of 12 bits.
"""

from collections.abc import Sequence

import numpy as np

from ground.errors import InputError
from sim.view import View
from traces.trace import Trace

INPUT = 2**9
"""Length to which inputs are brought before they are rounded."""
WEIGHT = 2**12
"""The largest weight of a net after rounding."""
BIAS = 2**48
"""The largest bias: with such inputs and weights and up to 2^8 hidden units every sum stays below 2^53."""
RATE = 0.05
BATCH = 128
FINE, COARSE = 18, 14
"""Bits after the point of errors, and of weights, activations and their gradients, while training."""


class StrideNets:
    """One net for each point 0 to L - 1 of a step, which reads the embedding known then."""

    name = "stride-net"

    def __init__(
        self, profile: Sequence[Trace], horizons: int = 1, width: int = 64, epochs: int = 10, seed: int = 0
    ) -> None:
        x, routes, n_experts = _examples(profile)
        self.horizons = horizons
        given = (horizons, width, epochs, seed)
        self._weights = rounded(_trained(x, routes, n_experts, given)) if len(routes) else None

    def scores(self, view: View, point: int, layers: Sequence[int]) -> np.ndarray:
        """What the net of ``point`` says of ``layers`` (Rd, len(layers), E) float32, see ``Predictor``.

        0 for a layer beyond the net's horizons, and for all where there was nothing to learn from.
        """
        x = inputs(view.embedding(point))
        result = np.zeros((len(x), len(layers), view.n_experts), np.float32)
        if self._weights is None:
            return result
        first, bias, second, other, unit = (part[point] for part in self._weights)
        z = (np.maximum(x @ first + bias, 0) @ second + other) * unit
        score = chance(z).reshape(len(x), self.horizons, view.n_experts)
        for column, layer in enumerate(layers):
            if layer - point < self.horizons:
                result[:, column] = score[:, layer - point]
        return result


def chance(z: np.ndarray) -> np.ndarray:
    """(1 + z / sqrt(4 + z^2)) / 2, elementwise: between 0 and 1, and 1/2 for 0."""
    return (1 + z / np.sqrt(4 + z * z)) / 2


def inputs(embeddings: np.ndarray) -> np.ndarray:
    """Embeddings (..., D) at length ``INPUT``, rounded: float64 of whole numbers; zeros stay zeros."""
    wide = embeddings.astype(np.float64)
    length = np.sqrt(np.einsum("...i,...i->...", wide, wide))[..., None]
    return np.rint(np.divide(wide * INPUT, length, out=np.zeros_like(wide), where=length > 0))


def rounded(weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Weights and biases (P, ...) of both layers as float64 of whole numbers, and what one unit of a logit is worth."""
    first, bias, second, other = (np.asarray(w, np.float64) for w in weights)
    scales = [WEIGHT / np.maximum(np.abs(w).max(axis=(1, 2), keepdims=True), 1e-12) for w in (first, second)]
    # Inputs are INPUT times those that the net was trained with.
    both = INPUT * scales[0] * scales[1]
    return [
        np.rint(first * scales[0]),
        np.clip(np.rint(bias * INPUT * scales[0]), -(2**30), 2**30),
        np.rint(second * scales[1]),
        np.clip(np.rint(other * both), -BIAS, BIAS),
        1 / both,
    ]


def _examples(profile: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray, int]:
    """Inputs (L, M, D) of length 1 at points 0 to L - 1, routes (M, L, K) of decoded tokens, and E."""
    x, routes = [], []
    for trace in profile:
        if trace.embeddings is None:
            raise InputError(f"profile {trace.source or 'trace'}: no array embeddings, which the nets learn from")
        x.append(inputs(trace.embeddings[:, : trace.n_layers]) / INPUT)
        routes.append(trace.experts[trace.decode_rows])
    together = np.concatenate(x).transpose(1, 0, 2)
    return np.ascontiguousarray(together), np.concatenate(routes), profile[0].n_experts


def _trained(x: np.ndarray, routes: np.ndarray, n_experts: int, given: tuple[int, int, int, int]) -> list[np.ndarray]:
    """Weights and biases of all nets, trained side by side."""
    horizons, width, epochs, seed = given
    rng = np.random.default_rng(seed)
    (nets, _, dims), outputs = x.shape, horizons * n_experts
    shapes = [(nets, dims, width), (nets, 1, width), (nets, width, outputs), (nets, 1, outputs)]
    scale = [np.sqrt(2.0), 0, 1 / np.sqrt(width), 0]
    weights = [rng.standard_normal(shape) * factor for shape, factor in zip(shapes, scale, strict=True)]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    total = epochs * -(-len(routes) // BATCH)
    step, fading = 0, [1.0, 1.0]
    for _ in range(epochs):
        order = rng.permutation(len(routes))
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            gradients = _gradients(x[:, rows], *_targets(routes[rows], n_experts, horizons), weights)
            fading = [fading[0] * 0.9, fading[1] * 0.999]
            rate = RATE * (1 - step / total) * np.sqrt(1 - fading[1]) / (1 - fading[0])
            step += 1
            for weight, gradient, (mean, square) in zip(weights, gradients, moments, strict=True):
                mean += 0.1 * (gradient - mean)
                square += 0.001 * (gradient * gradient - square)
                weight -= rate * mean / (np.sqrt(square) + 1e-8)
    return weights


def _targets(routes: np.ndarray, n_experts: int, horizons: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each expert is taken (L, B, horizons * E), and which outputs count (L, 1, horizons * E)."""
    rows, n_layers, _ = routes.shape
    taken = np.zeros((n_layers + horizons, rows, n_experts + 1))
    np.put_along_axis(taken[:n_layers], routes.transpose(1, 0, 2).astype(np.int64) % (n_experts + 1), 1, axis=2)
    layer = np.arange(n_layers)[:, None] + np.arange(horizons)
    target = taken[layer][..., :n_experts].transpose(0, 2, 1, 3).reshape(n_layers, rows, -1)
    counts = np.repeat((layer < n_layers).astype(np.float64), n_experts, axis=1)[:, None]
    return target, counts


def _gradients(
    x: np.ndarray, target: np.ndarray, counts: np.ndarray, weights: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Gradients of a batch's mean loss with respect to weights and biases, exact in any order of summing.

    Weights take 19 bits, activations and their gradients 22, errors 18: with up to 2^10 hidden units, 2^13 outputs and
    batches of 2^7 no sum of their products needs more than 53.
    """
    first, bias, second, other = weights
    rows = x.shape[1]
    into, out = _rounded(first, COARSE, 32), _rounded(second, COARSE, 32)
    hidden = _rounded(np.maximum(x @ into + bias, 0), COARSE, 256)
    error = _rounded((chance(hidden @ out + other) - target) * counts, FINE, 1)
    inner = _rounded((error @ out.transpose(0, 2, 1)) * (hidden > 0), COARSE, 256)
    return (
        x.transpose(0, 2, 1) @ inner / rows,
        inner.sum(axis=1, keepdims=True) / rows,
        hidden.transpose(0, 2, 1) @ error / rows,
        error.sum(axis=1, keepdims=True) / rows,
    )


def _rounded(values: np.ndarray, bits: int, most: float) -> np.ndarray:
    """``values`` to multiples of 2^-bits, and to at most ``most`` either way."""
    return np.clip(np.rint(values * 2.0**bits), -most * 2.0**bits, most * 2.0**bits) * 2.0**-bits
