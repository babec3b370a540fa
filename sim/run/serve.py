"""A cache driven access by access, on demand alone and without time, as caches are compared in the literature."""

import numpy as np

from sim.run.slots import ABSENT, RESIDENT, ExpertCache, waves
from sim.workload import next_calls


def serve(cache: ExpertCache, offsets: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Drive a cache through the calls ``experts[offsets[i]:offsets[i+1]]``, one after another.

    Returns hits (N,) bool, one a look-up. Calls of one expert each are the access-by-access caches of the literature.
    """
    hit = np.zeros(len(experts), bool)
    following = next_calls(offsets, experts)
    for call in range(len(offsets) - 1):
        first, last = int(offsets[call]), int(offsets[call + 1])
        ids = experts[first:last].tolist()
        for i, expert in enumerate(ids, first):
            hit[i] = cache.state[expert] == RESIDENT
            cache.needed(expert, int(following[i]))
        for wave in waves(cache, ids) if ids else []:
            cache.pin(wave)
            for expert in wave:
                if cache.state[expert] == ABSENT:
                    if cache.allot(expert, call, demand=True) is None:
                        raise RuntimeError(f"call {call}: no slot for expert {expert}, though its wave fits")
                    cache.landed(expert)
            cache.unpin(wave)
    return hit
