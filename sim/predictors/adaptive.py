"""Where to predict, and how far ahead: DoMoE's adaptive expert prediction.

A model has L routed layers. A prediction invoked at layer l is made before l runs, with what is known then (point l of
a step), and serves l and the layers after it until the next one; the first layer always has one. With the offset

    d(l) = 0 where a prediction is invoked at l, else d(l - 1) + 1

the expected time of a token is modelled as

    sum over layers l of  x_l c_pred + miss[d(l)] c_load

where ``miss[d]`` is the chance that a needed expert was not predicted d layers after the prediction, estimated on
tokens of the profile split that are kept out of the tables. The paper calls solving this impractical and samples. It is
a shortest path over layers, exact in O(L^2), also when each layer has a chance of its own. That matters: large offsets
occur at late layers alone, so an average by offset mixes up how hard those are with what the offset does. The model
leaves out that a prefetch needs time to arrive, that the cache holds some experts anyway, and what wrong prefetches
cost the link.

The paper says of its own choice only that it is "a sampling-based statistical method to select an optimal set of
prediction layers". What it samples, for the chances too, can only be tokens: `sampled` is that reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.predictors.base import top
from sim.predictors.neighbours import Neighbours
from sim.view import prompts
from traces.trace import Trace

SAMPLE = 200
"""Tokens on which the chance of a misprediction is estimated, by default."""


def objective(layers: Sequence[int], miss: np.ndarray, predict_ns: float, load_ns: float) -> float:
    """Expected nanoseconds of a token with predictions at ``layers``, 0 among them.

    ``miss`` is the chance of a misprediction by offset (L,), as the paper has it, or (L, L) at each layer (second axis)
    of a prediction at another.
    """
    chance = _by_layer(miss)
    last = np.zeros(len(chance), np.int64)
    last[list(layers)] = list(layers)
    serving = np.maximum.accumulate(last)
    return len(set(layers)) * predict_ns + load_ns * float(chance[serving, np.arange(len(chance))].sum())


def shortest(miss: np.ndarray, predict_ns: float, load_ns: float) -> tuple[int, ...]:
    """The layers that minimise ``objective``, exactly; of equally good sets one with the fewest predictions.

    ``best[j] = min over i < j of best[i] + predict_ns + load_ns sum(miss[i, i:j])`` is the least cost of the first j
    layers when a prediction at i serves i to j - 1.
    """
    n_layers = len(miss)
    until = np.cumsum(np.triu(_by_layer(miss)), axis=1)  # [i, j]: layers i to j
    best = [(0.0, 0)] + [(np.inf, 0)] * n_layers
    origin = [0] * (n_layers + 1)
    for end in range(1, n_layers + 1):
        span = predict_ns + load_ns * until[:end, end - 1]
        cost, count, origin[end] = min((best[i][0] + span[i], best[i][1] + 1, i) for i in range(end))
        best[end] = (cost, count)
    layers = [origin[n_layers]]
    while layers[-1]:
        layers.append(origin[layers[-1]])
    return tuple(reversed(layers))


def _by_layer(miss: np.ndarray) -> np.ndarray:
    """Chances by offset (L,) as those of each layer and prediction (L, L)."""
    if miss.ndim == 2:
        return miss
    offset = np.arange(len(miss)) - np.arange(len(miss))[:, None]
    return miss[np.maximum(offset, 0)]


def held_out(profile: Sequence[Trace], seed: int) -> tuple[list[Trace], list[Trace]]:
    """Split profiles in two: sequences for tables, and about a fifth of each domain's for estimating.

    A domain of one sequence keeps it; there may be nothing to estimate on.
    """
    rng = np.random.default_rng(seed)
    rest, out = [], []
    for trace in profile:
        away = np.zeros(trace.n_sequences, bool)
        for domain in np.unique(trace.domain):
            mine = rng.permutation(np.flatnonzero(trace.domain == domain))
            away[mine[: -(-len(mine) // 5) if len(mine) > 1 else 0]] = True
        if away.any():
            out.append(trace.keep(away))
        rest.append(trace.keep(~away))
    return rest, out


@dataclass(frozen=True)
class Estimate:
    """Experts that sampled tokens took, and those of them that were not predicted, (T, L, L) int64 both.

    First axis: the token; second: the layer at which the prediction was invoked; third: the layer of the expert.
    """

    wrong: np.ndarray
    needed: np.ndarray

    def by_offset(self) -> np.ndarray:
        """Chance of a misprediction by offset (L,), over all layers; 1 where nothing can be told."""
        counts = (self.wrong.sum(axis=0), self.needed.sum(axis=0))
        return _share(*(np.array([np.trace(a, offset) for offset in range(len(a))]) for a in counts))

    def by_layer(self) -> np.ndarray:
        """Chance of a misprediction of each layer by each prediction (L, L); 1 where nothing can be told."""
        return _share(self.wrong.sum(axis=0), self.needed.sum(axis=0))

    def by_token(self) -> np.ndarray:
        """The same of each token (T, L, L)."""
        return _share(self.wrong, self.needed)


def sampled(found: Estimate, predict_ns: float, load_ns: float) -> tuple[int, ...]:
    """The layers at which most of the sampled tokens would have had a prediction, each for itself.

    For each token the layers that would have been best for it are found, from which of its own experts every prediction
    misses. As many layers are taken as the tokens have on average, those that most of them have; the first is always
    one. Of layers that equally many have, the earlier ones are taken.
    """
    sets = [shortest(miss, predict_ns, load_ns) for miss in found.by_token()]
    if not sets:
        return (0,)
    votes = np.bincount(np.concatenate(sets), minlength=found.wrong.shape[1])
    many = round(sum(map(len, sets)) / len(sets))
    return tuple(sorted(np.argsort(-votes, kind="stable")[:many].tolist()))


def _share(wrong: np.ndarray, needed: np.ndarray) -> np.ndarray:
    return np.divide(wrong, needed, out=np.ones(wrong.shape), where=needed > 0)


def estimate(predictor: Neighbours, samples: Sequence[Trace], fetch: int, seed: int, tokens: int = SAMPLE) -> Estimate:
    """Try all predictions of ``fetch`` experts a layer on up to ``tokens`` random decode rows of ``samples``."""
    n_layers = predictor.tables[0].paths.shape[1]
    counts = [len(trace.decode_rows) if trace.embeddings is not None else 0 for trace in samples]
    drawn = np.sort(np.random.default_rng(seed).permutation(sum(counts))[:tokens])
    wrong, needed = (np.zeros((len(drawn), n_layers, n_layers), np.int64) for _ in range(2))
    for trace, first, count in zip(samples, np.cumsum([0, *counts]), counts, strict=False):
        here = (drawn >= first) & (drawn < first + count)
        mine = drawn[here] - first
        if not len(mine) or trace.embeddings is None:
            continue
        rows = trace.decode_rows[mine]
        chosen = predictor.consulted(prompts(trace), trace.n_sequences)[trace.sequence[rows]]
        for point in range(n_layers):
            level = predictor.query_level(point)
            scores = predictor.vote(trace.embeddings[mine, level], chosen, level, range(point, n_layers))
            taken = trace.experts[rows, point:]
            wrong[here, point, point:] = missed(top(scores, fetch), taken).sum(axis=2)
            needed[here, point, point:] = (taken >= 0).sum(axis=2)
    return Estimate(wrong, needed)


def missed(predicted: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Which experts ``taken`` (R, L, K), -1 for none, are not among those ``predicted`` (R, L, F): (R, L, K) bool."""
    return (taken >= 0) & ~(taken[..., :, None] == predicted[..., None, :]).any(axis=-1)
