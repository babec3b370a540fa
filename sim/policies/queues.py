"""Caches that fetch on demand by rules of web and page caches (``sim.eviction_queues``)."""

from sim.policies.recency import Cache


class ARC(Cache):
    """Evict as ARC does."""

    name = "arc"
    summary = "cache, ARC: recency and frequency, shared out by ghosts"
    eviction = "arc"


class S3FIFO(Cache):
    """Evict as S3-FIFO does."""

    name = "s3-fifo"
    summary = "cache, S3-FIFO: a small queue before a main one that goes round"
    eviction = "s3-fifo"


class WTinyLFU(Cache):
    """Evict as W-TinyLFU does."""

    name = "w-tinylfu"
    summary = "cache, W-TinyLFU: a window, and a segmented LRU that the more frequent may enter"
    eviction = "w-tinylfu"
