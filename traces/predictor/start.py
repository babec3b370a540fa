"""How a path predictor starts: with what the profile says of each token by itself.

Without a start a token's embedding is learnt from the few rows that hold it, which takes many passes. The statistics of
tokens are known at once: their log-odds over popularity, in as many dimensions as embeddings have. Training adds what
the prompt and earlier tokens say.
"""

from collections.abc import Sequence

import numpy as np
import torch

from traces.predictor.network import PathPredictor, known_ids
from traces.predictor.sequences import PathSequence

# A token counts as if it had been seen so many times more, with routes as popular as any token's.
_PRIOR_ROWS = 2.0
# The first dimension of all embeddings, where those of tokens' statistics have a length of about 1: the net divides
# states by their size, which would hide how much a token says.
_CONSTANT = 3.0
_NOISE = 0.01
_LEAST_SHARE = 1e-3


def start_from_statistics(net: PathPredictor, sequences: Sequence[PathSequence], seed: int) -> None:
    """Set embeddings and head to the best that they can say of ``sequences`` without context."""
    tokens = np.concatenate([known_ids(one.tokens, net.shape.vocabulary) for one in sequences])
    routes = np.concatenate([one.routes for one in sequences])
    seen, number, rows = np.unique(tokens, return_inverse=True, return_counts=True)
    layers, experts = net.shape.layers, net.shape.experts
    counts = np.zeros((len(seen), layers, experts + 1), np.float32)
    for slot in range(routes.shape[2]):
        np.add.at(counts, (number[:, None], np.arange(layers), routes[:, :, slot]), 1)  # -1 is the last column
    taken = torch.from_numpy(counts[:, :, :experts].reshape(len(seen), -1))
    times = torch.from_numpy(rows).float().unsqueeze(1)
    popular = taken.sum(dim=0) / times.sum()
    odds = _log_odds((taken + _PRIOR_ROWS * popular) / (times + _PRIOR_ROWS)) - _log_odds(popular)
    rank = min(net.shape.width - 1, *odds.shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        _, _, directions = torch.svd_lowrank(times.sqrt() * odds, q=rank, niter=4)
        told = odds @ directions
        size = ((times * told.square()).sum() / times.sum()).sqrt().clamp(min=1e-6)
        embedding = _NOISE * torch.randn(net.stacks.shared.weight.shape, generator=generator)
        embedding[:, 0] = _CONSTANT
        embedding[torch.from_numpy(seen), 1 : 1 + rank] += told / size
        net.stacks.shared.weight.copy_(embedding)
        # States arrive at the head with a root mean square of 1.
        shrunk = (net.shape.width / (_CONSTANT**2 + 1)) ** 0.5
        net.head.weight.zero_()
        net.head.weight[:, 1 : 1 + rank] = directions * size / shrunk
        net.head.bias.copy_(_log_odds(popular))


def _log_odds(share: torch.Tensor) -> torch.Tensor:
    return share.clamp(_LEAST_SHARE, 1 - _LEAST_SHARE).logit()
