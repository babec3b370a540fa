"""What the rows of a step wish for, as the requests of the step: each expert once a moment."""

import numpy as np

from sim.plan import Requests


def merged(moment: np.ndarray, call: np.ndarray, expert: np.ndarray, priority: np.ndarray) -> Requests:
    """Requests of wishes given one a row (all (N,)) in any order: one an expert and moment, at its best priority.

    At equal priority the smaller expert goes first. ``priority`` is smaller for sooner; a moment's wishes for one
    expert are all for one call.
    """
    order = np.lexsort((expert, priority, moment))
    moment, call, expert, priority = (np.asarray(a, np.int64)[order] for a in (moment, call, expert, priority))
    width = int(expert.max(initial=0)) + 1
    # Wishes stand best first, so the first of each expert and moment is its best.
    _, first = np.unique(moment * width + expert, return_index=True)
    kept = np.sort(first)
    return Requests.build(moment[kept], call[kept], expert[kept], priority[kept])
