"""Merge and Reindex of ExpertFlow's token scheduler, on the caches of transformers: keys and values change batches.

A batch's cache holds its sequences side by side, of one length, padded on the left. *Merge* puts the caches of batches
one below the other; *Reindex* takes the rows of a new batch out of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, EncoderDecoderCache


@dataclass
class KvRows:
    """What a batch has cached: ``cache``, the ``sequences`` of its rows, and which places count, ``valid`` (B, T).

    ``read`` (B, N) are the places of an encoder's output that count, for a cache of cross-attention.
    """

    cache: Any
    sequences: list[int]
    valid: torch.Tensor
    read: torch.Tensor | None = None


def merge(batches: Sequence[KvRows]) -> KvRows:
    """One batch of all rows, in order; shorter ones are padded on the left."""
    caches = [one.cache for one in batches]
    sequences = [sequence for one in batches for sequence in one.sequences]
    if isinstance(caches[0], EncoderDecoderCache):
        # What an encoder read has its padding on the right.
        whole = EncoderDecoderCache(
            _joined([one.self_attention_cache for one in caches], left=True),
            _joined([one.cross_attention_cache for one in caches], left=False),
        )
        whole.is_updated = dict.fromkeys(range(len(whole.cross_attention_cache.layers)), True)
        read = _below([one.read for one in batches if one.read is not None], left=False)
        return KvRows(whole, sequences, _below([one.valid for one in batches], left=True), read)
    return KvRows(_joined(caches, left=True), sequences, _below([one.valid for one in batches], left=True))


def reindex(rows: KvRows, sequences: Sequence[int]) -> KvRows:
    """The rows of ``sequences``, in that order, without places that count for none of them."""
    index = torch.tensor([rows.sequences.index(one) for one in sequences])
    valid = rows.valid[index]
    first = int(valid.any(dim=0).int().argmax())
    cache, read = rows.cache, None
    if isinstance(cache, EncoderDecoderCache):
        assert rows.read is not None
        cut = _chosen(cache.self_attention_cache, index, first)
        whole = EncoderDecoderCache(cut, _chosen(cache.cross_attention_cache, index, 0))
        whole.is_updated, read = dict(cache.is_updated), rows.read[index]
    else:
        whole = _chosen(cache, index, first)
    return KvRows(whole, list(sequences), valid[:, first:], read)


def _joined(caches: Sequence[Any], left: bool) -> DynamicCache:
    layers = zip(*(one.layers for one in caches), strict=True)
    return _cache(
        [
            (_below([one.keys for one in each], left, -2), _below([one.values for one in each], left, -2))
            for each in layers
        ]
    )


def _chosen(cache: Any, index: torch.Tensor, first: int) -> DynamicCache:
    return _cache([(one.keys[index][:, :, first:], one.values[index][:, :, first:]) for one in cache.layers])


def _cache(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _below(parts: Sequence[torch.Tensor], left: bool, place: int = -1) -> torch.Tensor:
    """Tensors one below the other, their dimension ``place`` filled up with zeros to the longest."""
    longest = max(one.shape[place] for one in parts)
    fills = [longest - one.shape[place] for one in parts]
    behind = [0, 0] * (-place - 1)
    return torch.cat(
        [pad(one, [*behind, *((fill, 0) if left else (0, fill))]) for one, fill in zip(parts, fills, strict=True)]
    )
